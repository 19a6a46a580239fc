"""The same program for a smaller batch, without capturing it again: what searching over microbatch counts needs.

The batch is followed through the rules of all ops, in both directions until nothing changes: the op's factor that holds
the batch in one operand or result holds it in all, also where it is merged with others (`(seq, batch)` flattened: the
batch is the minor part of the dim). Then every batch dim is divided, also in size arguments of views and factories. What
comes out has the types that capturing the smaller batch would give; numbers baked into the graph (a mean's 1/n) keep
their values, so it is for pricing, not for running.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from torch import fx

from autopar.errors import ShardingError
from autopar.ir.call import schema_arguments
from autopar.ir.program import Program, Template, ValueRef, is_getitem, operand_nodes, operand_values
from autopar.ir.rule import Rule
from autopar.ir.types import TensorType
from autopar.passes.rules.book import RuleBook

Part = tuple[int, int]
"""Where the batch is in a dim: (inner, size), `size` steps of `inner` elements each."""
Dims = dict[str, dict[int, Part]]
Key = TypeVar("Key")
CUTS = ("aten.slice.", "aten.narrow.", "aten.select.", "aten.split", "aten.chunk.", "aten.unbind.", "aten.cat.")


class NoRebatch(ShardingError):
    """The batch of this program cannot be divided without capturing it again."""


def rebatch(program: Program, parts: int, rules: RuleBook) -> Program:
    """The program for 1/parts of its batch. Raises NoRebatch where the batch's way through it is not plain."""
    if parts == 1:
        return program
    known = batch_dims(program, rules)
    templates = {name: _template(t, known[name], parts) for name, t in program.templates.items()}
    inputs = tuple(
        (name, _divided(type_, {} if dim is None else {dim: (1, type_.shape[dim])}, parts, name))
        for (name, type_), dim in zip(program.inputs, program.batch_dims, strict=True)
    )
    return replace(program, templates=templates, inputs=inputs)


def batch_dims(program: Program, rules: RuleBook) -> dict[str, Dims]:
    """Per template and value the dims that hold the batch. Raises NoRebatch when a parameter has one."""
    known: dict[str, Dims] = {name: {} for name in program.templates}
    edges = [
        (None if ref.kind != "call" else (program.calls[ref.index].template, ref.output), ref, call.template, slot)
        for call in program.calls
        for slot, ref in enumerate(call.inputs)
    ]
    changed = True
    while changed:
        changed = False
        for source, ref, name, slot in edges:
            value = program.templates[name].inputs[slot]
            if source is None:
                changed |= _add(known[name], value, _given(program, ref))
                continue
            made = program.templates[source[0]].outputs[source[1]]
            changed |= _add(known[name], value, known[source[0]].get(made, {}))
            changed |= _add(known[source[0]], made, known[name].get(value, {}))
        for name, template in program.templates.items():
            changed |= _spread(template, known[name], rules)
    for name, template in program.templates.items():
        for value in template.params:
            if known[name].get(value):
                raise NoRebatch(f"{name}: the batch is in a dim of the parameter {value}")
    return known


