"""Axes that are cut by shares, for a program whose sizes do not divide by its ranks.

The batch's axes come first: a microbatch of 17 rows over 5 ranks is held as 4, 4, 3, 3 and 3 rows. Axes inside take what the
indices of products and attention have that does not divide, such as 25 heads over 8 ranks or a vocabulary of 50257. A number of
units that divides another one's dims stands before it, so that dims that belong together (25 heads, 25 · 64 features) are cut
alike. Along an axis of experts rows and experts have shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.cluster import ClusterSpec
from autopar.cluster.device import DeviceSpec
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ops.registry import find
from autopar.passes.rules.book import RuleBook
from autopar.runtime.comm.mesh import Shares
from autopar.runtime.step.apportion import apportioned

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
    """The mesh with shares of the rows along the first axis that batches take whose ranks do not divide them, where it has none
    that fit. rows: of a microbatch (None: not known); rebalance: they may move along that axis between steps, so it has shares,
    equal ones, also where they divide, unless rows travel to experts, which take equal blocks."""
    axes, rebalance = list(mesh.axes), rebalance and mesh.sizes.get(EXPERTS, 1) == 1
    for place, (axis, ranks) in enumerate(axes):
        if axis not in DATA or ranks == 1:
            continue
        if rows is None or rows < ranks or (isinstance(ranks, Shares) and ranks.of(rows) is not None):
            break
        axes[place] = axis, int(ranks)
        units = _units(rows, axes[place:]) if rebalance else rows
        if rows % ranks or (rebalance and units > ranks):
            axes[place] = axis, Shares(balanced(units, ranks))
            break
        rows //= ranks
    return Mesh(tuple(axes), mesh.offset)


def _units(rows: int, axes: Sequence[tuple[str, int]]) -> int:
    """Units that rows move in along the first of these axes: where it is possible, the others that take rows divide each."""
    inner = math.prod(n for axis, n in axes[1:] if axis in DATA)
    return rows if rows % inner or rows < inner * axes[0][1] else rows // inner


def most_units(mesh: Mesh, limit: float, peak: float, resting: float) -> int:
    """Units of rows that a rank has room for. limit: bytes that tensors may take; peak, resting: the bytes that a plan takes
    where a rank has the most units, and those of them that are always there; all else is taken to grow with the units."""
    units = next((size.units[0] for axis, size in mesh.axes if axis in DATA and isinstance(size, Shares)), (0,))
    room = (limit - resting) / max(peak - resting, 1.0)
    return max(min(int(max(units) * room), sum(units)), max(units))


def by_speed(mesh: Mesh, rows: int | None, cluster: ClusterSpec, seconds: Mapping[DeviceSpec, float]) -> Mesh | None:
    """The mesh with shares of the rows along the first axis that batches take whose ranks are of several kinds, so that the
    slowest is done as soon as it can be; None where no kinds differ along one. seconds: of all rows on a device of each kind."""
    for place, (axis, ranks) in enumerate(mesh.axes):
        units = 0 if rows is None else _units(rows, mesh.axes[place:])
        if axis in DATA and 1 < ranks <= units:
            slowest = [0.0] * ranks
            for rank in range(mesh.offset, mesh.offset + mesh.size):
                at = mesh.coordinate(rank)[axis]
                slowest[at] = max(slowest[at], seconds[cluster.device(rank)])
            if len(set(slowest)) > 1:
                shares = Shares(apportioned(units, slowest, units))
                return Mesh((*mesh.axes[:place], (axis, shares), *mesh.axes[place + 1 :]), mesh.offset)
    return None


def for_experts(mesh: Mesh, program: Program, rules: RuleBook) -> Mesh:
    """The mesh with shares along the axis of experts of what it does not divide: the rows that are left for it, and experts. Rows
    have shares, equal ones, also where dims that hold them would else be cut as experts are."""
    ranks, axes = mesh.sizes.get(EXPERTS, 1), [size for axis, size in mesh.axes if axis in DATA]
    if ranks == 1 or isinstance(ranks, Shares):
        return mesh
    rows = rows_of(program) if not any(isinstance(size, Shares) for size in axes) else None
    units = [n for n in sorted(numbers_of_experts(program, rules)) if n > ranks and n % ranks]
    left = (rows or 0) // math.prod(axes)
    if left >= ranks and (left % ranks or any(n % left == 0 and n % e == 0 for n in _sizes(program) for e in units)):
        units = [left, *(n for n in units if n % left)]
    if not units:
        return mesh
    shares = Shares(*(balanced(n, ranks) for n in units[:_MOST_LISTS]))
    return Mesh(tuple((axis, shares if axis == EXPERTS else size) for axis, size in mesh.axes), mesh.offset)


def numbers_of_experts(program: Program, rules: RuleBook) -> set[int]:
    """Sizes of what an axis may shard together with tokens, in unequal blocks."""
    calls = (call for template in program.templates.values() for call in template.op_calls.values())
    carried = ((rule, one) for rule in map(rules.rule, calls) for one in rule.carries.values())
    return {rule.factors[one.factors[-1]].size for rule, one in carried if one.uneven and len(one.factors) > 1}


def _sizes(program: Program) -> set[int]:
    """Sizes of all dims that ops read."""
    calls = (call for template in program.templates.values() for call in template.op_calls.values())
    return {size for call in calls for t in call.operands if t is not None for size in t.shape}


def rows_of(program: Program) -> int | None:
    """Rows of a program's batch that can be divided among ranks, None where no input has any."""
    sizes = [t.shape[dim] for (_, t), dim in zip(program.inputs, program.batch_dims, strict=True) if dim is not None]
    return math.gcd(*sizes) if sizes else None


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
    batched = (
        (t.shape, dim) for (_, t), dim in zip(program.inputs, program.batch_dims, strict=True) if dim is not None
    )
    rows = {n for shape, dim in batched for n in shape[dim : dim + 2]}
    sizes: set[int] = set()
    for template in program.templates.values():
        for call in template.op_calls.values():
            definition = find(call.op)
            if definition is not None and (definition.work is not None or definition.picks is not None):
                rule = rules.rule(call)
                sizes |= {rule.factors[f].size for f in rule.shardable if f in rule.contracted}
    return sizes - rows
