"""Bytes at which buckets of values are full, by what all ranks know alike.

Every rank runs the same program, and a bucket has to hold the same values on all of them. So what fills it is counted by the
mean of the ranks where these have unequal parts of a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..comm.comm import Axes
from ..comm.mesh import Shares, SpecDims, owner_index, run_axes
from ..comm.reshard import TABLE_STEPS, TableStep

Steps = tuple[TableStep, ...]
Value = tuple[str, Sequence[int], SpecDims, int, Steps]
"""A value's name, whole shape, spec after its steps, bytes of an element, and steps."""
MIB = 1 << 20
BUCKETED = ("all_reduce", "reduce_scatter", "reduce")


@dataclass(frozen=True)
class BucketSizes:
    """Bytes: when a bucket is full; when the first one of a step is, so that messages start early; from where on a value is
    scattered where it lies; when a late one is full at the earliest, as ranks that share cores pay for every message, more than
    for copying what fills less; and of all that a step sends, where that is known. means: of values of which ranks have unequal
    parts, by name, the elements that a rank has on the mean before the last n steps: all ranks decide by these what goes into a
    bucket, as they have to decide alike."""

    full: int = 25 * MIB
    first: int = MIB
    direct: int = 8 * MIB
    least: int = 8 * MIB
    step: int | None = None
    means: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @staticmethod
    def of(values: Iterable[Value], mesh: Mapping[str, int], full: int = 25 * MIB) -> BucketSizes:
        """The sizes for a step that sends these values. mesh: the sizes of its axes."""

        def size(axes: Axes) -> int:
            return math.prod(mesh[axis] for axis in axes)

        means, step = {}, 0
        for name, shape, spec, itemsize, steps in values:
            means[name] = mean_elements(shape, spec, steps, size)
            step += bytes_in_buckets(means[name][0] * itemsize, steps, size)
        return BucketSizes(full, step=step, means=means if any(isinstance(n, Shares) for n in mesh.values()) else {})

    def limit(self, begun: bool, sent: int) -> int:
        """The size at which a bucket is full now. begun: others are under way; sent: bytes of the step that were issued."""
        if not begun:
            return min(self.first, self.full)
        left = self.full if self.step is None else (self.step - sent) // 2
        return min(max(self.least, left), self.full)


def mean_elements(shape: Sequence[int], spec: SpecDims, steps: Steps, size: Callable[[Axes], int]) -> tuple[int, ...]:
    """The elements that a rank has of a value on the mean before its last n steps, n from 0. spec: how it lies after them all."""
    block = -(-math.prod(shape) // math.prod(size(axes) for axes in spec[: len(shape)]))
    cut = size(run_axes(shape, spec)) if owner_index(shape, spec) is None else 1
    elements = [-(-block // cut)]
    for kind, axes, *_ in reversed(steps):
        elements.append(int(TABLE_STEPS[kind].bytes_before(elements[-1], size(axes))))
    return tuple(elements)


def bytes_in_buckets(shard_bytes: float, steps: Steps, size: Callable[[Axes], int]) -> int:
    """The bytes that a value puts into buckets on its way along steps to a shard of so many bytes. size: ranks along axes."""
    total, nbytes = 0.0, shard_bytes
    for kind, axes, *_ in reversed(steps):
        nbytes = TABLE_STEPS[kind].bytes_before(nbytes, size(axes))
        if kind in BUCKETED and size(axes) > 1:
            total += nbytes
    return int(total)
