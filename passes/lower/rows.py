"""The axes over which a stage's ranks share the rows of a batch among them: what a rank has to read of its inputs.

Every rank could be given the whole batch, and lines take what they need of it. Who reads only some rows is to read those that its
lines take, so the lines are asked: an input is followed from where a stage takes it, through calls, and wherever it is held in
blocks of rows, these are a candidate. What all candidates agree on is taken. An input that some line wants whole is put together
from the ranks' rows at run time (`autopar/runtime/step/own_rows.py`), so any answer gives the same numbers, and this one gives
the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile

from autopar.ir.lines import CallForward, Convert, Cut, Function, Start
from autopar.ir.lowered import LoweredTemplate, Row
from autopar.ir.mesh import Mesh

Axes = tuple[str, ...]


def row_axes(
    rows: Sequence[Row], forward: Function, templates: Mapping[str, LoweredTemplate], mesh: Mesh
) -> dict[int, Axes]:
    """By the index of every input that has a batch: the axes, major first, over whose ranks its rows are shared, the same for
    all; none where they cannot be."""
    batched = [(row, row.batch_dim) for row in rows if row.batch_dim is not None]
    held = (
        axes for row, dim in batched for axes in (row.spec.dims[dim], *_held(row.name, dim, forward, templates)) if axes
    )
    axes = _common({*held})
    divides = all(mesh.blocks(row.type.shape[dim], axes) is not None for row, dim in batched)
    return {row.index: axes if divides else () for row, _ in batched}


def _common(held: Collection[Axes]) -> Axes:
    """The axes that all begin with."""
    alike = takewhile(lambda together: len({*together}) == 1, zip(*held, strict=False))
    return tuple(axis for axis, *_ in alike)


def _held(name: str, dim: int, function: Function, templates: Mapping[str, LoweredTemplate]) -> Iterator[Axes]:
    """The axes of a dim under every spec in which lines hold a value."""
    for line in function.lines:
        step = line.line if isinstance(line, Start) else line
        if isinstance(step, Convert) and step.value == name and step.specs[0] is not None:
            yield step.specs[0].dims[dim]
        elif isinstance(line, Cut) and line.value == name:
            yield from (axes for piece in line.outs for axes in _held(piece, dim, function, templates))
        elif isinstance(line, CallForward) and name in line.inputs:
            own = templates[line.template].forward
            for given, taken in zip(line.inputs, own.args[len(line.params) :], strict=True):
                if given == name:
                    yield from _held(taken, dim, own, templates)
