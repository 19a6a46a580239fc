"""Functions that treat rows one by one: row r of a result depends on row r of the operands alone, and on what has no rows.

It follows from the sharding rules of the ops that a function consists of. Where a rule passes the factor that rows are from
operands to results, a block of rows of the result is the op on that block; where blocks may be single rows, it is row-wise. The
function is traced on fake tensors with a number of rows of its own, which no other size can be taken for.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from autopar.capture.direct_shapes import DirectShapes
from autopar.capture.explain import first_line, quiet
from autopar.ir.call import OpCall, Operand
from autopar.ir.mesh import Mesh
from autopar.ir.program import op_call, operand_nodes
from autopar.ir.rule import Labels, Rule
from autopar.ir.types import TensorType
from autopar.ops.dialect import LIFT
from autopar.ops.discover import discover
from autopar.ops.registry import Block, Offset, find


@dataclass(frozen=True)
class Rows:
    """Where a tensor has rows: in `dim`, `inner` indices of it each."""

    dim: int
    inner: int = 1


@dataclass(frozen=True)
class RowWise:
    """A function that treats rows one by one.

    results: where each tensor of its result has them. finite: rows of numbers that are finite have finite results and gradients.
    view: its results lie in the memory of its arguments. writes: leaves that it writes to in place.
    """

    results: tuple[Rows, ...]
    finite: bool
    view: bool
    writes: tuple[int, ...]


HOW_MANY = object()
"""Stands among the arguments of a function for the number of rows."""
_KNOWN: dict[Any, RowWise] = {}


def row_wise(func: Any, leaves: Sequence[Any], spec: TreeSpec, rows: Mapping[int, Rows]) -> RowWise | str:
    """Whether a function treats rows one by one, and where its results have them; else the name of the op that does not.

    leaves, spec: (args, kwargs) as a tree; rows: the leaves that have rows. HOW_MANY among the leaves is their number."""
    if any(isinstance(n, torch.SymInt) for x in leaves for n in (x.shape if isinstance(x, Tensor) else (x,))):
        return "a size that only the data decides"
    taken = {n for x in leaves for n in (x.shape if isinstance(x, Tensor) else [x] if type(x) is int else [])}
    number = next(p for p in _PRIMES if all(n % p or not n for n in taken) or p == _PRIMES[-1])
    types: list[Any] = []
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor):
            at = rows.get(i)
            shape = [number * at.inner if at and d == at.dim else n for d, n in enumerate(x.shape)]
            types.append(TensorType(tuple(shape), x.dtype))
        else:
            types.append(number if x is HOW_MANY else x)
    autocast = torch.is_autocast_enabled("cpu")
    key = func, str(spec), tuple(str(t) if isinstance(t, TensorType) else repr(t) for t in types), str(rows), autocast
    known = _KNOWN.get(key) or _found(func, types, spec, rows, number)
    if isinstance(known, RowWise):
        _KNOWN[key] = known
    return known


_PRIMES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181, 191, 193, 197, 199)


def _found(func: Any, types: Sequence[Any], spec: TreeSpec, rows: Mapping[int, Rows], number: int) -> RowWise | str:
    places = [i for i, t in enumerate(types) if isinstance(t, TensorType)]
    shapes: list[tuple[int, ...]] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        given = list(types)
        for i, tensor in zip(places, tensors, strict=True):
            given[i] = tensor
        args, kwargs = tree_unflatten(given, spec)
        out = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
        shapes[:] = [tuple(t.shape) for t in out]
        return out

    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad(), quiet():
        mode = DirectShapes(allow_non_fake_inputs=True)
        try:
            with mode:
                fakes = [mode.empty(types[i].shape, types[i].dtype) for i in places]
                captured = make_fx(run, pre_dispatch=True, _error_on_data_dependent_ops=True)(*fakes)
                lifted = make_fx(_Lifted(captured).run, _error_on_data_dependent_ops=True)(*fakes)
            memory = [[node.meta["val"].untyped_storage()._cdata for node in nodes] for nodes in _ends(captured.graph)]
            writes = [place for place, at in zip(places, memory[0], strict=True) if at in _written(captured.graph)]
            view = set(memory[1]) <= set(memory[0])
            found = _followed(lifted.graph, [rows.get(i) for i in places], number)
            return replace(found, view=view, writes=tuple(writes)) if isinstance(found, RowWise) else found
        except Exception as error:
            return first_line(str(error))


def _ends(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
    """Arguments and results of a graph."""
    results = tree_leaves(graph.output_node().args[0])
    return graph.find_nodes(op="placeholder"), [node for node in results if isinstance(node, fx.Node)]


def _written(graph: fx.Graph) -> set[int]:
    """The memory that a graph writes to in place."""
    written = set()
    for node in graph.nodes:
        arguments = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
        for argument, value in zip(arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node):
                written.add(value.meta["val"].untyped_storage()._cdata)
    return written


class _Lifted(fx.Interpreter):
    """Runs captured ops as what they become in a template."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return LIFT.get(target, target)(*args, **kwargs)


