"""A step with lines run while messages travel beside the same step without, on slow links, one JSON object.

    python -m benchmarks.overlap [--steps 7] [--first I] [--limit N]

Transformer blocks are compiled for tensor parallelism as in Megatron-LM (`strategy="megatron"`) on 2 or 4 ranks, one after the
other or with attention and MLP side by side, mixtures of experts that rows travel to, beside an expert that all rows share, and
data parallel or with parameters in shards. The same plan runs with every message waited for where it starts ("none"), with
every overlap (`autopar.passes.lower.overlap`) and with blocks in 2 or 4 pieces too (`autopar.passes.lower.pieces`), in turns,
every rank a thread on a clock of processor seconds and of messages as slow as the link's (`delayed.py`). What is predicted is
the account of the same programs on a cluster with that link, whose devices are calibrated right before each setting. Losses
must be the same, in pieces to 1e-5. "bound" is the larger of messages and of what is left of the step without overlap.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.passes.search.overlap import overlapping
from autopar.passes.search.pieces import PIECES, in_pieces
from autopar.plan import OVERLAPS
from benchmarks.attention_forms import cluster_on_link, device_profile
from benchmarks.delayed import Link, steps_on_link
from benchmarks.harness import command_line, print_json
from tests.ops.rings import with_choices


@dataclass(frozen=True)
class Setting:
    """Blocks on a link. mbytes: of 1e6 bytes/s that a rank sends. kind: "dense", "beside" (attention and MLP read the same norm)
    or "experts", or a strategy of data parallelism ("dp", "zero3")."""

    ranks: int
    batch: int
    length: int
    width: int
    kind: str
    mbytes: float
    layers: int = 2
    heads: int = 4
    latency_s: float = 1e-4

    @property
    def axis(self) -> str:
        return {"experts": "ep", "dense": "tp", "beside": "tp"}.get(self.kind, "dp")

    @property
    def link(self) -> Link:
        return Link(self.mbytes * 1e6, self.latency_s)


SETTINGS = (
    Setting(2, 4, 256, 256, "dense", 100),
    Setting(2, 4, 256, 256, "beside", 100),
    Setting(2, 4, 256, 256, "experts", 150),
    Setting(2, 4, 256, 512, "dense", 100),
    Setting(4, 4, 512, 256, "dense", 400),
    Setting(4, 4, 512, 256, "beside", 300),
    Setting(4, 4, 512, 256, "experts", 300),
    Setting(2, 4, 128, 256, "dp", 150),
    Setting(2, 4, 128, 256, "zero3", 300),
)
EXPERTS, CHOICES = 8, 2


class Block(nn.Module):
    """x: (batch, length, width)."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        d = setting.width
        self.heads, self.beside = setting.heads, setting.kind == "beside"
        self.norm, self.mlp_norm = nn.LayerNorm(d), nn.Identity() if self.beside else nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        out: Tensor = self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return out

    def _mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        if self.beside:
            return x + self._attention(normed) + self._mlp(normed)
        x = x + self._attention(normed)
        return x + self._mlp(self.mlp_norm(x))


