"""Kinds of collectives: one row says what a kind does, between ranks that are threads and between processes.

Buffers are contiguous. The whole array lies in `inp`, `out` or both, with a row for every member of the group where the row of
the table says so: of two ranks

    all_gather       inp [3]      out [2, 3]    rows_out
    reduce_scatter   inp [2, 3]   out [3]       rows_in, reduces

To add a collective, add its row; its seconds are a row of `autopar/costmodel/collective.py`. Gloo may have a faster way
(gloo.py), nodes another (hierarchical.py).

What a transport has no collective for by its dtype is moved as bytes, and summed in a wider dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RuntimeProgramError
from .backends import Transport
from .calls import Call
from .reductions import reduce_in_order

REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renamed these two.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
WIDER = {torch.int16: torch.int32}
"""A dtype in which another is reduced, to the same bits."""


@dataclass(frozen=True)
class Collective:
    """One kind of collective: all that is known of it.

    among_threads: fill every member's `out`, from the calls of all members in their order. among_processes: start it on a
    process group of torch; what is returned has a `wait()`. rows_in, rows_out: whether inp, out have a row for every member.
    reduces: whether `op` of a call counts. by_rank: whether it names the ranks of members itself, so that it need not be told
    in which order a process group has them; fixed: whether it can be told.
    """

    among_threads: Callable[[Sequence[Call]], None]
    among_processes: Callable[[Call, Any], Any]
    rows_in: bool = False
    rows_out: bool = False
    reduces: bool = False
    by_rank: bool = False
    fixed: bool = True

    def whole(self, call: Call) -> Any:
        """The buffer of a call that has all of the array."""
        return call.out if self.rows_out and not self.rows_in else call.inp


class _Works:
    """Several works of torch, waited for as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _all_reduce(calls: Sequence[Call]) -> None:
    reduce_in_order([call.inp for call in calls], calls[0].op, calls[0].out)
    for call in calls[1:]:
        call.out.copy_(calls[0].out)


def _start_all_reduce(call: Call, group: Any) -> Any:
    if call.out is not call.inp:
        call.out.copy_(call.inp)
    return dist.all_reduce(call.out, REDUCE_OPS[call.op], group=group, async_op=True)


def _all_gather(calls: Sequence[Call]) -> None:
    for call in calls:
        for row, source in zip(call.out.unbind(0), calls, strict=True):
            row.copy_(source.inp)


def _start_all_gather(call: Call, group: Any) -> Any:
    return ALL_GATHER(call.out.view(-1), call.inp.view(-1), group=group, async_op=True)


def _reduce_scatter(calls: Sequence[Call]) -> None:
    for index, call in enumerate(calls):
        reduce_in_order([source.inp[index] for source in calls], call.op, call.out)


def _start_reduce_scatter(call: Call, group: Any) -> Any:
    return REDUCE_SCATTER(call.out.view(-1), call.inp.view(-1), REDUCE_OPS[call.op], group=group, async_op=True)


def _all_to_all(calls: Sequence[Call]) -> None:
    for index, call in enumerate(calls):
        for row, source in zip(call.out.unbind(0), calls, strict=True):
            row.copy_(source.inp[index])


def _start_all_to_all(call: Call, group: Any) -> Any:
    return dist.all_to_all_single(call.out, call.inp, group=group, async_op=True)


def _broadcast(calls: Sequence[Call]) -> None:
    for call in calls:
        call.out.copy_(calls[call.root].inp)


def _start_broadcast(call: Call, group: Any) -> Any:
    if call.group.index == call.root:
        call.out.copy_(call.inp)
    return dist.broadcast(call.out, call.group.ranks[call.root], group=group, async_op=True)


def _reduce(calls: Sequence[Call]) -> None:
    root = calls[calls[0].root]
    reduce_in_order([call.inp for call in calls], root.op, root.out)


def _start_reduce(call: Call, group: Any) -> Any:
    if call.out is not call.inp:
        call.out.copy_(call.inp)
    return dist.reduce(call.out, call.group.ranks[call.root], REDUCE_OPS[call.op], group=group, async_op=True)


def _shift(calls: Sequence[Call]) -> None:
    for index, call in enumerate(calls):
        call.out.copy_(calls[(index - call.root) % len(calls)].inp)


def _start_shift(call: Call, group: Any) -> Any:
    """A send and a receive that go out as one."""
    ranks, me = call.group.ranks, call.group.index
    source, target = (ranks[(me + by) % len(ranks)] for by in (-call.root, call.root))
    return _Works(
        dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, call.inp, target, group), dist.P2POp(dist.irecv, call.out, source, group)]
        )
    )


def _exchange(calls: Sequence[Call]) -> None:
    sent = [call.inp.split(call.sent) for call in calls]
    for index, call in enumerate(calls):
        for rows, source in zip(call.out.split(call.received), sent, strict=True):
            rows.copy_(source[index])


def _start_exchange(call: Call, group: Any) -> Any:
    sizes = list(call.received), list(call.sent)
    return dist.all_to_all_single(call.out, call.inp, *sizes, group=group, async_op=True)


def start(call: Call, group: Any, transport: Transport) -> Callable[[], None]:
    """Start a call on a process group of torch; the wait. Raises RuntimeProgramError where its dtype cannot be reduced."""
    sent = call if transport.takes(call.inp.dtype) else _in_taken_dtype(call, transport)
    work = COLLECTIVES[call.kind].among_processes(sent, group)

    def wait() -> None:
        work.wait()
        if sent.out.dtype.itemsize > call.out.dtype.itemsize:
            call.out.copy_(sent.out)

    return wait


def _in_taken_dtype(call: Call, transport: Transport) -> Call:
    """The call over the same memory, or a wider copy of it, in a dtype that the transport takes."""
    dtype = call.inp.dtype
    if not COLLECTIVES[call.kind].reduces:
        return replace(call, out=as_bytes(call.out), inp=as_bytes(call.inp))
    if dtype.is_complex and call.op == "sum":
        return replace(call, out=torch.view_as_real(call.out), inp=torch.view_as_real(call.inp))
    if dtype not in WIDER:
        raise RuntimeProgramError(f"{call.describe()}: {transport.name} cannot reduce {dtype}")
    return replace(call, out=torch.empty_like(call.out, dtype=WIDER[dtype]), inp=call.inp.to(WIDER[dtype]))


def as_bytes(x: Tensor) -> Tensor:
    """The same memory as bytes, with one more dim: rows stay rows."""
    return x.unsqueeze(-1).view(torch.uint8)


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(_all_reduce, _start_all_reduce, reduces=True),
    "all_gather": Collective(_all_gather, _start_all_gather, rows_out=True),
    "reduce_scatter": Collective(_reduce_scatter, _start_reduce_scatter, rows_in=True, reduces=True),
    "all_to_all": Collective(_all_to_all, _start_all_to_all, rows_in=True, rows_out=True),
    "broadcast": Collective(_broadcast, _start_broadcast, by_rank=True),
    "reduce": Collective(_reduce, _start_reduce, reduces=True, by_rank=True),
    "shift": Collective(_shift, _start_shift, by_rank=True),
    "exchange": Collective(_exchange, _start_exchange, fixed=False),
}
