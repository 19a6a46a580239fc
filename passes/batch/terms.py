"""Facts of ops by which terms of a sum stay terms of one: what shows them, what is linear in them, what adds a number."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from autopar.ir.call import OpCall, Operand
from autopar.ir.program import op_name
from autopar.ops.registry import find

COTANGENTS = ("g", "g_all", "grad", "grad_out", "grad_output", "grad_w")
"""Arguments of backward ops that are gradients of their forward's results, in which together every backward is linear."""


def shows(node: fx.Node) -> bool:
    """Whether an op shows the numbers of its only operand as they are."""
    definition = find(op_name(node.target))
    return definition is not None and definition.canonical in ("copy", "regroup")


def is_zeros(node: fx.Node) -> bool:
    """Whether a node makes zeros."""
    name = op_name(node.target).split(".")[1] if node.op == "call_function" else ""
    filled = node.args[-1] if name in ("full", "full_like", "new_full") else None
    return name in ("zeros", "zeros_like", "new_zeros") or (isinstance(filled, (int, float)) and filled == 0)


def more_linear(call: OpCall) -> Iterator[frozenset[int]]:
    """Operands in which an op is linear although ranks are not offered it: what its definition says, and of the backward of
    another op the gradients that come in. Counts that become fractions are among them."""
    definition = find(call.op)
    groups = [{arg.index for name in _cotangents(call.op) if isinstance(arg := call.get(name), Operand)}]
    if definition is not None and definition.linear is not None:
        groups += definition.linear(call)
    if all(t is None or t.is_float for t in call.results):
        numbers = [k for k, t in enumerate(call.operands) if t.dtype != torch.bool]
        yield from (frozenset(group) for group in groups if group and group <= {*numbers})


def _cotangents(op: str) -> tuple[str, ...]:
    """Names of the gradients that a backward op takes. Other ops may call their arguments so too, and ops that users register
    do: which operand of their backward it is stands in its definition."""
    namespace, name = op.split(".")[:2]
    return COTANGENTS if namespace == "autopar" or ("backward" in name and namespace != "autopar_ops") else ()


def affine(call: OpCall) -> str | None:
    """The scalar argument that an op adds to its only tensor."""
    definition = find(call.op)
    scalar = definition.adds if definition is not None else ""
    is_added = scalar and len(call.operands) == 1 and not isinstance(call.get(scalar), Operand)
    floats = all(t.is_float for t in call.operands)
    return scalar if is_added and floats else None
