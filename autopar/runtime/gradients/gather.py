"""Storage shards back to what the computation uses: several parameters' gathers started together, waited for together.

Large shards are gathered one by one, straight into the full tensor when the gathered dim is 0; small ones of the same
axes and dtype travel in one flat message, because a message costs more than their bytes. So does what one rank has whole: of
one owner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm.calls import Handle
from ..comm.chunks import join_chunks
from ..comm.comm import Comm
from ..comm.reshard import TABLE_STEPS, TableStep, run_step
from ..errors import RuntimeProgramError

DIRECT_BYTES = 1 << 18
GATHERED = ("all_gather", "broadcast")
"""Kinds of steps that travel in one message with others; those of gradients are `buckets.BUCKETED`."""
Gather = tuple[Tensor, tuple[TableStep, ...], Tensor | None]


@torch.no_grad()
def start_gathers(
    comm: Comm,
    items: Sequence[Gather],
    site: str = "",
    direct_bytes: int = DIRECT_BYTES,
    dtypes: Sequence[torch.dtype | None] = (),
) -> Handle[list[Tensor]]:
    """Start (shard, steps, out) for every item; wait() gives the full tensors in order.

    steps are all_gathers and broadcasts (others run too, later and one by one). out, when given, is a contiguous tensor that
    receives the result; the shard may be its own part of out. dtypes: shards are cast before they are sent, so that what is
    narrow travels (what needs no steps, in the end). A shard must not change before the wait.
    """
    items = [_cast(comm, item, dtype) for item, dtype in zip(items, dtypes, strict=True)] if dtypes else items
    finishers: list[Callable[[], Tensor] | None] = [None] * len(items)
    groups: dict[Any, list[int]] = {}
    for index, (shard, steps, out) in enumerate(items):
        steps = tuple(step for step in steps if comm.axis_size(step[1]) > 1)
        if not steps:
            finishers[index] = _constant(shard if out is None else _into(out, shard), dtypes[index] if dtypes else None)
        elif TABLE_STEPS[steps[0][0]].of_owner:
            groups.setdefault((steps[0][1], shard.dtype, steps[0][2]), []).append(index)
        elif steps[0][0] not in GATHERED or len(steps[0]) > 3:
            finishers[index] = _sequence(comm, Handle(None, shard), steps, out, site)
        elif shard.numel() * shard.element_size() >= direct_bytes:
            finishers[index] = _direct(comm, shard, steps, out, site)
        else:
            groups.setdefault((steps[0][1], shard.dtype, None), []).append(index)
    for (axes, _, owner), members in groups.items():
        if owner is not None:
            owned = [(items[index][0], _real(comm, items[index][1]), items[index][2]) for index in members]
            for index, finish in zip(members, _from_owner(comm, axes, owner, owned, site, direct_bytes), strict=True):
                finishers[index] = finish
        elif len(members) == 1:
            shard, steps, out = items[members[0]]
            finishers[members[0]] = _direct(comm, shard, _real(comm, steps), out, site)
        else:
            parts = _coalesced(comm, axes, [items[index][0] for index in members], site)
            for place, index in enumerate(members):
                shard, steps, out = items[index]
                finishers[index] = _from_parts(comm, parts, place, _real(comm, steps), out, site)

    @torch.no_grad()
    def wait() -> list[Tensor]:
        results = []
        for index, finish in enumerate(finishers):
            if finish is None:
                raise RuntimeProgramError("a gather was started without an end")
            results.append(finish())
            finishers[index] = finish = None  # with what it received
        return results

    return Handle(wait)


def _real(comm: Comm, steps: tuple[TableStep, ...]) -> tuple[TableStep, ...]:
    return tuple(step for step in steps if comm.axis_size(step[1]) > 1)


def _into(out: Tensor, value: Tensor) -> Tensor:
    return out if out.data_ptr() == value.data_ptr() else out.copy_(value)


def _constant(value: Tensor, dtype: torch.dtype | None) -> Callable[[], Tensor]:
    return lambda: value if dtype is None else value.to(dtype)


def _cast(comm: Comm, item: Gather, dtype: torch.dtype | None) -> Gather:
    shard, steps, out = item
    return item if dtype is None or not _real(comm, steps) else (shard.to(dtype), steps, out)


def _sequence(
    comm: Comm, handle: Handle[Tensor], steps: tuple[TableStep, ...], out: Tensor | None, site: str
) -> Callable[[], Tensor]:
    def finish() -> Tensor:
        value = handle.wait()
        for step in steps:
            value = run_step(comm, value, step, site)
        return value if out is None else _into(out, value)

    return finish


def _direct(
    comm: Comm, shard: Tensor, steps: tuple[TableStep, ...], out: Tensor | None, site: str
) -> Callable[[], Tensor]:
    _, axes, dim = steps[0]
    shard, n, dim = shard.contiguous(), comm.axis_size(axes), dim % shard.dim()
    full_shape = (*shard.shape[:dim], n * shard.shape[dim], *shard.shape[dim + 1 :])
    fits = out is not None and out.numel() == n * shard.numel() and [step[0] for step in steps[1:]] == ["unflatten"]
    if dim == 0 and (len(steps) == 1 or fits):
        full = out if out is not None else shard.new_empty(full_shape)
        handle = comm.start_all_gather_into(full.view(n, *shard.shape), shard, axes, site=site)
        return handle.then(lambda _: full).wait
    chunks = comm.start_all_gather_into(shard.new_empty(n, *shard.shape), shard, axes, site=site)
    if len(steps) == 1 and out is not None:
        return lambda: _write_joined(out, chunks.wait(), dim)
    return _sequence(comm, chunks.then(lambda rows: join_chunks(rows, dim)), steps[1:], out, site)


def _write_joined(out: Tensor, rows: Tensor, dim: int) -> Tensor:
    out.unflatten(dim, (rows.shape[0], rows.shape[1 + dim])).movedim(dim, 0).copy_(rows)
    return out


def _coalesced(comm: Comm, axes: Any, shards: list[Tensor], site: str) -> Handle[list[Tensor]]:
    n = comm.axis_size(axes)
    flat = torch.cat([shard.reshape(-1) for shard in shards])
    handle = comm.start_all_gather_into(flat.new_empty(n, flat.numel()), flat, axes, site=site)
    sizes = [shard.numel() for shard in shards]
    shapes = [shard.shape for shard in shards]

    def split(rows: Tensor) -> list[Tensor]:
        return [part.view(n, *shape) for part, shape in zip(rows.split(sizes, dim=1), shapes, strict=True)]

    return handle.then(split)


def _from_parts(
    comm: Comm, parts: Handle[list[Tensor]], place: int, steps: tuple[TableStep, ...], out: Tensor | None, site: str
) -> Callable[[], Tensor]:
    dim = steps[0][2]

    def finish() -> Tensor:
        rows = parts.wait()[place]
        axis = dim % (rows.dim() - 1)
        if len(steps) == 1 and out is not None:
            return _write_joined(out, rows, axis)
        return _sequence(comm, Handle(None, join_chunks(rows, axis)), steps[1:], out, site)()

    return finish


def _from_owner(
    comm: Comm, axes: Any, owner: int, items: Sequence[Gather], site: str, direct_bytes: int
) -> list[Callable[[], Tensor]]:
    """Blocks that one rank has: large ones in messages of their own, in the memory that receives them, the others in one. The
    owner gets a copy too, so that all ranks hold as much."""
    has = comm.axis_index(axes) == owner
    sizes = [tuple(n if isinstance(n, int) else comm.block_size(*n) for n in steps[0][3:]) for _, steps, _ in items]
    counts = [math.prod(block) for block in sizes]
    small = [i for i, n in enumerate(counts) if n * items[i][0].element_size() < direct_bytes]
    packed = small if len(small) > 1 else []
    parts: Handle[Sequence[Tensor]] = Handle(None, ())
    if packed:
        shards = [items[i][0].reshape(-1) for i in packed]
        flat = torch.cat(shards) if has else shards[0].new_empty(sum(counts[i] for i in packed))
        handle = comm.start_broadcast_into(flat, axes, owner, site=site)
        parts = handle.then(lambda whole: whole.split([counts[i] for i in packed]))
    finishers = []
    for i, (shard, steps, out) in enumerate(items):
        if i in packed:
            block = parts.then(partial(_part, place=packed.index(i), size=sizes[i]))
        else:
            received = len(steps) == 1 and out is not None
            room = out if received and out is not None else shard.new_empty(sizes[i])
            if has:
                _into(room, shard)
            block = comm.start_broadcast_into(room, axes, owner, site=site)
        finishers.append(_sequence(comm, block, steps[1:], out, site))
    return finishers


def _part(rows: Sequence[Tensor], place: int, size: tuple[int, ...]) -> Tensor:
    return rows[place].view(size)