class Mixture(nn.Module):
    """x: (batch, length, width) plus what the experts that each row chooses make of it, and what the shared one does."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        d = setting.width
        self.norm, self.router = nn.LayerNorm(d), nn.Linear(d, EXPERTS, bias=False)
        self.w_in = nn.Parameter(torch.randn(EXPERTS, d, 2, d) * d**-0.5)
        self.w_out = nn.Parameter(torch.randn(EXPERTS, d, d) * d**-0.5)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weights, chosen = self.router(h).softmax(-1).topk(CHOICES)
        routed = autopar.experts(h, chosen, weights, self.w_in, self.w_out)
        return x + routed + self.down(F.silu(self.up(h)))


class Blocks(nn.Module):
    """The loss of x: (batch, length, width)."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        block = Mixture if setting.kind == "experts" else Block
        self.layers = nn.ModuleList(block(setting) for _ in range(setting.layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def programs_of(setting: Setting, profile: Mapping[str, Any]) -> dict[str, autopar.Program]:
    """The program with every overlap, "" for none, on a cluster of calibrated devices with the setting's link."""
    torch.manual_seed(0)
    experts = setting.kind == "experts"
    program = autopar.compile(
        Blocks(setting),
        cluster_on_link(setting.ranks, profile, setting.link),
        (batch_of(setting),),
        optimizer=functools.partial(torch.optim.SGD, lr=1e-3),
        options=autopar.Options(
            mesh={setting.axis: setting.ranks},
            strategy={"experts": "auto", "dense": "megatron", "beside": "megatron"}.get(setting.kind, setting.kind),
            microbatches=1,
            recompute="none",
            on_overflow="chunk",
            overlap=False,
        ),
    )
    if experts:
        program = with_choices(program, "experts", {setting.axis: "+t0+e"})
    programs = {overlap: program.with_plan(overlapping(program.plan, overlap)) for overlap in OVERLAPS}
    lowered = programs[OVERLAPS[-1]].lowered
    for pieces in sorted(PIECES):
        plan = in_pieces(programs[OVERLAPS[-1]].plan, pieces, program.ir, lowered, program.rules)
        programs[f"{pieces} pieces"] = program.with_plan(plan)
    return programs


def batch_of(setting: Setting) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(setting.batch, setting.length, setting.width, generator=generator)


def row(setting: Setting, steps: int) -> dict[str, Any]:
    """The row of a setting. Raises ArithmeticError where overlap changes a bit of a loss."""
    programs = programs_of(setting, device_profile(setting.ranks))
    turns = steps_on_link(setting.link, {setting.axis: setting.ranks}, programs, [batch_of(setting)], steps, ("",))
    if any(
        not math.isclose(loss, expected, rel_tol=1e-5 if name not in OVERLAPS else 0.0)
        for name, losses in turns.losses.items()
        for loss, expected in zip(losses, turns.losses[""], strict=True)
    ):
        raise ArithmeticError(f"{setting}: the losses are {turns.losses}")
    predicted_s = {name: program.predicted.step_time_s for name, program in programs.items()}
    measured_s = {name: statistics.median(seconds) for name, seconds in turns.seconds.items()}
    whole = programs[""].predicted
    ratios = {name: round(s / measured_s[""], 3) for name, s in measured_s.items() if name}
    chosen = min((name for name in programs if name), key=lambda name: predicted_s[name])
    bound_s = max(whole.comm_time_s, measured_s[""] - whole.comm_time_s)
    return {
        "setting": asdict(setting),
        "kind": f"{setting.kind} on {setting.ranks}",
        "measured_s": {name or "none": round(s, 4) for name, s in measured_s.items()},
        "predicted_s": {name or "none": round(s, 4) for name, s in predicted_s.items()},
        "message_share": round(whole.comm_time_s / measured_s[""], 3),
        "measured_ratio": ratios,
        "chosen": chosen,
        "chosen/none": ratios[chosen],
        "chosen/bound": round(measured_s[chosen] / bound_s, 3),
        "predicted/measured": round(predicted_s[chosen] / measured_s[chosen], 3),
        "peak_bytes": {name or "none": program.predicted.peak_bytes for name, program in programs.items()},
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All settings together."""
    return {
        "benchmark": "overlap",
        "settings": len(rows),
        "message_shares": [r["message_share"] for r in rows],
        **{key: [r[key] for r in rows] for key in ("chosen", "chosen/none", "chosen/bound", "predicted/measured")},
        "rows": rows,
    }


def main() -> None:
    parser = command_line(__doc__, steps=7)
    parser.add_argument("--first", type=int, default=0, help="number of the first setting")
    parser.add_argument("--limit", type=int, default=len(SETTINGS), help="so many settings alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print_json(summary([row(setting, args.steps) for setting in SETTINGS[args.first :][: args.limit]]))


if __name__ == "__main__":
    main()
