"""Axes that are cut by shares, for a program whose sizes do not divide by its ranks.

The batch's axes come first: a microbatch of 17 rows over 5 ranks is held as 4, 4, 3, 3 and 3 rows. Axes inside take what the
indices of products and attention have that does not divide, such as 25 heads over 8 ranks or a vocabulary of 50257. A number of
units that divides another one's dims stands before it, so that dims that belong together (25 heads, 25 · 64 features) are cut
alike.
"""

from __future__ import annotations

import math

from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ops.registry import find
from autopar.passes.rules.book import RuleBook
from autopar.runtime.comm.mesh import Shares

DATA = ("replica", "dp")
"""Axes that batches take."""
EXPERTS = "ep"
"""The axis along which rows travel to their experts."""
_MOST_LISTS = 4
"""Lists of units that an axis has at most."""


def balanced(units: int, ranks: int) -> list[int]:
    """So many units over ranks as equally as they can be, the first ranks having one more."""
    fewest, more = divmod(units, ranks)
    return [fewest + 1] * more + [fewest] * (ranks - more)


def for_rows(mesh: Mesh, rows: int | None, rebalance: bool = False) -> Mesh:
    """The mesh with shares of the rows along the first axis that batches take whose ranks do not divide them. rows: of a
    microbatch (None: not known); rebalance: they may move along that axis between steps, so it has shares, equal ones, also where
    they divide."""
    axes = list(mesh.axes)
    for place, (axis, ranks) in enumerate(axes):
        if rows is None or isinstance(ranks, Shares) or rows < ranks:
            break
        if axis in DATA and ranks > 1:
            units = _units(rows, axes[place + 1 :]) if rebalance else rows
            if rows % ranks or (rebalance and units > ranks):
                axes[place] = axis, Shares(balanced(units, ranks))
                break
            rows //= ranks
    return Mesh(tuple(axes), mesh.offset)


def _units(rows: int, inner: list[tuple[str, int]]) -> int:
    """Units that rows move in, each of which divides by the axes inside that take rows too, where that is possible."""
    ranks = math.prod(n for axis, n in inner if axis in (*DATA, EXPERTS))
    return rows if rows % ranks else rows // ranks


def most_units(mesh: Mesh, limit: float, peak: float, resting: float) -> int:
    """Units of rows that a rank has room for. limit: bytes that tensors may take; peak, resting: the bytes that a plan takes where
    a rank has the most units, and those of them that are always there; all else is taken to grow with the units."""
    units = next((size.units[0] for axis, size in mesh.axes if axis in DATA and isinstance(size, Shares)), (0,))
    room = (limit - resting) / max(peak - resting, 1.0)
    return max(min(int(max(units) * room), sum(units)), max(units))


def for_units(mesh: Mesh, program: Program, rules: RuleBook) -> Mesh | None:
    """The mesh with shares along its last axis, for indices that do not divide by its ranks; None where all do."""
    axis, ranks = mesh.axes[-1]
    if axis in DATA or ranks == 1 or isinstance(ranks, Shares):
        return None
    units: list[int] = []
    for size in sorted(_indices(program, rules)):
        if size > ranks and size % ranks and not any(size % one == 0 for one in units):
            units.append(size)
    if not units:
        return None
    shares = Shares(*(balanced(n, ranks) for n in units[:_MOST_LISTS]))
    return Mesh((*mesh.axes[:-1], (axis, shares)), mesh.offset)


def _indices(program: Program, rules: RuleBook) -> set[int]:
    """Sizes of the indices, beside the batch's and the sequence's, that products, attention and look-ups may be split by."""
    rows = {t.shape[d] for (_, t), dim in zip(program.inputs, program.batch_dims, strict=True) for d in (dim, 1) if dim is not None and d is not None and d < len(t.shape)}
    sizes: set[int] = set()
    for template in program.templates.values():
        for call in template.op_calls.values():
            definition = find(call.op)
            if definition is not None and (definition.work is not None or definition.picks):
                rule = rules.rule(call)
                sizes |= {rule.factors[f].size for f in rule.shardable if f in rule.contracted}
    return sizes - rows