def _followed(graph: fx.Graph, rows: Sequence[Rows | None], number: int) -> RowWise | str:
    at: dict[fx.Node, Rows | None] = {}
    placeholders = iter(rows)
    finite = True
    for node in graph.nodes:
        if node.op == "placeholder":
            at[node] = next(placeholders)
            node.meta["type"] = TensorType.of(node.meta["val"])
        elif node.op == "call_function":
            operands = operand_nodes(node)
            value = node.meta["val"]
            if isinstance(value, (tuple, list)):
                node.meta["type"] = tuple(TensorType.of(v) if isinstance(v, Tensor) else None for v in value)
            else:
                node.meta["type"] = TensorType.of(value)
            if node.target is operator.getitem:
                at[node] = at[operands[0]]
                continue
            call = op_call(node)
            if all(at[n] is None for n in operands) or call.op.startswith("aten.new_"):
                made = isinstance(value, Tensor) and (not operands or call.op.startswith(("aten.new_", "aten.expand")))
                at[node] = _made(call, number) if made else None
                continue
            at[node] = _passed(_canonical(call, node), [at[n] for n in operands], number)
            if at[node] is None:
                return call.op
            definition = find(_without_writing(call.op))
            finite = finite and definition is not None and definition.finite is not None and definition.finite(call)
    outputs = tree_flatten(graph.output_node().args[0])[0]
    results = [at.get(node) for node in outputs]
    if not results or any(one is None for one in results):
        return "a result that has no rows"
    return RowWise(tuple(one for one in results if one is not None), finite, False, ())


def _without_writing(op: str) -> str:
    """`aten.add.Tensor` of `aten.add_.Tensor`."""
    space, name, *overload = op.split(".")
    return ".".join((space, name.rstrip("_"), *overload)) if name.endswith("_") else op


def _made(call: OpCall, number: int) -> Rows | None:
    """Where a constant, or what is drawn, has rows. Raises ValueError where its numbers depend on their places."""
    shape = call.out_shape
    dims = [d for d, n in enumerate(shape) if n and n % number == 0]
    if not dims:
        return None
    labels = _rule(call).results[0]
    if len(dims) != 1 or labels is None or not labels[dims[0]]:
        raise ValueError(f"{call.op} makes rows by their number")
    return Rows(dims[0], shape[dims[0]] // number)


def _canonical(call: OpCall, node: fx.Node) -> OpCall:
    """A view or a copy as the one op of its kind that has a rule."""
    definition = find(call.op)
    if definition is None or not (definition.canonical or definition.reorder):
        return call
    own: dict[str, Any] = {"self": Operand(0)}
    if definition.reorder is not None:
        order = definition.reorder(tuple(node.args[1:]), len(call.shapes[0]))
        return OpCall("aten.permute.default", {**own, "dims": order}, call.operands[:1], call.results)
    if definition.canonical == "regroup":
        return OpCall("aten.reshape.default", {**own, "shape": list(call.out_shape)}, call.operands[:1], call.results)
    return OpCall("aten.clone.default", own, call.operands[:1], call.results)


def _rule(call: OpCall) -> Rule:
    definition = find(_without_writing(call.op))
    rule = definition.rule(call) if definition is not None and definition.rule is not None else discover(call)
    if rule is None:
        raise ValueError(f"no sharding rule of {call.op} is known")
    return rule


def _passed(call: OpCall, at: Sequence[Rows | None], number: int) -> Rows | None:
    """Where the results of an op have the rows that its operands have. None: it does not treat them one by one."""
    rule = _rule(call)
    leading = {_leading(rule, labels, one) for labels, one in zip(rule.operands, at, strict=False) if one is not None}
    if len(leading) != 1 or None in leading:
        return None
    (factor,) = leading
    assert factor is not None
    for labels, one in zip(rule.operands, at, strict=False):
        others = [dim for d, dim in enumerate(labels or ()) if one is None or d != one.dim]
        if any(factor in dim for dim in others):
            return None
    if factor not in rule.shardable or _told_places(call, rule, factor):
        return None
    places = {_rows_of(rule, labels, factor, number) for labels in rule.results if labels is not None}
    return places.pop() if len(places) == 1 else None


def _leading(rule: Rule, labels: Labels | None, rows: Rows) -> str | None:
    """The major factor of the dim that rows are in."""
    return labels[rows.dim][0] if labels is not None and labels[rows.dim] else None


def _rows_of(rule: Rule, labels: Labels, factor: str, number: int) -> Rows | None:
    held = [(d, dim) for d, dim in enumerate(labels) if factor in dim]
    if len(held) != 1 or held[0][1][0] != factor:
        return None
    size = math.prod(rule.factors[f].size for f in held[0][1])
    return Rows(held[0][0], size // number) if rule.factors[factor].size % number == 0 else None


def _told_places(call: OpCall, rule: Rule, factor: str) -> bool:
    """Whether the op on a block is told where the block lies; what is drawn follows the place in any case."""
    definition = find(call.op)
    if definition is None or definition.localize is None or definition.random:
        return False
    mesh = Mesh.of(rows=rule.factors[factor].size)
    told = definition.localize(Block(call, rule, (factor,), mesh))
    return any(isinstance(value, Offset) for value in tree_leaves(told))
