"""Cases of sizes and ranks that do not divide, which were refused or slow: predicted step, peak and seconds of planning as JSON.

    python benchmarks/odd_shapes.py                         # every case
    python benchmarks/odd_shapes.py --case "70B on 24"      # those whose name contains one of these

Nothing runs and no weights are made: models are on the meta device. Each case is compiled in a process of its own. Its seconds
are those of the clock by phase (`after_capture_s`: all but capture), and the processor's of the whole compile (`cpu_s`), which
count on a busy machine. Of a Llama on an odd number of GPUs `over_line` is its step over that between its neighbours that are
powers of two, straight in the logarithm of the number of GPUs.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import autopar
from benchmarks.harness import command_line
from benchmarks.models import LLAMA_8B, LLAMA_70B, Llama, LlamaShape

DEEP = LlamaShape(layers=1000, dim=25600, ffn=89600, heads=200, kv_heads=50, vocab=32000)
SEQ = 2048
ROWS = 4  # sequences a GPU

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]


class Product(nn.Module):
    """The mean square of one product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.product = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x).square().mean()


def product(width: int, rows: int) -> Made:
    """A square product and its batch."""
    return Product(width), (torch.zeros(rows, width),)


def llama(shape: LlamaShape, batch: int, dtype: torch.dtype) -> Made:
    """A Llama and its batch of sequences."""
    return Llama(shape, SEQ).to(dtype), (torch.zeros(batch, SEQ, dtype=torch.long),) * 2


@dataclass(frozen=True)
class Case:
    """A model on so many H100. line: numbers of GPUs on either side, whose steps make the line."""

    name: str
    gpus: int
    make: Callable[[int], Made]
    line: tuple[int, ...] = ()


def _deep(_: int) -> Made:
    return llama(DEEP, 12288, torch.float32)


def _bf16(shape: LlamaShape) -> Callable[[int], Made]:
    return lambda gpus: llama(shape, ROWS * gpus, torch.bfloat16)


CASES = (
    Case("1000 layers on 98304", 98304, _deep),
    Case("Linear(100001, 100001) on 16", 16, functools.partial(product, 100001)),
    Case("70B on 24", 24, _bf16(LLAMA_70B), (16, 32)),
    Case("8B on 24", 24, _bf16(LLAMA_8B), (16, 32)),
    Case("8B on 56", 56, _bf16(LLAMA_8B), (32, 64)),
    Case("8B on 96", 96, _bf16(LLAMA_8B), (64, 128)),
)


def compiled(case: Case, gpus: int) -> autopar.ParallelProgram:
    """The program of a case's model on so many GPUs."""
    with torch.device("meta"):
        model, inputs = case.make(gpus)
    cluster = autopar.ClusterSpec.preset("dgx-h100", nodes=gpus // 8)
    return autopar.compile(model, cluster, inputs, optimizer=functools.partial(torch.optim.AdamW, lr=1e-4))


def on_line(gpus: int, steps_s: dict[int, float]) -> float:
    """Seconds at so many GPUs, on the line through two others."""
    (low, low_s), (high, high_s) = sorted(steps_s.items())
    return low_s + (high_s - low_s) * math.log(gpus / low) / math.log(high / low)


def measure(case: Case) -> dict[str, Any]:
    """Compile a case in this process."""
    torch.set_num_threads(1)
    before_s = time.process_time()
    program = compiled(case, case.gpus)
    cpu_s = time.process_time() - before_s
    timings, step_s = dict(program.timings), program.predicted.step_time_s
    row = {
        "case": case.name,
        "plan": program.plan.show_meshes(),
        "microbatches": program.plan.microbatches,
        "predicted_step_s": step_s,
        "predicted_peak_gb": round(program.predicted.peak_bytes / 1e9, 2),
        **{phase: round(seconds, 2) for phase, seconds in timings.items()},
        "after_capture_s": round(sum(timings.values()) - timings["capture_s"], 2),
        "cpu_s": round(cpu_s, 2),
    }
    if case.line:
        steps_s = {gpus: compiled(case, gpus).predicted.step_time_s for gpus in case.line}
        row |= {"line_steps_s": steps_s, "over_line": round(step_s / on_line(case.gpus, steps_s), 4)}
    return row


def main() -> None:
    """Measure the cases that the command line names, each in a process of its own."""
    parser = command_line(__doc__)
    parser.add_argument("--case", nargs="+", default=[""], help="cases whose name contains one of these")
    parser.add_argument("--in-process", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_process:
        (case,) = (case for case in CASES if case.name == args.in_process)
        print(json.dumps(measure(case)))
        return
    results = []
    for case in (case for case in CASES if any(wanted in case.name for wanted in args.case)):
        command = [sys.executable, __file__, "--in-process", case.name]
        ran = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        lines = (ran.stdout or ran.stderr).strip().splitlines() or ["killed"]
        results.append(json.loads(lines[-1]) if ran.returncode == 0 else {"case": case.name, "error": lines[-1]})
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"benchmark": "odd_shapes", "results": results}, indent=2))


if __name__ == "__main__":
    main()
