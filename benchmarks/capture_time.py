"""How long the capture of a model takes beside `torch.export` alone: tiny architectures of transformers, one JSON row each.

    python -m benchmarks.capture_time                          # the architectures below
    python -m benchmarks.capture_time --only t5 vit --runs 7
    python -m benchmarks.capture_time --profile t5             # where capture spends its time

export_s is `torch.export.export(model, …, strict=False)` of the model with its loss, capture_s is `capture_program` of the
same: CPU seconds, the medians of runs that take turns, each after one run that fills torch's caches. Their ratio is in
`ratio`; the last row holds the median of the ratios.
"""

from __future__ import annotations

import copy
import cProfile
import gc
import json
import pstats
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar.capture.build import capture_program
from benchmarks.architectures.from_transformers import cases
from benchmarks.harness import command_line

NAMES = (
    *(
        "llama",
        "gpt2",
        "gemma2",
        "opt",
        "bart",
        "bloom",
        "bert",
        "falcon",
        "mixtral",
        "vit",
        "t5",
        "convnext",
        "resnet",
    ),
    *("qwen2", "mistral", "phi", "gpt_neox", "roberta", "distilbert", "electra", "pegasus", "dinov2", "regnet"),
    *("mobilenet_v2", "gemma3_text"),
)


def measured(model: nn.Module, batch: dict[str, Any], runs: int) -> dict[str, float]:
    """export_s, capture_s and their ratio, of so many runs of each."""
    seconds: dict[Callable[[nn.Module, dict[str, Any]], object], list[float]] = {exported: [], captured: []}
    for run in range(-1, runs):
        for timed, taken in seconds.items():
            fresh = copy.deepcopy(
                model
            )  # the first step of some notes in the configuration what the next one finds there
            gc.collect()
            begin = time.process_time()
            timed(fresh, batch)
            if run >= 0:
                taken.append(time.process_time() - begin)
    export_s, capture_s = (statistics.median(taken) for taken in seconds.values())
    return {"export_s": round(export_s, 3), "capture_s": round(capture_s, 3), "ratio": round(capture_s / export_s, 2)}


class _Loss(nn.Module):
    """A model of transformers as what it is trained on: outputs such as caches are no business of an export."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss


def exported(model: nn.Module, batch: dict[str, Any]) -> object:
    """The work of torch itself in tracing the model."""
    return torch.export.export(_Loss(model), (), dict(batch), strict=False)


def captured(model: nn.Module, batch: dict[str, Any]) -> object:
    """The work of a compile until it has a program to plan."""
    return capture_program(model, batch)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--only", nargs="*", default=NAMES)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--profile", metavar="NAME")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    by_name = {case.name: case for case in cases()}
    ratios: list[float] = []
    for name in [args.profile] if args.profile else args.only:
        torch.manual_seed(0)
        model, batch = by_name[name].make()
        if args.profile:
            captured(model, batch)
            with cProfile.Profile() as profile:
                captured(model, batch)
            pstats.Stats(profile).sort_stats("cumulative").print_stats(70)
            return
        row = {"name": name, **measured(model, batch, args.runs)}
        ratios.append(float(row["ratio"]))
        print(json.dumps(row), flush=True)
    print(json.dumps({"name": "median", "of": len(ratios), "ratio": round(statistics.median(ratios), 2)}))


if __name__ == "__main__":
    main()
