"""The sequence put in zigzag order, or back: the op that stands where what is in order meets what is not.

A program whose sequence is in order everywhere (`autopar.passes.order`) has it behind inputs, buffers and positions alone.
"""

from __future__ import annotations

from autopar.ir.call import OpCall
from autopar.ir.rule import Rule
from autopar.ops.dialect import empty_like, graph_op
from autopar.ops.labels import Maker
from autopar.runtime.kernels.attention import zigzag as local


@graph_op(
    "reorder(Tensor x, int dim, int order, bool back, int size, int inner) -> Tensor",
    local.reorder,
    lambda x, *_: empty_like(x),
    home="zigzag",
    fresh=True,
    carries=True,
    rearranges=True,
    values=lambda call, operands, result: operands[0],
)
def reorder(call: OpCall) -> Rule:
    """Everything but the sequence passes; `size` steps of `inner` elements are the minor part of its dim."""
    make, (shape,) = Maker(), call.shapes
    at = call["dim"]
    labels = list(make.dims(shape[:at]) + ((),) + make.dims(shape[at + 1 :], "e"))
    sequence = call["size"] * call["inner"]
    labels[at] = (*make.add("lead", shape[at] // sequence), *make.add("s", sequence, whole=True))
    return make.rule([tuple(labels)], [tuple(labels)], [{0}] if call.operands[0].is_float else None)
