"""Steps from one spec to another. Each runs over mesh axes, and is a collective or a change that every rank makes alone.

A `Step` is what a conversion inside a function is made of; a `RuntimeStep` is the same for a parameter or its gradient,
which the runtime brings to where it is wanted from tables. Two devices, a vector of 8 whose sum is still owed:

    Step("reduce_scatter", "dp", dim=0)             ~sum(dp) [8] -> [8@dp]
    RuntimeStep("reduce_scatter", ("dp",), (0,))    the same in a table, there ("reduce_scatter", ("dp",), 0)

A step takes an axis from where it is in a spec, and puts it somewhere else. What becomes of it is a row of `STEP_KINDS`, from
which conversions are found, printed, typed and priced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autopar.ir.mesh import Extent, Mesh
from autopar.ir.spec import Spec
from autopar.runtime.comm.reshard import TABLE_STEPS, TableStepKind
from autopar.runtime.kernels.ops import only_first

CopiedSeconds = Callable[[float, int, tuple[int, ...], float], float]
"""Seconds that a rank copies for a step beside its message, from the bytes that it holds before, the ranks of the axis, the dims
and the seconds to read or write a byte. Slices and masks cost a little, so that equal paths prefer fewer steps; so do gathers
and scatters along any dim but the first, where chunks lie apart in memory and are copied."""


@dataclass(frozen=True)
class StepKind:
    """A kind of step, as the compiler knows it; no two kinds change a spec alike.

    table: what it does at run time; where a dim becomes longer the step takes the axis from it, where it becomes shorter it
    puts it there. owes: -1 where it takes the axis from what is owed, 1 where it puts it there. noun: in the name of the result.
    sends: whether it is a collective of its name. function: that a line calls with the operand, the dims and the axis, with
    {start} before the names of functions that give a handle; by_index: it takes the rank's index along the axis instead.
    """

    table: TableStepKind
    noun: str
    owes: int = 0
    sends: bool = True
    copied_s: CopiedSeconds = lambda held, size, dims, copy_s: 0.0
    function: str = "rt.comm.{start}{kind}"
    by_index: bool = False

    def full_bytes(self, nbytes: float, size: int) -> float:
        """Bytes of the full array of its collective over `size` ranks, from the bytes that a rank holds before."""
        return max(nbytes, self.table.bytes_after(nbytes, size))


def _slice_copied_s(held: float, size: int, dims: tuple[int, ...], copy_s: float) -> float:
    """Seconds to take one of so many parts of what a rank holds."""
    return 0.1 * copy_s * held / size + 1e-9


STEP_KINDS: dict[str, StepKind] = {
    "all_gather": StepKind(
        TABLE_STEPS["all_gather"],
        "gathered",
        copied_s=lambda held, size, dims, copy_s: 0.1 * copy_s * (held * size) if dims[0] else 0.0,
    ),
    "all_to_all": StepKind(TABLE_STEPS["all_to_all"], "exchanged"),
    "all_reduce": StepKind(TABLE_STEPS["all_reduce"], "reduced", owes=-1),
    "reduce_scatter": StepKind(
        TABLE_STEPS["reduce_scatter"],
        "scattered",
        owes=-1,
        copied_s=lambda held, size, dims, copy_s: 0.1 * copy_s * held if dims[0] else 0.0,
    ),
    "to_partial": StepKind(
        TableStepKind(lambda comm, x, axes, dims, site: only_first(x, comm.axis_index(axes))),
        "masked",
        owes=1,
        sends=False,
        copied_s=lambda held, size, dims, copy_s: copy_s * held + 1e-8,
        function="ops.only_first",
        by_index=True,
    ),
    "shard": StepKind(TABLE_STEPS["shard"], "sliced", sends=False, copied_s=_slice_copied_s),
    "flatten": StepKind(TABLE_STEPS["flatten"], "flat", sends=False),
    "take": StepKind(TABLE_STEPS["take"], "taken", sends=False, copied_s=_slice_copied_s),
    "unflatten": StepKind(TABLE_STEPS["unflatten"], "block", sends=False),
    "broadcast": StepKind(TABLE_STEPS["broadcast"], "block"),
    "reduce": StepKind(TABLE_STEPS["reduce"], "reduced", owes=-1),
    "own": StepKind(TABLE_STEPS["own"], "owned", sends=False),
}
"""Every kind of step by its name. Those that the runtime has rows for may be in tables. Those of runs and owners are in tables
alone: values are no runs."""


@dataclass(frozen=True)
class _OfKind:
    kind: str

    @property
    def facts(self) -> StepKind:
        """The row of the step's kind."""
        return STEP_KINDS[self.kind]


