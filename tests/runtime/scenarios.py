"""Scenarios that both backends are asked to run, so that their answers can be compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import Comm, GradEntry, GradStore, Session
from autopar.runtime.comm.calls import Message, Posted
from autopar.runtime.gradients.bucket_sizes import BucketSizes
from tests.runtime import stages

MESH = {"a": 2, "b": 2}
AXES = ("a", "b", ("a", "b"), ("b", "a"))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool)


def value(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) * 4
    return x.to(dtype) if dtype.is_floating_point else x.round().to(dtype)


def send(comm: Comm, x: Tensor, peer: int, tag: int = 0) -> Posted:
    """Start sending x to a rank."""
    return comm.start_messages([Message("send", x, peer, tag)])[0]


def receive(comm: Comm, buffer: Tensor, peer: int, tag: int = 0) -> Tensor:
    """Wait for a message of a rank; the buffer, filled."""
    comm.start_messages([Message("recv", buffer, peer, tag)])[0].wait()
    return buffer


def collectives(comm: Any, sizes: tuple[int, ...] = (8, 256), dtypes: Any = DTYPES) -> dict[str, Tensor]:
    """Every collective over every axis set; 8 × 8 goes the way of small messages, 256 × 256 that of large ones."""
    got: dict[str, Tensor] = {}
    for axes in AXES:
        for size in sizes:
            x = value(comm.rank, size, size)
            got |= {
                f"{axes} {size} sum": comm.all_reduce(x, axes, site="scenario"),
                f"{axes} {size} max": comm.all_reduce(x, axes, op="max"),
                f"{axes} {size} gather": comm.all_gather(x, 1, axes),
                f"{axes} {size} gather0": comm.all_gather(x.t(), 0, axes),
                f"{axes} {size} scatter": comm.reduce_scatter(x, 1, axes),
                f"{axes} {size} scatter_min": comm.reduce_scatter(x, 0, axes, op="min"),
                f"{axes} {size} swap": comm.all_to_all(x, 0, 1, axes),
                f"{axes} {size} first": comm.broadcast(x, axes, index=1),
            }
        started = [comm.start_all_reduce(value(comm.rank + i, 4), axes) for i in range(5)]
        gathers = [comm.start_all_gather(value(comm.rank + i, 4), 0, axes) for i in range(5)]
        got |= {f"{axes} async gather {i}": handle.wait() for i, handle in enumerate(gathers)}
        got |= {f"{axes} async sum {i}": handle.wait() for i, handle in reversed(list(enumerate(started)))}
    for axes in ("a", "b", ("a", "b")):
        n, me = comm.axis_size(axes), comm.axis_index(axes)
        for size in sizes:
            x = value(comm.rank, size, size)
            started = [comm.start_shift(x, axes, by) for by in (1, -1, 2)]
            got |= {f"{axes} {size} shift {i}": handle.wait() for i, handle in reversed(list(enumerate(started)))}
            sent = [(me + to) * to % 4 for to in range(n)]
            received = [(who + me) * me % 4 for who in range(n)]
            rows = value(comm.rank, sum(sent), size)
            got[f"{axes} {size} exchange"] = comm.start_exchange(rows, sent, received, axes).wait()
    for dtype in dtypes:
        x = value(comm.rank, 8, dtype=dtype)
        got[f"{dtype} gather"] = comm.all_gather(x, 0, "a")
        got[f"{dtype} sum"] = comm.all_reduce(x, "a")
        got[f"{dtype} max"] = comm.all_reduce(x, "a", op="max")
        got[f"{dtype} scatter"] = comm.reduce_scatter(x, 0, "a")
    peer = comm.rank ^ 1
    sent = [send(comm, value(comm.rank + i, 3), peer, tag=i) for i in range(3)]
    for i in (2, 0, 1):
        got[f"message {i}"] = receive(comm, torch.empty(3, dtype=torch.float64), peer, tag=i)
    for posted in sent:
        posted.wait()
    comm.barrier()
    return got


def gradients(
    comm: Any, bucket_bytes: int = 1 << 12, direct_bytes: int = 1 << 14, by_microbatch: Any = lambda index: False
) -> dict[str, Tensor]:
    """Many gradients of all kinds through small buckets, two microbatches, two steps."""
    table = {}
    for i in range(6):
        table[f"reduce{i}"] = GradEntry(1 + i % 2, (("all_reduce", ("a",)),))
        table[f"scatter{i}"] = GradEntry(1, (("reduce_scatter", ("b",), i % 2),))
        table[f"both{i}"] = GradEntry(1, (("all_reduce", ("a",)), ("reduce_scatter", ("b",), 1)))
        table[f"local{i}"] = GradEntry(1, ())
        table[f"cut{i}"] = GradEntry(1, (("shard", ("b",), 0), ("all_reduce", ("a",))))
    table = {n: replace(e, by_microbatch=by_microbatch(i)) for i, (n, e) in enumerate(table.items())}
    store = GradStore(comm, table, 2, BucketSizes(bucket_bytes, 1 << 10, direct_bytes))
    got: dict[str, Tensor] = {}
    for step in range(2):
        for microbatch in range(2):
            for index, (name, entry) in enumerate(table.items()):
                for part in range(entry.contributions):
                    seed = comm.rank + 10 * index + 1000 * microbatch + 5 * part + step
                    size = 64 if index % 3 == 0 else 8
                    store.add(name, value(seed, size, size), owned=index % 2 == 0)
        got |= {f"{name} {step}": grad.clone() for name, grad in store.finish().items()}
    return got


def session_of(program: stages.Program, comm: Any, optimizer: Any = stages.adamw) -> Session:
    return Session(program.pipeline, program.modules, comm, optimizer)


def train(
    comm: Any, program: stages.Program, steps: int, optimizer: Any = stages.adamw, full: Any = None, data: Any = None
) -> dict[str, Any]:
    """Losses, last gradients and final weights. full, data: weights and batches, by default those of the MLP."""
    session = session_of(program, comm, optimizer)
    session.load_weights(full or stages.weights())
    losses = [session.train_step(batch).item() for batch in (data or stages.batches(steps))]
    return {"losses": losses, **left(session, program), "session": session}


def left(session: Session, program: stages.Program) -> dict[str, Any]:
    """Tensors that training leaves: the last gradients and the weights, whole."""
    names = dict.fromkeys(name for module in program.modules for name in (*module.PARAMETERS, *module.BUFFERS))
    return {"grads": session.full_grads(), "weights": {name: session.gather_full(name) for name in names}}
