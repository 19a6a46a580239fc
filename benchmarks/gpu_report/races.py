"""The part `races`: steps under CUDA's sanitizer of torch, which finds streams that use a tensor at once.

`TORCH_CUDA_SANITIZER=1` is a call of `enable_cuda_sanitizer` when torch is imported; here it is called. Programs with side
streams are stepped: state and activations in host memory, and on several devices ZeRO-3, whose gathers run ahead. A race that is
planted must be found, else the sanitizer sees nothing here. The process of a rank is this module.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import autopar
from benchmarks.gpu_report.machine import REHEARSED, Machine, attempt
from benchmarks.gpu_report.models import emitted_step, llama
from benchmarks.gpu_report.parts import Found
from benchmarks.harness import as_worker, run_workers

STEPS = 3
LIMIT_S = 200
PROGRAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two microbatches": {"microbatches": 2},
    "optimizer offloaded": {"offload": "optimizer"},
    "activations offloaded": {"offload": "activations"},
    "all offloaded": {"offload": "all"},
}


def measure(machine: Machine) -> Found:
    sanitize(machine)
    yield "planted", attempt(planted, machine)
    for name, options in list(PROGRAMS.items())[-1 if machine.rehearsal else 0 :]:
        yield name, attempt(stepped, machine, options)
    if machine.ranks > 1:
        yield "zero3", attempt(on_ranks, machine)


def sanitize(machine: Machine) -> None:
    """Turn the sanitizer on in this process. In a rehearsal it runs and has no streams to look at."""
    if machine.rehearsal:
        mock.patch.object(torch.cuda, "current_stream", return_value=SimpleNamespace(cuda_stream=0)).start()
    from torch.cuda._sanitizer import enable_cuda_sanitizer

    enable_cuda_sanitizer()


def planted(machine: Machine) -> str:
    """Whether two streams that write a tensor at once are found."""
    if machine.rehearsal:
        return "no streams here"
    x, side = torch.zeros(1 << 20, device=machine.device), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    try:
        x.mul_(2)
    except Exception:  # of the sanitizer, in its own classes
        return "found"
    return "NOT FOUND"


def compiled(machine: Machine, ranks: int, **options: Any) -> autopar.Program:
    """A small program: what is looked at are streams, not sizes."""
    return llama(REHEARSED, ranks).compiled(machine.described(ranks).with_tiers(), compiler="none", **options)


def stepped(machine: Machine, options: dict[str, Any]) -> str:
    """Some steps of a program on one device."""
    with tempfile.TemporaryDirectory() as folder:
        return steps_of(compiled(machine, 1, **options).save(folder), 1)


def on_ranks(machine: Machine) -> str:
    """Some steps of ZeRO-3 on every device."""
    with tempfile.TemporaryDirectory() as folder:
        compiled(machine, machine.ranks, mesh={"dp": machine.ranks}, strategy="zero3").save(folder)
        arguments = [folder, str(machine.folder), *(["--rehearse"] if machine.rehearsal else [])]
        return str(run_workers(__file__, machine.ranks, arguments, LIMIT_S)["zero3"])


def steps_of(directory: Any, ranks: int) -> str:
    """Steps of a saved program on this rank; the sanitizer raises where it finds a race."""
    one = llama(REHEARSED, ranks)
    step = emitted_step(Path(directory))
    losses = [step(one.batch_of(index)) for index in range(STEPS)]
    return f"no race in {STEPS} steps, losses {', '.join(f'{loss:.4f}' for loss in losses)}"


def lines(record: dict[str, Any]) -> list[str]:
    return [f"{name}: {one if isinstance(one, str) else one['error']}" for name, one in record.items()]


if __name__ == "__main__":
    here = Machine(Path(sys.argv[2]), "--rehearse" in sys.argv)
    sanitize(here)
    as_worker(lambda: {"zero3": steps_of(sys.argv[1], here.ranks)}, here.backend)
