"""A mixture of experts in two forms on four Gloo processes, measured and predicted, one JSON object.

    python benchmarks/experts_forms.py [--repeats 3] [--steps 24] [--ranks 4]

apart: experts are stored by rank and rows travel to them (`+t+e` along ep); whole: every rank has all experts and a share of
the rows (dp), and their gradients are summed. Sizes go from where weights decide to where rows do. Both forms of a size take
turns in the same processes, on the same batches; their losses must agree. Seconds are predicted for this machine as it was
calibrated just before and just after, on all ranks at once: their mean, as a machine that others use too changes. Ratios are
apart over whole, error is predicted over measured, both medians of repeats, each of which starts processes of its own; spread is
the least and the greatest of them.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import autopar  # noqa: E402
from autopar.costmodel.calibrate import calibrate  # noqa: E402
from benchmarks.harness import as_worker, command_line, print_json, run_workers, take_turns  # noqa: E402
from tests.ops.rings import with_choices  # noqa: E402

CLASSES = 64
FORMS: Mapping[str, Mapping[str, str]] = {"apart": {"ep": "+t0+e"}, "whole": {"dp": "t0"}}
"""The only axis of a form's mesh, and what experts choose on it."""


class Size(NamedTuple):
    """The size of a mixture: rows of the global batch, width, inner width, experts, choices of a row, layers."""

    rows: int
    width: int
    inner: int
    experts: int
    choices: int
    layers: int

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The global batch of a step, the same on every rank."""
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(self.rows, self.width, generator=generator)
        return x, torch.randint(0, CLASSES, (self.rows,), generator=generator)


SIZES = {
    "weights": Size(512, 256, 512, 16, 2, 2),
    "between": Size(2048, 256, 256, 16, 2, 2),
    "rows": Size(8192, 128, 128, 8, 2, 2),
}


class Mixture(nn.Module):
    """x: (rows, width) plus the weighted sum of the experts that each row chooses."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.choices, d, f = size.choices, size.width, size.inner
        self.norm, self.router = nn.LayerNorm(d), nn.Linear(d, size.experts, bias=False)
        self.w_in = nn.Parameter(torch.randn(size.experts, d, 2, f) * d**-0.5)
        self.w_out = nn.Parameter(torch.randn(size.experts, f, d) * f**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weights, chosen = self.router(h).softmax(-1).topk(self.choices)
        return x + autopar.experts(h, chosen, weights, self.w_in, self.w_out)


class Model(nn.Module):
    """The loss of classifying x: (rows, width)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture(size) for _ in range(size.layers))
        self.head = nn.Linear(size.width, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), labels)


def compile_programs(directory: Path, cluster: autopar.ClusterSpec) -> dict[str, dict[str, float]]:
    """Writes both forms of every size; the seconds that are predicted of their steps."""
    predicted_s: dict[str, dict[str, float]] = {}
    for name, size in SIZES.items():
        predicted_s[name] = {}
        for form, choices in FORMS.items():
            torch.manual_seed(0)
            options = autopar.Options(
                mesh=dict.fromkeys(choices, cluster.size), microbatches=1, recompute="none", on_overflow="chunk"
            )
            optimizer = functools.partial(torch.optim.AdamW, lr=1e-4)
            program = autopar.compile(Model(size), cluster, size.batch(0), optimizer=optimizer, options=options)
            program = with_choices(program, "experts", choices)
            program.save(directory / name / form)
            predicted_s[name][form] = float(program.predicted.step_time_s)
    return predicted_s


def measure(directory: Path, steps: int) -> dict[str, Any]:
    """One rank: median seconds of both forms of every size, and whether their losses agree."""
    results = {}
    for name, size in SIZES.items():
        programs = {form: autopar.load(directory / name / form) for form in FORMS}
        runs = {form: (lambda batch, program=program: float(program(batch))) for form, program in programs.items()}
        turns = take_turns(runs, size.batch, steps, warmup=4)
        losses = turns.losses
        agree = abs(losses["apart"] - losses["whole"]) <= 1e-5 * abs(losses["whole"])
        seconds = {form: turns.median_s(form) for form in FORMS}
        results[name] = {"seconds": seconds, "losses": losses, "losses_agree": agree}
    return results


def predict(directory: Path, ranks: int) -> dict[str, dict[str, float]]:
    """Seconds of both forms of every size on this machine as it is now; writes their programs."""
    profile = calibrate(quick=True, ranks=ranks, say=lambda text: None)
    return compile_programs(directory, autopar.ClusterSpec.local(ranks).with_profile(profile))


def row(predicted: list[dict[str, float]], measured: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a size. predicted: seconds of both forms before the first repeat, between them, and after the last."""
    around = [{form: (a[form] + b[form]) / 2 for form in FORMS} for a, b in pairwise(predicted)]
    seconds = [repeat["seconds"] for repeat in measured]
    ratios, predicted_ratios = ([s["apart"] / s["whole"] for s in rows] for rows in (seconds, around))
    errors = [p / m - 1 for p, m in zip(predicted_ratios, ratios, strict=True)]
    return {
        "measured_ms": {form: round(1e3 * statistics.median(s[form] for s in seconds), 1) for form in FORMS},
        "predicted_ms": {form: round(1e3 * statistics.median(s[form] for s in around), 1) for form in FORMS},
        **{
            name: {"median": round(statistics.median(each), 3), "spread": [round(min(each), 3), round(max(each), 3)]}
            for name, each in (("measured_ratio", ratios), ("predicted_ratio", predicted_ratios), ("error", errors))
        },
        "losses_agree": all(repeat["losses_agree"] for repeat in measured),
    }


def main() -> None:
    parser = command_line(__doc__, steps=24, ranks=4, worker=True)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.worker:
        return as_worker(functools.partial(measure, args.worker, args.steps))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        predicted, measured = [predict(Path(folder), args.ranks)], []
        for _ in range(args.repeats):
            measured.append(run_workers(__file__, args.ranks, ("--worker", folder, "--steps", args.steps)))
            predicted.append(predict(Path(folder), args.ranks))
    rows = {name: row([p[name] for p in predicted], [m[name] for m in measured]) for name in SIZES}
    print_json({"benchmark": "experts_forms", "ranks": args.ranks, "repeats": args.repeats, **rows})


if __name__ == "__main__":
    main()
