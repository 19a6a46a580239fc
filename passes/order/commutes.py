"""Which ops do the same to a sequence in order as to the natural one.

An order moves 2n chunks of the sequence. An op that ranks may run on such chunks, one each, without being told which they
have, makes of every chunk the same wherever it stands; what it makes of all of them together is a sum, a maximum, whatever
its rule says is owed, and has no order. So this is asked of the rule and of `OpDef.localize`, as a sharding asks it. Ops that
mind the order, as causal attention does, may say how they are told it (`OpDef.ordered`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.ir.call import OpCall
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule
from autopar.ops.registry import Block, Offset, OpDef, find
from autopar.passes.batch.dims import Part
from autopar.passes.order.dims import joined

_CHUNKS = "chunks"


def changes_in_order(call: OpCall, rule: Rule, held: Mapping[str, Part], order: int) -> dict[str, Any] | None:
    """Arguments of an op that are others where these factors of it, and where in them the sequence is, are in order. None: it
    makes something else of them."""
    definition = find(call.op)
    own = frozenset(f for group in joined(call) for f in group if f in held)
    if not all(_commutes(call, rule, definition, f, part, order) for f, part in held.items() if f not in own):
        return None
    if not own:
        return {}
    assert definition is not None
    assert definition.ordered is not None
    sizes = {f: rule.factors[f].size for f in own if f in rule.factors}
    if any(size != held[f].size or size % (2 * order) for f, size in sizes.items()):
        return None
    return definition.ordered(call, order, own)


def _commutes(call: OpCall, rule: Rule, definition: OpDef | None, factor: str, part: Part, order: int) -> bool:
    """Whether ranks may each have one of the chunks that a factor consists of."""
    span, size = part.inner * part.size, rule.factors[factor].size
    if part.size % (2 * order) or size % span or factor not in rule.majors:
        return False
    if definition is not None and definition.random and call.get("site", -1) != -1:
        return False
    majors = sorted(rule.needed([factor]))
    axes = [*((f, rule.factors[f].size) for f in majors), (_CHUNKS, size // span * 2 * order)]
    mesh, strategy = Mesh(tuple(axes)), (*majors, factor)
    if not rule.allows(strategy, mesh):
        return False
    told = definition.localize(Block(call, rule, strategy, mesh)) if definition and definition.localize else {}
    return not any(map(_says_where, told.values()))


def _says_where(value: Any) -> bool:
    """Whether an argument depends on the chunk that a rank has."""
    if isinstance(value, (tuple, list)):
        return any(map(_says_where, value))
    return isinstance(value, Offset) and _CHUNKS in value.axes