def batch_factor(dim: tuple[str, ...], rule: Rule, part: Part) -> tuple[str, Part] | None:
    """The factor of a dim that holds the batch (its major end, where it is split), and where in it the batch is."""
    inner, size = part
    end, low = inner * size, 1
    for f in reversed(dim):
        high = low * rule.factors[f].size
        if low < end <= high:
            if inner % low and end % low:
                raise NoRebatch("the batch is split unevenly")
            return f, (inner // low, size) if inner >= low else (1, end // low)
        low = high
    return None


def _given(program: Program, ref: ValueRef) -> dict[int, Part]:
    dim = program.batch_dims[ref.index] if ref.kind == "input" else None
    return {} if dim is None else {dim: (1, program.inputs[ref.index][1].shape[dim])}


def _add(known: Dims, value: str, more: dict[int, Part]) -> bool:
    """Whether anything was new."""
    held = known.setdefault(value, {})
    return any(_merge(held, d, part, value) for d, part in more.items())


def _merge(held: dict[Key, Part], key: Key, part: Part, what: str) -> bool:
    """Whether it was new. Of two parts with one end the larger counts: the other is a piece of it."""
    before = held.get(key)
    if before is not None and before[0] * before[1] != part[0] * part[1]:
        raise NoRebatch(f"{what}: the batch is in {key} twice")
    if before is not None and before[1] >= part[1]:
        return False
    held[key] = part
    return True


def _spread(template: Template, known: Dims, rules: RuleBook) -> bool:
    """One pass over a template's ops; whether anything was new."""
    changed = False
    for tangent, output in zip(template.tangents, template.outputs, strict=True):
        if tangent is not None:
            changed |= _join(known, tangent, output)
    for grad, value in zip(template.input_grads, template.inputs, strict=True):
        if grad is not None:
            changed |= _join(known, grad, value)
    for node in template.ops:
        rule = rules.rule(template.op_calls[node.name])
        places = [(v, labels) for v, labels in zip(operand_values(node), rule.operands, strict=True)]
        results = _results(node)
        places += [(results[i], labels) for i, labels in enumerate(rule.results)]
        holding: dict[str, Part] = {}
        for value, labels in places:
            for d, part in known.get(value, {}).items():
                found = batch_factor(labels[d], rule, part) if labels is not None and d < len(labels) else None
                if found is not None:
                    _merge(holding, *found, node.name)
        for value, labels in places:
            for d, dim in enumerate(labels or ()):
                low = 1
                for f in reversed(dim):
                    if f in holding:
                        inner, size = holding[f]
                        changed |= _add(known, value, {d: (low * inner, size)})
                    low *= rule.factors[f].size
    return changed


def _join(known: Dims, a: str, b: str) -> bool:
    changed = _add(known, a, known.get(b, {}))
    return _add(known, b, known[a]) or changed


def _results(node: fx.Node) -> dict[int, str]:
    """Value name per result; results that nobody reads get a name of their own."""
    if isinstance(node.meta["type"], tuple):
        read = {u.args[1]: u.name for u in node.users if is_getitem(u)}
        return {i: read.get(i, f"{node.name}#{i}") for i in range(len(node.meta["type"]))}
    return {0: node.name}


def _divided(type_: TensorType, dims: dict[int, Part], parts: int, what: str) -> TensorType:
    for d, (_, size) in dims.items():
        if size % parts:
            raise NoRebatch(f"{what}: dim {d} of {type_} cannot be divided by {parts}")
    return TensorType(tuple(n // parts if d in dims else n for d, n in enumerate(type_.shape)), type_.dtype)


def _template(template: Template, known: Dims, parts: int) -> Template:
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in template.graph.nodes:
        copied = made[node] = graph.node_copy(node, made.__getitem__)
        copied.name = node.name
        copied.meta = dict(node.meta)
        if "type" not in node.meta:
            continue
        before = node.meta["type"]
        if isinstance(before, tuple):
            names = _results(node)
            copied.meta["type"] = tuple(
                t if t is None else _divided(t, known.get(names[i], {}), parts, node.name) for i, t in enumerate(before)
            )
        else:
            copied.meta["type"] = _divided(before, known.get(node.name, {}), parts, node.name)
        if node.op == "call_function" and not is_getitem(node):
            _refuse_cuts(node, known)
            if isinstance(before, TensorType):
                _resize(copied, before)
    return replace(template, graph=graph)


def _refuse_cuts(node: fx.Node, known: Dims) -> None:
    """Ops that cut or join the batch dim depend on its size in their arguments."""
    if not str(node.target).startswith(CUTS):
        return
    names = [a[0] for a in schema_arguments(node.target)]
    at = names.index("dim") if "dim" in names else -1
    dim = node.args[at] if 0 <= at < len(node.args) else node.kwargs.get("dim", 0)
    for operand in operand_nodes(node):
        type_ = operand.meta["type"]
        if isinstance(dim, int) and dim % max(len(type_.shape), 1) in known.get(operand.name, ()):
            raise NoRebatch(f"{node.name}: {node.target} cuts the batch")


def _resize(node: fx.Node, before: TensorType) -> None:
    """Size arguments that spell the result's shape follow it."""
    after: TensorType = node.meta["type"]

    def follow(arg: Any) -> Any:
        plain = isinstance(arg, (list, tuple)) and arg and all(isinstance(n, int) for n in arg)
        if (
            plain
            and len(arg) == len(before.shape)
            and all(n in (-1, m) for n, m in zip(arg, before.shape, strict=True))
        ):
            return type(arg)(n if n == -1 else m for n, m in zip(arg, after.shape, strict=True))
        return arg

    if before != after:
        node.args = tuple(map(follow, node.args))
        node.kwargs = {k: follow(v) for k, v in node.kwargs.items()}


__all__ = ["NoRebatch", "batch_dims", "batch_factor", "rebatch"]
