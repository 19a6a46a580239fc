"""Plans of small models on calibrated machines: asked for by options, compiled, and run in turns by the same processes."""

from __future__ import annotations

import functools
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import autopar
from autopar.passes.account.program import account
from autopar.passes.price.pricer import Pricers
from benchmarks.calibrated_models import Model
from benchmarks.shaped import Ranks

PRODUCTS = 9
NEIGHBOUR = 1.15
"""How much slower a product is where somebody else has a part of the core."""


class Case(NamedTuple):
    """A plan of a model: name of the plan, and the options that ask for it."""

    model: Model
    plan: str
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.model.__name__}_{self.plan}"


def cluster_of(ranks: int, profile: Path) -> autopar.ClusterSpec:
    """This machine as it was calibrated."""
    return autopar.ClusterSpec.local(ranks).with_profile(json.loads(profile.read_text()))


def compiled(case: Case, cluster: autopar.ClusterSpec) -> autopar.ParallelProgram:
    """The program of a plan. Raises AutoparError where the model has none like it."""
    model, batch, loss = case.model()
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
    options = autopar.Options(**case.options)
    return autopar.compile(model, cluster, batch, loss_fn=loss, optimizer=adamw, options=options)


def priced_s(program: autopar.ParallelProgram, cluster: autopar.ClusterSpec) -> float:
    """Predicted seconds of a step of the same program on a cluster that was calibrated at another time."""
    lowered, templates, plans = program.lowered, program.ir.templates, program.plan.stages
    return float(account(lowered, plans, templates, Pricers(cluster), program.setting, program.rules).step_time_s)


def calibrate(ranks: Ranks, profile: Path) -> None:
    """Measures the machine on all ranks at once and writes its profile."""
    ranks.run(["-m", "autopar.cli.calibrate", "--quick", "-o", str(profile)])


class Loaded(NamedTuple):
    """A program on this rank, and the batch of all its steps."""

    program: Any
    batch: tuple[torch.Tensor, ...]


def turn_s(programs: Mapping[str, Loaded], steps: int) -> dict[str, float]:
    """Seconds of a step of every program, so many steps of each one after another; every rank must call it. The step before
    them does not count: it finds caches full of another program, as none of a run does."""
    seconds = {}
    for name, (program, batch) in programs.items():
        program(batch)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            program(batch)
        dist.barrier()
        seconds[name] = (time.perf_counter() - start) / steps
    return seconds


class QuietTurns:
    """Turns while nobody else has the machine: a product that lies in a cache takes no longer than it can, before a turn and
    after it, on all ranks. Neighbours on a shared machine may halve the speed of its cores for seconds, unseen from inside."""

    def __init__(self) -> None:
        self._factors = torch.randn(2, 256, 256)
        self.least_s = float("inf")
        self.taken = self.quiet = 0

    def _product_s(self) -> float:
        left, right = self._factors
        start = time.perf_counter()
        left @ right
        seconds = time.perf_counter() - start
        self.least_s = min(self.least_s, seconds)
        return seconds

    def _slowest_s(self) -> torch.Tensor:
        """The time of a product: the median here, the slowest of all ranks."""
        slowest_s = torch.tensor(statistics.median(self._product_s() for _ in range(PRODUCTS)))
        dist.all_reduce(slowest_s, dist.ReduceOp.MAX)
        return slowest_s

    def turn_s(self, programs: Mapping[str, Loaded], steps: int) -> dict[str, float]:
        """Seconds like those of `turn_s`, of the programs whose turn was a quiet one; the same on all ranks."""
        seconds: dict[str, float] = {}
        before_s = self._slowest_s()
        for name, one in programs.items():
            seconds |= turn_s({name: one}, steps)
            after_s = self._slowest_s()
            least_s = torch.tensor(self.least_s)
            dist.all_reduce(least_s, dist.ReduceOp.MIN)
            self.taken += 1
            if max(before_s, after_s) <= NEIGHBOUR * least_s:
                self.quiet += 1
            else:
                del seconds[name]
            before_s = after_s
        return seconds


def timed(prefix: str, module: str, arguments: Sequence[object]) -> None:
    """Runs a module of the benchmarks in a process of its own, behind the words of a command that keeps the machine quiet.
    Raises CalledProcessError."""
    subprocess.run([*shlex.split(prefix), sys.executable, "-m", module, *map(str, arguments)], check=True)
