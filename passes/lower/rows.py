"""The axes over which a stage's ranks share the rows of a batch among them: what a rank has to read of its inputs.

Every rank could be given the whole batch, and lines take what they need of it. Who reads only some rows is to read those that its
lines take, so the lines are asked: an input is followed from where a stage takes it, through calls, and where it is first held in
blocks of rows, these are a candidate. What all candidates agree on is taken. An input that some line wants whole is put together
from the ranks' rows at run time (`autopar/runtime/step/own_rows.py`), so any answer gives the same numbers, and this one gives
the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from autopar.ir.lines import CallForward, Compute, Convert, Cut, Function, Start
from autopar.ir.lowered import LoweredTemplate, Row
from autopar.ir.mesh import Mesh

Axes = tuple[str, ...]


def row_axes(
    rows: Sequence[Row], forward: Function, templates: Mapping[str, LoweredTemplate], mesh: Mesh
) -> dict[int, Axes]:
    """By the index of every input that has a batch: the axes, major first, over whose ranks its rows are shared, the same for
    all; none where they cannot be."""
    batched = [(row, row.batch_dim) for row in rows if row.batch_dim is not None]
    held = set[Axes]()
    for row, dim in batched:
        if row.spec.dims[dim]:
            held.add(row.spec.dims[dim])
        else:
            _Followed(row.type.shape, dim, templates, held).through(forward, row.name)
    axes = _common(held)
    divides = all(mesh.blocks(row.type.shape[dim], axes) is not None for row, dim in batched)
    return {row.index: axes if divides else () for row, _ in batched}


def _common(held: Collection[Axes]) -> Axes:
    """The axes that all begin with."""
    alike = takewhile(lambda together: len({*together}) == 1, zip(*held, strict=False))
    return tuple(axis for axis, *_ in alike)


@dataclass(frozen=True)
class _Followed:
    """An input that lines hold whole, and what they make of it in its shape, up to where a dim is first held in blocks. held: the
    axes of these are added to it."""

    shape: tuple[int, ...]
    dim: int
    templates: Mapping[str, LoweredTemplate]
    held: set[Axes]
    calls: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)

    def through(self, function: Function, name: str) -> frozenset[str]:
        """The names under which a function has it whole. name: of its argument."""
        whole = {name}
        for line in function.lines:
            step = line.line if isinstance(line, Start) else line
            if isinstance(step, Cut) and step.value in whole:
                whole.update(step.outs)
            elif isinstance(step, Convert | Compute) and not whole.isdisjoint(step.reads()):
                whole.update(self._kept(step))
            elif isinstance(step, CallForward):
                whole.update(self._called(step, whole))
        return frozenset(whole)

    def _kept(self, line: Convert | Compute) -> Iterator[str]:
        """The values that a line makes of it whole, in its shape; the axes of those in blocks are noted."""
        for out, type_, spec in line.made():
            if type_ is not None and spec is not None and type_.shape == self.shape:
                if spec.dims[self.dim]:
                    self.held.add(spec.dims[self.dim])
                else:
                    yield out

    def _called(self, call: CallForward, whole: Collection[str]) -> Iterator[str]:
        """The values that a call gives of it whole; a template is looked at once."""
        own = self.templates[call.template].forward
        for given, taken in zip(call.inputs, own.args[len(call.params) :], strict=True):
            if given in whole:
                key = call.template, taken
                if key not in self.calls:
                    self.calls[key] = self.through(own, taken)
                yield from (out for out, name in zip(call.outs, own.returns, strict=False) if name in self.calls[key])
