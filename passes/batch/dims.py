"""Which dim of every value holds the batch, or whatever else is followed from where it starts.

It is followed through the rules of all ops, in both directions until nothing changes: the op's factor that holds
the batch in one operand or result holds it in all, also where it is merged with others: of `(seq, batch)` flattened it
is the minor part of the dim. Nothing is decided here: whether an op may really see only a part of the batch is checked
by `states`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from torch import fx

from autopar.errors import CoupledError
from autopar.ir.call import OpCall
from autopar.ir.program import Program, Template, ValueRef, is_getitem, operand_values
from autopar.ir.rule import Labels, Rule
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.once import once


class Part(NamedTuple):
    """Where the batch is in a dim: `size` steps of `inner` elements each; what is left is major to it."""

    inner: int
    size: int


Dims = dict[str, dict[int, Part]]
"""Where the batch is in the values of a template: value -> dim -> its part of that dim."""
Key = TypeVar("Key")


@once
def batch_dims(program: Program, rules: RuleBook) -> dict[str, Dims]:
    """Per template the dims that hold the batch, which nobody writes into. Raises CoupledError where it is in one dim in two
    ways."""
    return followed(program, rules, lambda ref: _given(program, ref))


def followed(
    program: Program,
    rules: RuleBook,
    given: Callable[[ValueRef], dict[int, Part]] = lambda _: {},
    starts: Mapping[str, Dims] | None = None,
    joined: Callable[[OpCall], Sequence[Sequence[str]]] = lambda _: (),
) -> dict[str, Dims]:
    """Per template the dims that hold what starts in inputs and buffers of the program, as `given` says, and in these values.
    joined: factors of an op of which all hold it if one does. Raises CoupledError where it is in one dim in two ways."""
    dims: dict[str, Dims] = {
        name: {v: dict(d) for v, d in (starts or {}).get(name, {}).items()} for name in program.templates
    }
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
                changed |= _add(dims[name], value, given(ref))
                continue
            output = program.templates[source[0]].outputs[source[1]]
            changed |= _add(dims[name], value, dims[source[0]].get(output, {}))
            changed |= _add(dims[source[0]], output, dims[name].get(value, {}))
        for name, template in program.templates.items():
            changed |= _spread(template, dims[name], rules, joined)
    return {name: {value: held for value, held in known.items() if held} for name, known in dims.items()}


@once
def batch_factors(program: Program, rules: RuleBook) -> dict[tuple[str, str], dict[str, Part]]:
    """(template, op) -> the factors whose major end is the batch, and where it is in them: shards of them are shards of the
    batch. Nobody writes into it. Raises CoupledError as `batch_dims` does."""
    factors, dims = {}, batch_dims(program, rules)
    for name, template in program.templates.items():
        for node in template.ops:
            rule = rules.rule(template.op_calls[node.name])
            holding = holding_factors(node, rule, dims.get(name, {}))[1].items()
            leading = {f: part for f, part in holding if part.inner * part.size == rule.factors[f].size}
            factors[name, node.name] = leading
    return factors


def factor_of(labels: Labels | None, dim: int, part: Part, rule: Rule) -> tuple[str, Part] | None:
    """The factor of a dim that holds the batch (its major end, where that is split), and where in it the batch is; None
    where the rule follows no index there."""
    if labels is None or dim >= len(labels):
        return None
    end, low = part.inner * part.size, 1
    for f in reversed(labels[dim]):
        high = low * rule.factors[f].size
        if low < end <= high:
            if part.inner % low and end % low:
                return None
            return f, Part(part.inner // low, part.size) if part.inner >= low else Part(1, end // low)
        low = high
    return None


def part_in(dim: tuple[str, ...], factor: str, part: Part, rule: Rule) -> Part | None:
    """Where the batch is in a dim, given where it is in one of the factors; None where the dim lacks the factor."""
    low = 1
    for f in reversed(dim):
        if f == factor:
            return Part(low * part.inner, part.size)
        low *= rule.factors[f].size
    return None


def result_values(node: fx.Node) -> dict[int, str]:
    """Value name per result; results that nobody reads get a name of their own."""
    if isinstance(node.meta["type"], tuple):
        read = {u.args[1]: u.name for u in node.users if is_getitem(u)}
        return {i: read.get(i, f"{node.name}#{i}") for i in range(len(node.meta["type"]))}
    return {0: node.name}


def _given(program: Program, ref: ValueRef) -> dict[int, Part]:
    dim = program.batch_dims[ref.index] if ref.kind == "input" else None
    return {} if dim is None else {dim: Part(1, program.inputs[ref.index][1].shape[dim])}


def _add(dims: Dims, value: str, more: dict[int, Part]) -> bool:
    """Whether anything was new."""
    held = dims.setdefault(value, {})
    return any(_merge(held, d, part, value) for d, part in more.items())


def _merge(held: dict[Key, Part], key: Key, part: Part, what: str) -> bool:
    """Whether it was new. Of two parts with one end the larger counts: the other is a piece of it."""
    before = held.get(key)
    if before is not None and before.inner * before.size != part.inner * part.size:
        raise CoupledError(f"{what}: the batch is in {key} in two ways")
    if before is not None and before.size >= part.size:
        return False
    held[key] = part
    return True


def _spread(
    template: Template, dims: Dims, rules: RuleBook, joined: Callable[[OpCall], Sequence[Sequence[str]]]
) -> bool:
    """One pass over a template's ops; whether anything was new."""
    changed = False
    for tangent, output in zip(template.tangents, template.outputs, strict=True):
        if tangent is not None:
            changed |= _join(dims, tangent, output)
    for grad, value in zip(template.input_grads, template.inputs, strict=True):
        if grad is not None:
            changed |= _join(dims, grad, value)
    for node in template.ops:
        rule = rules.rule(template.op_calls[node.name])
        places, holding = holding_factors(node, rule, dims)
        if holding:
            _join_factors(holding, joined(template.op_calls[node.name]), node.name)
        for value, labels in places:
            for d, dim in enumerate(labels or ()):
                for f, held_part in holding.items():
                    part_here = part_in(dim, f, held_part, rule)
                    if part_here is not None:
                        changed |= _add(dims, value, {d: part_here})
    return changed


def _join_factors(holding: dict[str, Part], groups: Sequence[Sequence[str]], what: str) -> None:
    """Adds those that hold it because others do."""
    for group in groups:
        held = next((holding[f] for f in group if f in holding), None)
        if held is not None:
            for f in group:
                _merge(holding, f, held, what)


def holding_factors(node: fx.Node, rule: Rule, dims: Dims) -> tuple[list[tuple[str, Labels | None]], dict[str, Part]]:
    """An op's operands and results with their labels, and the factors that hold the batch in any of them."""
    places = list(zip(operand_values(node), rule.operands, strict=True))
    results = result_values(node)
    places += [(results[i], labels) for i, labels in enumerate(rule.results)]
    holding: dict[str, Part] = {}
    for value, labels in places:
        for d, part in dims.get(value, {}).items():
            held = factor_of(labels, d, part, rule)
            if held is not None:
                _merge(holding, *held, node.name)
    return places, holding


def _join(dims: Dims, a: str, b: str) -> bool:
    changed = _add(dims, a, dims.get(b, {}))
    return _add(dims, b, dims[a]) or changed
