"""One mesh axis, as the ops see it that send messages themselves (rings, exchanges of tokens, halos, scans).

Emitted text hands it to them: `attention.attention(q, k, v, None, 0.0, True, 0.125, along=rt.along('cp'))`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .calls import Handle
from .comm import Comm
from .mesh import Shares, interval


class Along:
    """One mesh axis, as ops see it that send messages themselves: who this rank is along it, and its neighbours.

    Messages start where they are called and are waited for by `wait()` of what they return. inner: the axis along which they
    go on, where an op sends along several: `rt.along('dp', 'ep')`. uneven: blocks along the axis may be of unequal size.
    """

    __slots__ = ("_comm", "axis", "index", "inner", "size", "uneven")

    def __init__(self, comm: Comm, axis: str, *inner: str) -> None:
        self._comm, self.axis = comm, axis
        self.size, self.index = comm.axis_size(axis), comm.axis_index(axis)
        self.uneven = isinstance(comm.mesh[axis], Shares)
        self.inner: Along | None = Along(comm, *inner) if inner else None

    def lengths(self, size: int) -> tuple[int, ...]:
        """How much each rank along the axis holds of a dim of this size that no other axis cuts."""
        blocks = (interval(size, (self.axis,), self._comm.mesh, {self.axis: rank}) for rank in range(self.size))
        return tuple(block[1] - block[0] for block in blocks if block is not None)

    def start(self, size: int) -> int:
        """Where what this rank holds of a dim of this size begins, that no other axis cuts."""
        return self._comm.block_start(size, self.axis)

    def start_shift(self, x: Tensor, by: int = 1) -> Handle[Tensor]:
        """The x of the rank `by` places before this one, round and round."""
        return self._comm.start_shift(x, self.axis, by)

    def start_exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Handle[Tensor]:
        """`sent[r]` of the rows go to rank r along the axis, in the result `received[r]` come from there."""
        return self._comm.start_exchange(rows, sent, received, self.axis)

    def start_all_reduce(self, x: Tensor, op: str = "sum") -> Handle[Tensor]:
        """The elementwise sum, max or min of every rank's x."""
        return self._comm.start_all_reduce(x, self.axis, op)

    def start_all_gather(self, x: Tensor, dim: int) -> Handle[Tensor]:
        """Every rank's x, joined along dim."""
        return self._comm.start_all_gather(x, dim, self.axis)

    def start_reduce_scatter(self, x: Tensor, dim: int) -> Handle[Tensor]:
        """This rank's chunk along dim of the sum of every rank's x."""
        return self._comm.start_reduce_scatter(x, dim, self.axis)

    def start_all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Handle[Tensor]:
        """Whole along concat_dim, a chunk along split_dim; x is the other way round."""
        return self._comm.start_all_to_all(x, split_dim, concat_dim, self.axis)
