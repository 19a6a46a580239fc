"""Any number of ranks: what rests on each, and predicted steps where the number is odd beside those where it is a power of two.

    python -m benchmarks.any_ranks state|weak|fixed [OUT.json] [--only PATTERN]   # exits with 1 where a line is missed

`state`: parameters, gradients and optimizer state of a rank under zero3, over what all ranks would hold in equal parts. `rests`
is what the account says of a step's end, `held` the most that is there between microbatches, messages under way included.

`weak`: as many rows per H100 on every cluster. `over` is a step over the line through the powers of two, in the logarithm of
the ranks.

`fixed`: one batch on ever more ranks, every step over that on one rank less.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import ClusterSpec
from autopar.cluster import resized
from autopar.ir.resting import of_program, on_rank
from benchmarks.harness import command_line
from benchmarks.models import LLAMA_8B, LLAMA_70B, Gpt, GptBlock, Llama, LlamaShape, next_token_loss
from tests.zoo.models import ADAMW

STATE_RANKS = (*range(2, 9), 24, 56, 96, 1000)
WEAK_RANKS = (16, 24, 32, 56, 64, 96, 128)
FIXED_RANKS = range(1, 10)
MOST_STATE, MOST_WEAK, MOST_FIXED = 1.01, 1.02, 1.0 + 1e-9
"""The lines."""


class Mlp(nn.Module):
    """The squared error of layers of one width on x: (batch, dim)."""

    def __init__(self, layers: int, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.mse_loss(x, y)


class Vit(nn.Module):
    """The loss of classifying images: (batch, 3, 224, 224) as ViT-L does: 196 patches and a class token."""

    def __init__(self, dim: int = 1024, heads: int = 16, layers: int = 24) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 16, 16)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, dim)), nn.Parameter(torch.zeros(197, dim))
        self.blocks = nn.ModuleList(GptBlock(dim, heads, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(images.shape[0], -1, -1), patches), 1) + self.places
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), labels)


@dataclass(frozen=True)
class Case:
    """A model, how to make a batch of so many rows for it, its loss, and rows per rank."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    rows: int
    loss_fn: Callable[..., Tensor] | None = None

    def compiled(self, cluster: ClusterSpec, rows: int, **options: Any) -> autopar.ParallelProgram:
        """The program for a batch of so many rows."""
        with torch.device("meta"):
            model, batch = self.model(), self.batch(rows)
        given = {"explain_s": 0.0, **options}
        return autopar.compile(
            model, cluster, batch, loss_fn=self.loss_fn, optimizer=ADAMW, options=autopar.Options(**given)
        )


def _ids(seq: int, rows: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, seq, dtype=torch.long), torch.zeros(rows, seq, dtype=torch.long)


def _vectors(dim: int, rows: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, dim), torch.zeros(rows, dim)


def _images(rows: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, 3, 224, 224), torch.zeros(rows, dtype=torch.long)


def _llama(shape: LlamaShape, seq: int, rows: int) -> Case:
    return Case(functools.partial(Llama, shape, seq), functools.partial(_ids, seq), rows)


def _mlp(layers: int, dim: int, rows: int) -> Case:
    return Case(functools.partial(Mlp, layers, dim), functools.partial(_vectors, dim), rows)


STATE = {"llama 6x1000": _llama(LlamaShape(6, 1000, 2731, 10, 5, 10007), 16, 8), "mlp 12x1537": _mlp(12, 1537, 8)}
WEAK = {
    "llama 8b": _llama(LLAMA_8B, 4096, 2),
    "llama 70b": _llama(LLAMA_70B, 4096, 1),
    "gpt-2 xl": Case(
        functools.partial(Gpt, 50257, 1024, 1600, 25, 48), functools.partial(_ids, 1024), 8, next_token_loss
    ),
    "mlp 24x8192": _mlp(24, 8192, 2048),
    "vit-l": Case(Vit, _images, 64),
}
FIXED = {
    "llama 4x1024": _llama(LlamaShape.of_width(4, 1024), 1024, 1),
    "gpt 6x1600": Case(
        functools.partial(Gpt, 50257, 1024, 1600, 25, 6), functools.partial(_ids, 1024), 1, next_token_loss
    ),
    "mlp 8x4096": _mlp(8, 4096, 64),
}


