"""Steps of a resharding path as emitted tables have them, (kind, axes) or (kind, axes, dim, …): what the runtime does for a kind.

    ("all_gather", ("dp",), 0)        [8@dp] -> [8]
    ("reduce_scatter", ("dp",), 0)    ~sum(dp) [8] -> [8@dp]

A run of elements (`mesh.py`) is gathered and scattered along dim 0, and is a block before or after:

    ("all_gather", ("dp",), 0), ("unflatten", ("dp",), 3, 3)        [5, 1] of either rank -> [10, 1] -> [3, 3]
    ("flatten", ("dp",), 3, 3), ("reduce_scatter", ("dp",), 0)      ~sum(dp) [3, 3] -> [10, 1] -> [5, 1]

A block that is whole on one rank along the axes, its owner, comes from there and is summed there; the others keep nothing:

    ("broadcast", ("dp",), 1, 3, 3)                 [0, 3] and [3, 3] -> [3, 3]
    ("reduce", ("dp",), 1), ("own", ("dp",), 1)     ~sum(dp) [3, 3] -> [0, 3] and [3, 3]

A dim whose ranks hold unequal blocks is gathered with its length, ("all_gather", ("tp",), 0, 25). A length that is another on
every rank is told as the size of a dim and the axes that cut it: (25, ("tp",)).

What the compiler knows of a kind beside this is its row of `autopar/ir/steps.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from ..errors import RuntimeProgramError
from .chunks import front_chunks
from .comm import Axes, Comm
from .mesh import run_shape

TableStep = tuple[Any, ...]


@dataclass(frozen=True)
class TableStepKind:
    """run: the step of a value over axes, with the dims of the table's row and the site. dims: per dim of the row 1 where, over n
    ranks, it is n times as long on a rank after the step, -1 where it is 1/n as long. view: whether the result may lie in the
    memory of the value. of_block: the dims of the row are instead the sizes of the block that becomes its runs, one after
    another, or that they become. of_runs: of these, one after another, a rank takes its own. of_owner: the dims of the row are
    the place of the rank that has, or is to have, all of a block, and the sizes of the block where others receive it."""

    run: Callable[[Comm, Tensor, Axes, tuple[int, ...], str], Tensor]
    dims: tuple[int, ...] = ()
    view: bool = False
    of_block: bool = False
    of_runs: bool = False
    of_owner: bool = False

    @cached_property
    def grows(self) -> int:
        """1 where a rank holds n times the bytes after the step, -1 where it holds 1/n of them, else 0."""
        return sum(self.dims)

    def bytes_after(self, nbytes: float, size: int) -> float:
        """Bytes that a rank holds after a step over `size` ranks, from the bytes that it holds before."""
        return nbytes * size if self.grows > 0 else nbytes / size if self.grows else nbytes

    def bytes_before(self, nbytes: float, size: int) -> float:
        """Bytes that a rank holds before a step over `size` ranks, from the bytes that it holds after."""
        return nbytes / size if self.grows > 0 else nbytes * size if self.grows else nbytes


TABLE_STEPS: dict[str, TableStepKind] = {
    "all_reduce": TableStepKind(lambda comm, x, axes, dims, site: comm.all_reduce(x, axes, site=site)),
    "reduce_scatter": TableStepKind(
        lambda comm, x, axes, dims, site: comm.reduce_scatter(x, dims[0], axes, site=site), dims=(-1,)
    ),
    "all_gather": TableStepKind(
        lambda comm, x, axes, dims, site: comm.all_gather(x, dims[0], axes, whole=(*dims, None)[1], site=site),
        dims=(1,),
    ),
    "all_to_all": TableStepKind(
        lambda comm, x, axes, dims, site: comm.all_to_all(x, dims[0], dims[1], axes, site=site), dims=(-1, 1)
    ),
    "shard": TableStepKind(lambda comm, x, axes, dims, site: comm.shard(x, dims[0], axes), dims=(-1,), view=True),
}


def _flat(x: Tensor, parts: int) -> Tensor:
    """The runs of a block, one after another: its elements, and zeros up to a multiple of the parts."""
    length, *ones = run_shape(x.shape, parts)
    if length * parts == x.numel():
        return x.reshape(length * parts, *ones)
    flat = x.new_empty(length * parts)
    flat[: x.numel()].view(x.shape).copy_(x)
    flat[x.numel() :].zero_()
    return flat.view(length * parts, *ones)


TABLE_STEPS |= {
    "flatten": TableStepKind(
        lambda comm, x, axes, dims, site: _flat(x, comm.axis_size(axes)), view=True, of_block=True
    ),
    "take": TableStepKind(
        lambda comm, x, axes, dims, site: front_chunks(x, dims[0], comm.axis_size(axes))[comm.axis_index(axes)],
        dims=(-1,),
        view=True,
        of_runs=True,
    ),
    "unflatten": TableStepKind(
        lambda comm, x, axes, dims, site: x.view(-1)[: math.prod(dims)].view(dims), view=True, of_block=True
    ),
}

TABLE_STEPS |= {
    "broadcast": TableStepKind(
        lambda comm, x, axes, dims, site: comm.broadcast(owned_block(comm, x, axes, dims), axes, dims[0], site=site),
        of_owner=True,
    ),
    "reduce": TableStepKind(lambda comm, x, axes, dims, site: comm.reduce(x, axes, dims[0], site=site), of_owner=True),
    "own": TableStepKind(
        lambda comm, x, axes, dims, site: x if comm.axis_index(axes) == dims[0] else x.new_empty(0, *x.shape[1:]),
        of_owner=True,
        view=True,
    ),
}


def owned_block(comm: Comm, x: Tensor, axes: Axes, dims: tuple[int, ...]) -> Tensor:
    """The block of its owner, on others room for it. dims: the owner's place along the axes, and the sizes of the block."""
    return x if comm.axis_index(axes) == dims[0] else x.new_empty(dims[1:])


def run_step(comm: Comm, x: Tensor, step: TableStep, site: str = "") -> Tensor:
    """One step of a path. Raises RuntimeProgramError."""
    kind, axes, *dims = step
    if kind not in TABLE_STEPS:
        raise RuntimeProgramError(f"unknown resharding step {step!r}")
    lengths = tuple(dim if isinstance(dim, int) else comm.block_size(*dim) for dim in dims)
    return TABLE_STEPS[kind].run(comm, x, axes, lengths, site)
