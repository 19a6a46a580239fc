"""Gradients of parameters are reduced in the dtype that the parameter is stored in, never in a narrower one it is used in.

The gradient store casts what it is given before it reduces (runtime/gradients/grads.py), which leaves what happens on the way
there: between the op that makes a gradient and the end of its template lie views, sums over uses, and casts. Where a
plan reduces a value of that tail, the value is cast up first and stays wide. Planner and lowering both ask here, so such
a reduction is priced as what it is.
"""

from __future__ import annotations

from autopar.ir.program import Template, is_getitem, op_name, operand_nodes
from autopar.ir.types import TensorType
from autopar.ops.registry import find
from autopar.passes.rules.once import once


@once
def wide_gradients(template: Template) -> dict[str, TensorType]:
    """Values that become parameter gradients and nothing else, and are narrower than the parameter: the type to reduce."""
    nodes, widened = template.nodes, dict[str, TensorType]()
    tail: dict[str, TensorType] = {}
    for param, grad in zip(template.params, template.param_grads, strict=True):
        stored = nodes[param].meta.get("stored")
        if grad is not None and stored is not None:
            tail[grad] = TensorType(template.type_of(grad).shape, stored)
    for node in reversed(template.graph.nodes):
        wide = tail.get(node.name)
        if wide is None or node.meta["phase"] == "F" or node.op != "call_function":
            continue
        type_ = template.type_of(node.name)
        if type_.dtype.itemsize < wide.dtype.itemsize:
            widened[node.name] = TensorType(type_.shape, wide.dtype)
        if is_getitem(node) or not _passes(op_name(node.target)):
            continue
        for operand in operand_nodes(node):
            readers = [n.name for n, _ in template.consumers.get(operand.name, ())]
            if all(reader in tail for reader in readers):
                tail.setdefault(operand.name, TensorType(template.type_of(operand.name).shape, wide.dtype))
    return widened


def late_upcasts(template: Template) -> frozenset[str]:
    """Values of backward that are 16-bit floats made wider."""
    upcasts = set()
    for node in template.ops:
        if op_name(node.target) == "aten._to_copy.default" and node.meta["phase"] != "F":
            before, after = template.type_of(operand_nodes(node)[0].name), template.type_of(node.name)
            if before.is_float and before.dtype.itemsize == 2 and after.dtype.itemsize > 2:
                upcasts.add(node.name)
    return frozenset(upcasts)


def _passes(op: str) -> bool:
    """Whether an op hands a gradient on as it is, moved or added to others."""
    definition = find(op)
    return definition is not None and (definition.free or definition.carries)