def h100(ranks: int) -> ClusterSpec:
    """So many H100, eight to a machine."""
    return resized(ClusterSpec.preset("dgx-h100", nodes=-(-ranks // 8)), ranks)


def state(program: autopar.ParallelProgram) -> dict[str, float]:
    """The state of a rank over an equal part of all."""
    stage, memory = program.lowered.stages[0], program.decision.account.stages[0].memory
    setting = program.decision.setting
    rests = sum(row.nbytes for p in stage.parameters.values() for row in on_rank(p, stage.mesh).rows(setting))
    part = sum(row.nbytes for row in of_program(program.ir, setting)) / stage.mesh.size
    microbatches = [memory.first, *([memory.actions] * (stage.microbatches - 2)), memory.last]
    sums = accumulate(sum(m.sums for m in one.values()) for one in microbatches[: stage.microbatches - 1])
    resting = sum(memory.resting[kind] for kind in ("parameters", "optimizer"))
    return {"rests": rests / part, "held": max(rests, resting + max(sums, default=0.0)) / part, "part_bytes": part}


def states(only: str) -> dict[str, Any]:
    """The state under zero3, by case, microbatches and ranks."""
    found: dict[str, Any] = {}
    for name, case in STATE.items():
        for microbatches in (1, 8):
            for ranks in STATE_RANKS:
                key = f"{name}, {microbatches} microbatches, {ranks} ranks"
                if only in key:
                    found[key] = state(
                        case.compiled(
                            h100(ranks),
                            case.rows * ranks,
                            strategy="zero3",
                            microbatches=microbatches,
                            mesh={"dp": ranks},
                        )
                    )
                    print(key, found[key], file=sys.stderr, flush=True)
    return {"cases": found, "worst": max(one["rests"] for one in found.values()), "line": MOST_STATE}


def _predicted(key: str, program: autopar.ParallelProgram) -> dict[str, Any]:
    plan, predicted = program.plan, program.predicted
    found = {"step_s": predicted.step_time_s, "plan": f"{plan.origin} {plan.show_meshes()}"}
    seconds = sum(program.timings.values())
    print(f"{key}: {found['step_s']:.6f} s, {found['plan']} (compiled in {seconds:.0f} s)", file=sys.stderr, flush=True)
    return found


def _step(key: str, case: Case, cluster: ClusterSpec, rows: int) -> dict[str, Any]:
    """The predicted step and its plan; why there is none where nothing fits."""
    try:
        return _predicted(key, case.compiled(cluster, rows, precision="bf16"))
    except autopar.AutoparError as error:
        print(f"{key}: {error}", file=sys.stderr, flush=True)
        return {"step_s": math.inf, "plan": f"{type(error).__name__}: {error}"}


def over_line(steps_s: Mapping[int, float]) -> dict[int, float]:
    """Steps of numbers of ranks that are no powers of two over the line through those that are."""
    powers = sorted(n for n in steps_s if n & (n - 1) == 0)
    over = {}
    for low, high in pairwise(powers):
        for n in steps_s:
            if low < n < high:
                share = math.log(n / low) / math.log(high / low)
                over[n] = steps_s[n] / (steps_s[low] * (1 - share) + steps_s[high] * share)
    return over


def weak(only: str) -> dict[str, Any]:
    """Steps with equal rows per rank, by case and ranks."""
    found: dict[str, Any] = {}
    for name, case in WEAK.items():
        if only in name:
            steps = {n: _step(f"{name} on {n}", case, h100(n), case.rows * n) for n in WEAK_RANKS}
            over = over_line({n: one["step_s"] for n, one in steps.items()})
            found[name] = {"steps": steps, "over": over}
    return {"cases": found, "worst": max(max(one["over"].values()) for one in found.values()), "line": MOST_WEAK}


def fixed(only: str, batches: Iterable[int] = (24, 32, 56)) -> dict[str, Any]:
    """Steps of one batch on ever more ranks, by case and rows."""
    found: dict[str, Any] = {}
    for name, case in FIXED.items():
        for rows in batches:
            key = f"{name}, {rows} rows"
            if only in key:
                steps = {n: _step(f"{key} on {n}", case, h100(n), rows * case.rows) for n in FIXED_RANKS}
                over = {n: steps[n]["step_s"] / steps[n - 1]["step_s"] for n in FIXED_RANKS if n - 1 in steps}
                found[key] = {"steps": steps, "over": over}
    return {"cases": found, "worst": max(max(one["over"].values()) for one in found.values()), "line": MOST_FIXED}


def main() -> None:
    """Look at one of the three, as the command line says."""
    parser = command_line(__doc__)
    looks = {"state": states, "weak": weak, "fixed": fixed}
    parser.add_argument("look", choices=tuple(looks))
    parser.add_argument(
        "out", type=Path, nargs="?", help="where the result is written; without it, the standard output"
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = looks[args.look](args.only)
    text = json.dumps(result, indent=1) + "\n"
    if args.out is None:
        print(text, end="")
    else:
        args.out.write_text(text)
    sys.exit(result["worst"] > result["line"])


if __name__ == "__main__":
    main()
