"""Steps from one spec to another. Each runs over mesh axes, and is a collective or a change that every rank makes alone.

A `Step` is what a conversion inside a function is made of; a `RuntimeStep` is the same for a parameter or its gradient,
which the runtime brings to where it is wanted from tables. Two devices, a vector of 8 whose sum is still owed:

    Step("reduce_scatter", "dp", dim=0)             ~sum(dp) [8] -> [8@dp]
    RuntimeStep("reduce_scatter", ("dp",), (0,))    the same in a table, there ("reduce_scatter", ("dp",), 0)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.runtime.comm.reshard import TABLE_STEPS

LOCAL_KINDS = frozenset({"shard", "to_partial"})
"""Kinds of steps that send nothing."""
GATHERED = ("all_gather",)
"""Kinds of steps of updated values that travel in one message with others; those of gradients are
`runtime.gradients.buckets.BUCKETED`."""


@dataclass(frozen=True)
class Step:
    """One conversion step: kind all_gather | shard | all_to_all | all_reduce | reduce_scatter | to_partial.

    dim: the tensor dim that is gathered, sharded or scattered; of an all_to_all the one that becomes whole, and to_dim
    the one that is sharded instead. reduction: of all_reduce and reduce_scatter.
    """

    kind: str
    axis: str
    dim: int = -1
    to_dim: int = -1
    reduction: str = "sum"


@dataclass(frozen=True)
class RuntimeStep:
    """One step of a parameter or gradient: kind all_gather | shard | all_to_all | all_reduce | reduce_scatter, over
    `axes`; dims: the tensor dims it is about (none for all_reduce; of an all_to_all the sharded one, then the whole one).
    """

    kind: str
    axes: tuple[str, ...]
    dims: tuple[int, ...] = ()

    @property
    def row(self) -> tuple[Any, ...]:
        """The step as emitted tables and the runtime have it."""
        return (self.kind, self.axes, *self.dims)


def rows(steps: Iterable[RuntimeStep]) -> tuple[tuple[Any, ...], ...]:
    """Steps as emitted tables and the runtime have them."""
    return tuple(step.row for step in steps)


def bytes_after(kind: str, nbytes: float, size: int) -> float:
    """Bytes that a rank holds after a step over an axis of `size` ranks, from the bytes that it holds before."""
    return TABLE_STEPS[kind].bytes_after(nbytes, size)


def bytes_before_per_byte(steps: Iterable[RuntimeStep], sizes: Mapping[str, int]) -> float:
    """How many bytes a rank holds before the steps for each byte that it holds after them."""
    scale = 1.0
    for step in steps:
        for axis in step.axes:
            scale = TABLE_STEPS[step.kind].bytes_before(scale, sizes[axis])
    return scale