@dataclass(frozen=True)
class Step(_OfKind):
    """One conversion step.

    dim: the tensor dim that is gathered, sharded or scattered; of an all_to_all the one that becomes whole, and to_dim
    the one that is sharded instead. reduction: of a step that settles one.
    """

    axis: str
    dim: int = -1
    to_dim: int = -1
    reduction: str = "sum"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axis."""
        return (self.axis,)

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """The dims that the step changes, as the runtime has them."""
        return ((), (self.dim,), (self.to_dim, self.dim))[len(self.facts.table.dims)]

    @property
    def moved(self) -> Iterator[tuple[int, int]]:
        """The tensor dims with how they change."""
        yield from zip(self.dims, self.facts.table.dims, strict=True)


@dataclass(frozen=True)
class RuntimeStep(_OfKind):
    """One step of a parameter or gradient over `axes`. dims: the tensor dims it is about (none for all_reduce; of an all_to_all
    the sharded one, then the whole one), behind the one that is gathered from unequal blocks its length; or the sizes of a
    block."""

    axes: tuple[str, ...]
    dims: tuple[int, ...] = ()

    @property
    def row(self) -> tuple[Any, ...]:
        """The step as emitted tables and the runtime have it."""
        return (self.kind, self.axes, *(dim.told if isinstance(dim, Extent) else dim for dim in self.dims))

    @property
    def moved(self) -> Iterator[tuple[int, int]]:
        """The tensor dims with how they change (`TableStepKind.dims`)."""
        yield from zip(self.dims, self.facts.table.dims, strict=False)


AnyStep = Step | RuntimeStep


def rows(steps: Iterable[RuntimeStep]) -> tuple[tuple[Any, ...], ...]:
    """Steps as emitted tables and the runtime have them."""
    return tuple(step.row for step in steps)


def bytes_before_per_byte(
    steps: Sequence[RuntimeStep], mesh: Mesh, after: Spec | None = None, shape: tuple[int, ...] = ()
) -> float:
    """How many bytes the rank with most holds before steps of a table for each byte that it holds after them. after, shape: how
    what rests lies then, and its whole shape (None: all ranks hold as much)."""
    scale, cut = 1.0, _Cut.of(after, mesh, shape)
    for step in reversed(steps):
        cut.flat ^= step.facts.table.of_block
        for axis in reversed(step.axes):
            scale = cut.moved(step, axis, scale, back=True)
    return scale


def spec_before(steps: Sequence[RuntimeStep], after: Spec) -> Spec:
    """How a block is cut before steps of a table, from how what rests lies after them; sums that are owed are left out."""
    dims, flat = [*after.dims], bool(after.run) and after.owner is None
    for step in reversed(steps):
        flat ^= step.facts.table.of_block
        for dim, grows in () if flat else step.moved:
            dims[dim] = (*dims[dim], *step.axes) if grows > 0 else dims[dim][: -len(step.axes)]
    return Spec(tuple(dims), (), after.run if flat else ())


def passed(
    steps: Iterable[AnyStep], held: float, mesh: Mesh, before: Spec | None = None, shape: tuple[int, ...] = ()
) -> Iterator[tuple[AnyStep, str, int, float]]:
    """Steps axis by axis, where these have several ranks, with their number and the bytes that the rank with most holds before.

    held: its bytes before all of them. before, shape: as of `bytes_before_per_byte`, but before the steps.
    """
    cut = _Cut.of(before, mesh, shape)
    for step in steps:
        cut.flat ^= step.facts.table.of_block
        for axis in step.axes:
            size = mesh.sizes[axis]
            if size > 1:
                yield step, axis, size, held
            held = cut.moved(step, axis, held)


@dataclass
class _Cut:
    """How a block lies while steps change it. dims: the axes of every dim (none: all ranks hold as much); flat: it lies as its
    runs, which are equal."""

    mesh: Mesh
    shape: tuple[int, ...]
    dims: list[tuple[str, ...]]
    flat: bool

    @staticmethod
    def of(spec: Spec | None, mesh: Mesh, shape: tuple[int, ...]) -> _Cut:
        """The block of a spec."""
        dims = [*spec.dims] if spec is not None and mesh.uneven else []
        return _Cut(mesh, shape, dims, spec is not None and bool(spec.run) and spec.owner is None)

    def moved(self, step: AnyStep, axis: str, held: float, back: bool = False) -> float:
        """The bytes that the rank with most holds after a step over an axis, or before it (back). held: on the other side."""
        if not self.dims or self.flat:
            size = self.mesh.sizes[axis]
            return step.facts.table.bytes_before(held, size) if back else step.facts.table.bytes_after(held, size)
        for dim, grows in step.moved:
            held /= self._longest(dim)
            self.dims[dim] = self.dims[dim][:-1] if (grows > 0) != back else (*self.dims[dim], axis)
            held *= self._longest(dim)
        return held

    def _longest(self, dim: int) -> int:
        """The length of the longest block of a dim."""
        length = self.mesh.extent(self.shape[dim], self.dims[dim])
        assert length is not None, (self.shape[dim], self.dims[dim])
        return int(length)
