"""Ops whose memory grows with sizes alone: what they make, and need for a moment, are tensors of which every size is a product of
sizes of their operands, whatever these are.

An op that looks at how large its operands are (attention in chunks, products that are cut in pieces), or that adds sizes up (a
concatenation), is none of them.
"""

from __future__ import annotations

from autopar.ops.registry import Scales, define, find, is_pointwise, named

_PLAIN = Scales()

define(*named("sum mm bmm _to_copy clone t transpose permute"), scales=_PLAIN)
define("aten.select", scales=Scales(unread=("index",)))
define("autopar.in_range", scales=Scales(unread=("low", "high")))
define(*(f"autopar.{name}" for name in ("linear", "linear_dx", "linear_dw", "embedding")), scales=_PLAIN)
define("autopar.embedding_grad", scales=Scales(sizes=("rows",)))


def scales_of(op: str) -> Scales | None:
    """How the memory of an op grows with sizes; None: it is not known to. Ops that torch tags as pointwise need not be named."""
    definition = find(op)
    if definition is not None and definition.scales is not None:
        return definition.scales
    return _PLAIN if is_pointwise(op) else None
