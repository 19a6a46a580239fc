"""Collectives of Gloo groups out of sends and receives that land in place.

Gloo's own reduce_scatter is an all_reduce and its all_gather copies everything once more; these are 2 to 3 times faster
for large messages, and reductions add in member order, as the threaded backend does. The same exchange does small
all_reduces in one round trip. Large ones stay with Gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .buffers import BufferPool
from .comm import REDUCTIONS, Call, reduce_in_order

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
OPS = tuple(REDUCTIONS)
EXCHANGE_BYTES = 1 << 17


def start(call: Call, number: int, process_group: Any, pool: BufferPool) -> Callable[[], None] | None:
    """Start the group's collective of this number; the wait. None where Gloo's own is better."""
    nbytes = call.inp.numel() * call.inp.element_size()
    n, me = call.group.size, call.group.index
    if call.kind == "all_reduce" and (nbytes * (n - 1) <= EXCHANGE_BYTES or not _native_reduces(call.inp.dtype)):
        rows = pool.take(n * call.inp.numel(), call.inp)
        received = rows.view(n, -1)
        source = call.inp.reshape(-1)
        wait_rows = _exchange(call, number, process_group, received, lambda _: source)

        def finish_small() -> None:
            wait_rows()
            parts = [source if member == me else received[member] for member in range(n)]
            if call.out is call.inp:
                parts[me] = received[me].copy_(source)
            reduce_in_order(parts, call.op, call.out.view(-1))
            pool.give(rows)

        return finish_small
    if call.kind == "all_gather":
        row = call.out[me]
        if row.data_ptr() != call.inp.data_ptr():
            row.copy_(call.inp)
        return _exchange(call, number, process_group, call.out, lambda _: row)
    if call.kind == "reduce_scatter":
        scratch = pool.take(call.inp.numel() // n * (n - 1), call.inp)
        arrived = dict(zip((m for m in range(n) if m != me), scratch.view(n - 1, *call.inp.shape[1:]), strict=True))
        wait_chunks = _exchange(call, number, process_group, arrived, lambda member: call.inp[member])

        def finish_scatter() -> None:
            wait_chunks()
            reduce_in_order([call.inp[m] if m == me else arrived[m] for m in range(n)], call.op, call.out)
            arrived.clear()
            pool.give(scratch)

        return finish_scatter
    if call.kind == "all_to_all":
        call.out[me].copy_(call.inp[me])
        return _exchange(call, number, process_group, call.out, lambda member: call.inp[member])
    return None


def _exchange(
    call: Call, number: int, process_group: Any, rows: Tensor | Mapping[int, Tensor], outgoing: Callable[[int], Tensor]
) -> Callable[[], None]:
    """Send outgoing(member) to every other member, receive theirs in rows[member].

    The tag says which call this is, so that different collectives never take each other's bytes.
    """
    group = call.group
    tag = (number & 0xFFFF) << 12 | (call.inp.numel() & 0xFF) << 4 | KINDS.index(call.kind) << 2 | OPS.index(call.op)
    works, kept = [], []
    for distance in range(1, group.size):
        source = (group.index - distance) % group.size
        target = (group.index + distance) % group.size
        works.append(dist.irecv(rows[source], group.ranks[source], group=process_group, tag=tag))
        kept.append(outgoing(target))
        works.append(dist.isend(kept[-1], group.ranks[target], group=process_group, tag=tag))

    def wait() -> None:
        for work in works:
            if work is not None:
                work.wait()
        kept.clear()

    return wait


def _native_reduces(dtype: torch.dtype) -> bool:
    return dtype not in (torch.int16,)
