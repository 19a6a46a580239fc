"""The part `ranks`: a training step on all devices, one rank each, against PyTorch's own parallelism; torchrun starts itself.

    dp      whole parameters on every rank, against DistributedDataParallel
    zero3   sharded parameters, against FSDP2
    choice  what autopar chooses without a word, in turn with each

A Llama of the machine's size, float32 and bf16 (DDP: under autocast; FSDP2: by its policy). The process of a rank is this module.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.comm.backends import backend_of
from benchmarks.gpu_report.machine import Machine, attempt
from benchmarks.gpu_report.models import OPTIMIZER, emitted_step, llama, say_turns
from benchmarks.gpu_report.parts import Found
from benchmarks.gpu_report.steps import compared, in_turn, ratio_lines
from benchmarks.harness import Step, as_worker, run_workers
from benchmarks.reference_steps import ddp_step, fsdp2_step

PEERS: dict[str, tuple[str, Callable[..., Step]]] = {"dp": ("DDP", ddp_step), "zero3": ("FSDP2", fsdp2_step)}
LOW = {"bf16": torch.bfloat16, "float32": None}
LIMIT_S = 600


def measure(machine: Machine) -> Found:
    for strategy in PEERS:
        for dtype in list(LOW)[: 1 if machine.rehearsal else None]:
            yield f"{strategy}, {dtype}", attempt(measured, machine, strategy, dtype)


def measured(machine: Machine, strategy: str, dtype: str) -> dict[str, Any]:
    """The programs of a strategy in these dtypes, on every device."""
    ranks = machine.ranks
    one, precision = llama(machine.size, ranks), None if dtype == "float32" else dtype
    cluster = machine.calibrated(ranks) or machine.described(ranks)
    asked = one.compiled(cluster, mesh={"dp": ranks}, strategy=strategy, precision=precision)
    choice = one.compiled(cluster, precision=precision)
    with tempfile.TemporaryDirectory() as folder:
        asked.save(Path(folder) / "autopar")
        choice.save(Path(folder) / "choice")
        arguments = [folder, str(machine.folder), strategy, dtype, *(["--rehearse"] if machine.rehearsal else [])]
        found = run_workers(__file__, ranks, arguments, LIMIT_S)
    return {
        **found,
        "predicted": {"peak_bytes": asked.predicted.peak_bytes, "step_s": asked.predicted.step_time_s},
        "measured_s": found["median_ms"]["autopar"] / 1e3,
        "choice": f"{choice.plan.show_meshes()}, {choice.plan.origin}",
    }


def on_rank(machine: Machine, folder: Path, strategy: str, dtype: str) -> dict[str, Any]:
    """The rank's turns; rank 0 has the numbers of its device."""
    one = llama(machine.size, dist.get_world_size())
    device = machine.backend.current()
    before = machine.allocated_bytes()
    peak: dict[str, int] = {}
    with machine.counting() as counter:
        ours = emitted_step(folder / "autopar")
        for index in range(2):
            ours(one.batch_of(index))
        peak = machine.peak(lambda: ours(one.batch_of(2)), counter)
    peer, make_peer = PEERS[strategy]
    make = functools.partial(make_peer, make_optimizer=OPTIMIZER, low=LOW[dtype])
    makers: dict[str, Callable[[], Step]] = {
        "autopar": lambda: ours,
        "autopar's choice": lambda: emitted_step(folder / "choice"),
        peer: lambda: make(one.model().to(device)),
    }
    barrier = functools.partial(dist.barrier, device_ids=None if backend_of(device).is_host else [device.index])
    turns, failed = in_turn(machine, makers, one, barrier)
    peak = {"allocated": peak["allocated"] - before, "reserved": peak["reserved"], "outside": machine.outside_bytes()}
    return {**compared(turns, "autopar"), **failed, "peak": peak, "peer": peer}


def lines(record: dict[str, Any]) -> list[str]:
    told = []
    for name, one in record.items():
        if "median_ms" not in one:
            told.append(f"{name}: failed: {one['error']}")
            continue
        told.append(f"{name}: {say_turns(one)} (chosen: {one['choice']})")
        told += ratio_lines(one)
        told.append(f"    predicted: {one['predicted']['step_s'] / one['measured_s']:.2f} of the measured seconds")
        share = one["predicted"]["peak_bytes"] / one["peak"]["allocated"]
        told.append(f"    predicted: {share:.2f} of the measured {one['peak']['allocated'] / 1e6:.1f} MB of tensors")
    return told


if __name__ == "__main__":
    directory, records, kind, numbers, *rehearse = sys.argv[1:]
    here = Machine(Path(records), bool(rehearse))
    as_worker(functools.partial(on_rank, here, Path(directory), kind, numbers), here.backend)
