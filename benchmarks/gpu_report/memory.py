"""The part `memory`: bytes that a process of a GPU takes beside its tensors, row by row.

    context    the device's context with torch's kernels
    libraries  workspaces that products, convolutions and attention keep: with the caching allocator (`allocated`), and outside
    messages   communicators of NCCL: the first, another of the same ranks, each kind of message, connections of pairs

`outside` is the device's memory that the caching allocator does not have, so other processes of the device disturb it. A row is
what came to be with its first call. The process of a rank is this module.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.gpu_report.machine import Machine, attempt
from benchmarks.gpu_report.parts import Found
from benchmarks.harness import as_worker, run_workers

LIMIT_S = 120
WIDTH = 1024


def measure(machine: Machine) -> Found:
    used = attempt(used_bytes) if not machine.rehearsal else 0
    torch.zeros(1, device=machine.device)
    yield "context", {"outside": machine.outside_bytes(), "used_before": used}
    yield "libraries", {name: attempt(row, machine, run) for name, run in calls(machine).items()}
    if machine.ranks > 1:
        arguments = [str(machine.folder), *(["--rehearse"] if machine.rehearsal else [])]
        yield "messages", attempt(run_workers, __file__, machine.ranks, arguments, LIMIT_S)


def used_bytes() -> int:
    """Bytes of the first device that are taken, before this process has a context there."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout) << 20


def calls(machine: Machine) -> dict[str, Callable[[], Any]]:
    """Calls of libraries, each of which may keep a workspace."""
    width = 64 if machine.rehearsal else WIDTH

    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=machine.device)

    def product(dtype: torch.dtype) -> Any:
        return ones(width, width, dtype=dtype) @ ones(width, width, dtype=dtype)

    def linear() -> Any:
        x, bias = ones(width, width, dtype=torch.bfloat16), ones(width, dtype=torch.bfloat16)
        return F.linear(x, x, bias)

    def on_another_stream() -> Any:
        module = machine.backend.module
        with module.stream(module.Stream()):
            return product(torch.float32)

    def attention() -> Any:
        q = ones(1, 8, width, 64, dtype=torch.bfloat16).requires_grad_()
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()

    def convolution() -> Any:
        return F.conv2d(ones(4, 16, 32, 32).requires_grad_(), ones(16, 16, 3, 3), padding=1).sum().backward()

    return {
        "product float32": lambda: product(torch.float32),
        "product bfloat16": lambda: product(torch.bfloat16),
        "product with bias": linear,
        "product on another stream": on_another_stream,
        "attention": attention,
        "convolution": convolution,
        "sort": lambda: ones(1 << 20).sort(),
        "compiled kernel": lambda: machine.compiled(lambda x: x.sin() + 1)(ones(width)),
    }


def row(machine: Machine, run: Callable[[], Any]) -> dict[str, int]:
    """The bytes that a first call leaves behind, with the allocator and outside of it."""
    allocated, outside = machine.allocated_bytes(), machine.outside_bytes()
    run()
    machine.synchronize()
    return {"allocated": machine.allocated_bytes() - allocated, "outside": machine.outside_bytes() - outside}


def messages(machine: Machine) -> dict[str, Any]:
    """The same of messages, on this rank; every rank calls it."""
    device, ranks, rank = machine.backend.current(), dist.get_world_size(), dist.get_rank()
    x, many = torch.ones(1 << 20, device=device), torch.ones(ranks << 16, device=device)

    def pairs(distance: int) -> None:
        """A message to a neighbour, and one from the neighbour on the other side."""
        to, source = (rank + distance) % ranks, (rank - distance) % ranks
        ops = [dist.P2POp(dist.isend, x, to), dist.P2POp(dist.irecv, torch.empty_like(x), source)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def another() -> None:
        dist.all_reduce(x, group=dist.new_group(list(range(ranks))))

    runs: dict[str, Callable[[], Any]] = {
        "first all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather_into_tensor(torch.empty_like(many), many[: 1 << 16]),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.empty_like(many[: 1 << 16]), many),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(many), many),
        "another communicator": another,
        "a third communicator": another,
        "to the next rank": lambda: pairs(1),
        **({"to the rank after it": lambda: pairs(2)} if ranks > 2 else {}),
    }
    return {name: attempt(row, machine, run) for name, run in runs.items()}


def lines(record: dict[str, Any]) -> list[str]:
    told = []
    if "context" in record:
        context, before = record["context"]["outside"], record["context"]["used_before"]
        told.append(f"context {(context - before) / 1e6:.0f} MB" if isinstance(before, int) else f"context: {before}")
    for kind in ("libraries", "messages"):
        for name, one in record.get(kind, {}).items():
            if isinstance(one, dict) and "outside" in one:
                told.append(f"{name}: {one['outside'] / 1e6:.1f} MB outside, {one['allocated'] / 1e6:.1f} MB allocated")
            else:
                told.append(f"{name}: {one}")
    return told


if __name__ == "__main__":
    here = Machine(Path(sys.argv[1]), "--rehearse" in sys.argv)
    as_worker(functools.partial(messages, here), here.backend)
