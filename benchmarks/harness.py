"""The harness of all benchmarks: their command lines, programs that take turns on one machine, and what their step times say.

All programs of a comparison live in the same processes and take turns, step by step (A B C D, then D C B A, ...), so that
whatever else the machine does hits them alike. A step is timed from barrier to barrier. `ratio_of_medians` is one median
over the other; `ratio_of_pairs` the median of step-by-step ratios. All programs are given the same batches, so their
losses must agree.

A script that needs several processes starts itself again under torchrun with `--worker` (`run_workers`), and every process
then calls `as_worker`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.comm.backends import HOST, Backend
from autopar.runtime.comm.environment import started

VOCAB = 512

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], float]
"""Runs one training step on the global batch; its loss."""


def make_batch(step: int, batch: int, seq: int) -> Batch:
    """The global batch of a step, the same on every rank. Labels follow from ids, so that the loss can fall."""
    ids = torch.randint(0, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(step))
    return ids, (ids * 7 + 3) % VOCAB


@dataclass(frozen=True)
class Turns:
    """Seconds of every step of every program, and their last losses."""

    times_s: dict[str, list[float]]
    losses: dict[str, float]

    def median_s(self, name: str) -> float:
        """The program's median step."""
        return statistics.median(self.times_s[name])

    def ratios(self, ours: str, theirs: str) -> dict[str, float]:
        """The ratio of the medians, and the median of step-by-step ratios."""
        pairs = [a / b for a, b in zip(self.times_s[ours], self.times_s[theirs], strict=True)]
        return {
            "ratio_of_medians": round(self.median_s(ours) / self.median_s(theirs), 3),
            "ratio_of_pairs": round(statistics.median(pairs), 3),
        }

    def quartiles(self, ours: str, theirs: str) -> tuple[float, float]:
        """The spread of step-by-step ratios: the first and the third quartile."""
        pairs = [a / b for a, b in zip(self.times_s[ours], self.times_s[theirs], strict=True)]
        first, _, third = statistics.quantiles(pairs, n=4, method="inclusive")
        return round(first, 3), round(third, 3)

    def summary(self) -> dict[str, Any]:
        """The summary of the programs that every benchmark prints."""
        return {
            "steps": len(next(iter(self.times_s.values()))),
            "median_ms": {name: round(1e3 * self.median_s(name), 2) for name in self.times_s},
            "last_loss": self.losses,
            "losses_agree": max(self.losses.values()) - min(self.losses.values()) < 1e-3,
        }


def take_turns(
    programs: Mapping[str, Step],
    batch_of: Callable[[int], Batch],
    steps: int,
    warmup: int,
    barrier: Callable[[], Any] = dist.barrier,
    clock: Backend = HOST,
) -> Turns:
    """Runs every program on the same batches; the first `warmup` steps are not timed. clock: the kind of device whose marks time
    a step, which are events of its stream where it has streams; `barrier` waits for them then."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    losses: dict[str, float] = {}
    for index in range(warmup + steps):
        batch = batch_of(index)
        for name in programs if index % 2 == 0 else list(programs)[::-1]:
            barrier()
            start = clock.mark()
            losses[name] = programs[name](batch)
            barrier()
            end = clock.mark()
            if index >= warmup:
                clock.catch_up(clock.current())
                times[name].append(clock.seconds(start, end))
    return Turns(times, losses)


class WorkersFailed(SystemExit):
    """The processes of a benchmark failed; torchrun has said why. The exit status is theirs."""


def command_line(
    doc: str | None,
    *,
    steps: int | None = None,
    warmup: int | None = None,
    ranks: int | None = None,
    worker: bool = False,
    keeps: bool = False,
) -> argparse.ArgumentParser:
    """The options that several benchmarks have. steps, warmup, ranks: unless asked otherwise (None: not an option). worker: it
    starts itself again on several processes, which are told a directory. keeps: it keeps profile, programs and measurements in a
    directory, and has a process of its own for what is timed (`timed` in calibrated_plans.py)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--steps", steps), ("--warmup", warmup), ("--ranks", ranks)):
        if default is not None:
            parser.add_argument(name, type=int, default=default)
    if worker:
        parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    if keeps:
        parser.add_argument("directory", type=Path, help="of what is kept")
        parser.add_argument("--by", default="", help="a command that starts what is timed")
        for hidden in ("--worker", "--time"):
            parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    return parser


def printed_object(text: str) -> dict[str, Any]:
    """The JSON object that a process printed on a line of its own."""
    return json.loads(next(line for line in text.splitlines() if line.startswith("{")))


def run_workers(script: str, ranks: int, arguments: Sequence[object], timeout_s: float | None = None) -> dict[str, Any]:
    """Runs `script` with these arguments on so many processes; the JSON object that rank 0 prints. Raises WorkersFailed, and
    subprocess.TimeoutExpired after timeout_s."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, *map(str, arguments)], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as torchrun:
        try:
            said, _ = torchrun.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            torchrun.terminate()  # so that it ends its ranks
            torchrun.communicate()
            raise
    if torchrun.returncode:
        raise WorkersFailed(torchrun.returncode)
    return printed_object(said)


def run_saved(
    script: str, ranks: int, programs: Mapping[str, Any], arguments: Sequence[object], timeout_s: float | None = None
) -> dict[str, Any]:
    """The same with `--worker` and a directory in which every program is saved under its name. Raises WorkersFailed."""
    with tempfile.TemporaryDirectory() as directory:
        for name, program in programs.items():
            program.save(Path(directory) / name)
        return run_workers(script, ranks, ["--worker", directory, *arguments], timeout_s)


def as_worker(measure: Callable[[], Mapping[str, Any]], backend: Backend = HOST) -> None:
    """One process of `run_workers`: joins the others, measures; rank 0 prints. backend: the kind of its device."""
    torch.set_num_threads(1)
    backend.module.set_device(backend.device(started().local_rank))
    dist.init_process_group(backend.transport.name)
    result = measure()
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


def print_json(result: Mapping[str, Any]) -> None:
    """The benchmark's answer."""
    print(json.dumps(result, indent=2), flush=True)


def measure_saved(
    doc: str | None,
    script: str,
    compile_programs: Callable[[Path, int], None],
    measure: Callable[[Path, int, int], Mapping[str, Any]],
    *,
    steps: int,
    warmup: int,
) -> None:
    """The command line of a benchmark that writes programs into a directory and measures them on some ranks.

    compile_programs(directory, ranks); measure(directory, steps, warmup) on every rank. steps, warmup: unless asked otherwise.
    """
    args = command_line(doc, steps=steps, warmup=warmup, ranks=2, worker=True).parse_args()
    if args.worker:
        return as_worker(functools.partial(measure, args.worker, args.steps, args.warmup))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        compile_programs(Path(directory), args.ranks)
        arguments = ("--worker", directory, "--steps", args.steps, "--warmup", args.warmup)
        print_json(run_workers(script, args.ranks, arguments))
