"""How planning grows with a graph whose layers are all unlike, as JSON.

    python -m benchmarks.plan_growth                        # random models of some 50 to 3,000 ops, once each, on 8 H100
    python -m benchmarks.plan_growth --ops 50 200 800 --seeds 0 1 2 --devices 16
    python -m benchmarks.plan_growth --linears 300 1000     # chains of linear layers of unequal widths instead
    python -m benchmarks.plan_growth --tables 500           # look-ups in tables of unequal rows, side by side

A random model is a chain of products of random widths with activations and norms, between values that are added up or joined
as in residual and dense networks, so no layer shares what is found for another one. Every case is compiled in a process of its
own, on the meta device. Seconds are those of the processor. `exponent` is the slope of the least-squares line through
(log ops, log seconds): 1 where twice the ops take twice the time.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from benchmarks.harness import command_line
from benchmarks.sameness import ADAMW

SIZES = (50, 100, 200, 400, 800, 1500, 3000)
WIDTHS = range(64, 1025, 32)
NEAR = 6
"""How far back the values are that are added or joined."""
ROWS = 1024
TABLE_ROWS = 4096
"""Rows of a batch of look-ups."""


class RandomModel(nn.Module):
    """About so many ops, forward alone, on x: (rows, 256)."""

    def __init__(self, ops: int, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.steps: list[tuple[str, tuple[int, ...]]] = []
        self.layers = nn.ModuleList()
        widths = [256]
        while len(self.steps) < ops:
            last, far = len(widths) - 1, draw.randrange(max(len(widths) - NEAR, 0), len(widths))
            kind = draw.choice(("linear", "linear", "gelu", "tanh", "norm", "add", "cat"))
            width = widths[last]
            values: tuple[int, ...] = (last,)
            if kind == "add" and far != last and widths[far] == width:
                values = (last, far)
            elif kind == "cat" and far != last and width + widths[far] <= max(WIDTHS):
                width, values = width + widths[far], (last, far)
            elif kind in ("linear", "add", "cat"):
                kind, width = "linear", draw.choice((*WIDTHS, widths[far]))
                self.layers.append(nn.Linear(widths[last], width))
            elif kind == "norm":
                self.layers.append(nn.LayerNorm(width))
            self.steps.append((kind, values))
            widths.append(width)

    def forward(self, x: Tensor) -> Tensor:
        values, layers = [x], iter(self.layers)
        for kind, places in self.steps:
            given = [values[place] for place in places]
            match kind:
                case "linear" | "norm":
                    values.append(next(layers)(given[0]))
                case "add":
                    values.append(given[0] + given[1])
                case "cat":
                    values.append(torch.cat(given, -1))
                case _:
                    values.append(F.gelu(given[0]) if kind == "gelu" else torch.tanh(given[0]))
        return values[-1].square().mean()


def unequal_linears(layers: int, seed: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """So many linear layers with a ReLU after each, whose widths are 256, 272, 288, … (of more than 400, 4 apart) in a random
    order; with input and target."""
    step = 16 if layers <= 400 else 4
    widths = [256 + step * i for i in range(layers)]
    random.Random(seed).shuffle(widths)
    widths.append(widths[0])
    model = nn.Sequential(*(module for a, b in pairwise(widths) for module in (nn.Linear(a, b), nn.ReLU())))
    return model, (torch.zeros(ROWS, widths[0]), torch.zeros(ROWS, widths[-1]))


class Tables(nn.Module):
    """So many tables of 1000, 1100, 1200, … rows in a random order, of which a small head reads the joined look-ups, on ids:
    (rows, tables)."""

    def __init__(self, tables: int, seed: int) -> None:
        super().__init__()
        rows = random.Random(seed).sample(range(tables), tables)
        self.tables = nn.ModuleList(nn.Embedding(1000 + 100 * i, 32) for i in rows)
        self.top = nn.Sequential(nn.Linear(32 * tables, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], dim=1))


def _made(kind: str, size: int, seed: int) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """A model of a kind and size with its batch, and further arguments of compile."""
    match kind:
        case "linears":
            model, batch = unequal_linears(size, seed)
            return model, batch, {"loss_fn": F.mse_loss}
        case "tables":
            ids = torch.zeros(TABLE_ROWS, size, dtype=torch.long)
            return Tables(size, seed), (ids, torch.zeros(TABLE_ROWS, 1)), {"loss_fn": F.mse_loss}
    return RandomModel(size, seed), (torch.zeros(ROWS, 256),), {}


def measure(kind: str, size: int, seed: int, devices: int) -> dict[str, Any]:
    """One model compiled in this process. Keys with `_s` are seconds of its processor time."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        model, batch, given = _made(kind, size, seed)
    cluster = autopar.ClusterSpec.homogeneous(devices=devices, device="h100", devices_per_node=min(devices, 8))
    with mock.patch("time.perf_counter", new=time.process_time):
        program = autopar.compile(model, cluster, batch, optimizer=ADAMW, **given)
    return {
        kind: size,
        "seed": seed,
        "devices": devices,
        "captured_ops": sum(len(program.ir.template_of(call).ops) for call in program.ir.calls),
        "plan": program.plan.show_meshes(),
        "predicted_step_s": program.predicted.step_time_s,
        **{key: round(program.timings[key], 3) for key in ("capture_s", "plan_s", "lower_s", "emit_s")},
    }


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the least-squares line through the logarithms of (size, seconds)."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    middle_x, middle_y = sum(xs) / len(xs), sum(ys) / len(ys)
    rise = sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True))
    return rise / sum((x - middle_x) ** 2 for x in xs)


def measured_apart(kind: str, size: int, seed: int, devices: int, timeout_s: float) -> dict[str, Any]:
    """The same in a fresh process; a case that fails or takes too long says so."""
    case = {"kind": kind, "size": size, "seed": seed, "devices": devices}
    command = [sys.executable, "-m", "benchmarks.plan_growth", "--in-process", json.dumps(case)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {**case, "error": f"not finished in {timeout_s:.0f} s"}
    if ran.returncode != 0:
        return {**case, "error": ran.stderr.strip().splitlines()[-1] if ran.stderr else "killed"}
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--ops", nargs="+", type=int, help="about how many ops the random models have")
    parser.add_argument("--linears", nargs="+", type=int, default=[], help="linear layers of unequal widths instead")
    parser.add_argument("--tables", nargs="+", type=int, default=[], help="tables of unequal rows instead")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that a model may take")
    parser.add_argument("--in-process", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_process:
        print(json.dumps(measure(**json.loads(args.in_process))))
        return
    sizes = {"linears": args.linears, "tables": args.tables}
    sizes["ops"] = args.ops or ([] if any(sizes.values()) else [*SIZES])
    results = []
    for kind, size in ((kind, size) for kind, some in sizes.items() for size in some):
        for seed in args.seeds:
            results.append(measured_apart(kind, size, seed, args.devices, args.timeout))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    done = [r for r in results if "error" not in r]
    slopes = {}
    if len({r["captured_ops"] for r in done}) > 1:
        slopes = {
            key: round(exponent([(r["captured_ops"], r[key]) for r in done]), 2) for key in ("capture_s", "plan_s")
        }
    print(json.dumps({"benchmark": "plan_growth", "exponent": slopes, "results": results}, indent=2))


if __name__ == "__main__":
    main()
