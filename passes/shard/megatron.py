"""Tensor parallelism as Megatron-LM has it, as the choices that it leaves along one mesh axis.

What is said of a program is read off its rules, never off names. Along the axis

- a product of a weight with values of the batch is split by an index of the weight, and the weight is stored so: an output
  feature makes it column-parallel, an input feature row-parallel;
- a look-up by values of the batch takes the rows of its table: vocabularies are sharded;
- no op is split by the batch, and what has features beside batch and sequence is split by something: norms and residuals by
  the sequence, attention by heads, the loss by the vocabulary.

The rest follows from the costs: gathering the sequence before column-parallel products and scattering it after row-parallel
ones is the least that can be sent (Korthikanti et al. 2022, section 4.2). A projection whose features are cut into parts
that are not shards (query, key and value side by side) is gathered after its product.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.ir.mesh import Mesh
from autopar.ir.program import Program, Template, operand_values
from autopar.ir.rule import Labels, Rule, factors_of
from autopar.ops.registry import find
from autopar.passes.batch.dims import Dims, Part, result_values
from autopar.passes.rules.book import RuleBook

OpKey = tuple[str, str]
Slot = tuple[str, int]
"""A parameter of a template, by its number."""


@dataclass(frozen=True)
class AxisChoices:
    """The choices that are left along an axis. choices: per (template, op). sharded: parameters that ops hold in shards."""

    choices: Mapping[OpKey, frozenset[str]]
    sharded: frozenset[str]


def tensor_parallel(
    program: Program,
    rules: RuleBook,
    dims: Mapping[str, Dims],
    batch: Mapping[OpKey, Mapping[str, Part]],
    mesh: Mesh,
    axis: str,
) -> AxisChoices:
    """dims: where values hold the batch. batch: per op the factors that are the batch."""
    choices: dict[OpKey, frozenset[str]] = {}
    slots: set[Slot] = set()
    for template in program.templates.values():
        held = dims.get(template.name, {})
        origins = _origins(template)
        for node in template.ops:
            rule, key = rules.rule(template.op_calls[node.name]), (template.name, node.name)
            weight = _weight_factors(template, node, rule, held, origins)
            possible = {
                c
                for c in rule.choices()
                if c not in batch[key]
                and (c not in rule.carries or weight.issuperset(factors_of(c)))
                and _divides(rule, c, mesh, axis)
            }
            of_weight = {c for c in possible if factors_of(c) and weight.issuperset(factors_of(c))}
            if of_weight:
                slots |= _slots(template, node, origins)
            splits = bool(possible & rule.factors.keys()) and _has_features(template, node, rule, held, batch[key])
            choices[key] = frozenset(of_weight or (possible - {""} if splits else possible))
    return AxisChoices(choices, _parameters(program, slots))


def expert_parallel(
    program: Program, rules: RuleBook, batch: Mapping[OpKey, Mapping[str, Part]], mesh: Mesh, axis: str
) -> AxisChoices:
    """The choices of ops that can carry along an axis, which shards their weights together with the batch.
    batch: as above."""
    choices: dict[OpKey, frozenset[str]] = {}
    slots: set[Slot] = set()
    for template in program.templates.values():
        origins = _origins(template)
        for node in template.ops:
            rule, key = rules.rule(template.op_calls[node.name]), (template.name, node.name)
            carrying = frozenset(
                choice
                for choice, carried in rule.carries.items()
                if carried.factors[0] in batch[key] and len(carried.factors) > 1 and _divides(rule, choice, mesh, axis)
            )
            if carrying:
                choices[key] = carrying
                slots |= _slots(template, node, origins)
    return AxisChoices(choices, _parameters(program, slots))


def context_parallel(
    program: Program,
    rules: RuleBook,
    dims: Mapping[str, Dims],
    batch: Mapping[OpKey, Mapping[str, Part]],
    mesh: Mesh,
    axis: str,
) -> Mapping[OpKey, frozenset[str]]:
    """The choices of ops along an axis that takes neither the batch nor weights. dims, batch: as above."""
    choices: dict[OpKey, frozenset[str]] = {}
    for template in program.templates.values():
        held = dims.get(template.name, {})
        origins = _origins(template)
        for node in template.ops:
            rule, key = rules.rule(template.op_calls[node.name]), (template.name, node.name)
            of_weight = _weight_factors(template, node, rule, held, origins)
            taken = {*batch[key], *of_weight}
            choices[key] = frozenset(
                c for c in rule.choices() if taken.isdisjoint(factors_of(c)) and _divides(rule, c, mesh, axis)
            )
    return choices


def of_one_row(program: Program, rules: RuleBook) -> dict[str, Dims]:
    """The values that hold a batch of one row, which merges with other dims without a trace (`batch_dims`): all that is made of
    inputs with a batch, in no dim that is told, but for gradients of weights."""
    held: dict[str, set[str]] = {name: set() for name in program.templates}
    outputs: set[tuple[int, int]] = set()
    weights = {name: _weight_gradients(template, rules) for name, template in program.templates.items()}
    before = -1
    while before != (before := sum(map(len, held.values()))):
        for i, call in enumerate(program.calls):
            template, known = program.templates[call.template], held[call.template]
            for ref, value in zip(call.inputs, template.inputs, strict=True):
                given = ref.kind == "input" and program.batch_dims[ref.index] is not None
                if given or (ref.kind == "call" and (ref.index, ref.output) in outputs):
                    known.add(value)
            known |= {t for t, value in zip(template.tangents, template.outputs, strict=True) if t and value in known}
            for node in template.ops:
                if not known.isdisjoint(operand_values(node)):
                    known |= {*result_values(node).values()} - weights[call.template]
            outputs |= {(i, o) for o, value in enumerate(template.outputs) if value in known}
    return {name: {value: {} for value in known} for name, known in held.items()}


def _weight_gradients(template: Template, rules: RuleBook) -> set[str]:
    """Gradients of weights: what an op adds up over rows (a product, the gradient of a look-up), cast, transposed or viewed."""
    wanted = {grad for grad in template.param_grads if grad is not None}
    made: set[str] = set()
    for node in reversed(template.ops):
        results = {*result_values(node).values()}
        if not wanted.isdisjoint(results) and len(operand_values(node)) == 1:
            wanted |= {*operand_values(node)}
    for node in template.ops:
        results = {*result_values(node).values()} & wanted
        moved = len(operand_values(node)) == 1 and made.issuperset(operand_values(node))
        if moved or (len(operand_values(node)) > 1 and rules.rule(template.op_calls[node.name]).contracted):
            made |= results
    return made


def _slots(template: Template, node: fx.Node, origins: Mapping[str, frozenset[int]]) -> set[Slot]:
    """The parameters that an op reads."""
    return {(template.name, slot) for v in operand_values(node) for slot in origins.get(v, ())}


def _parameters(program: Program, slots: Collection[Slot]) -> frozenset[str]:
    return frozenset(n for call in program.calls for i, n in enumerate(call.params) if (call.template, i) in slots)


def _origins(template: Template) -> dict[str, frozenset[int]]:
    """Values that are made of parameters alone (cast, transposed, viewed), with the slots of these."""
    origins = {name: frozenset({slot}) for slot, name in enumerate(template.params)}
    for node in template.ops:
        made_of = [origins.get(v) for v in operand_values(node)]
        slots = [slot for slot in made_of if slot is not None]
        if slots and len(slots) == len(made_of):
            origins.update(dict.fromkeys(result_values(node).values(), frozenset().union(*slots)))
    return origins


def _weight_factors(
    template: Template, node: fx.Node, rule: Rule, dims: Dims, origins: Mapping[str, frozenset[int]]
) -> set[str]:
    """The factors by which a product or a look-up, or the gradient of one, may be split: those of the weight; of a table its
    rows, which no other tensor of the op has. Empty for every other op."""
    values = operand_values(node)
    if not any(v in dims for v in values) or not all(v in dims or v in origins for v in values):
        return set()
    results = result_values(node)
    weights = [labels for v, labels in zip(values, rule.operands, strict=True) if v not in dims]
    weights = weights or [rule.results[i] for i, v in results.items() if v not in dims]
    if _is_product(template, node, rule):
        return _factors(weights)
    if all(template.type_of(v).is_float for v in values):
        return set()
    tensors = (*rule.operands, *rule.results)
    return {f for f in _factors(weights) if sum(f in _factors([labels]) for labels in tensors) == 1}


def _is_product(template: Template, node: fx.Node, rule: Rule) -> bool:
    call = template.op_calls[node.name]
    definition = find(call.op)
    return definition is not None and definition.work is not None and definition.work(call, rule)[1] == "matmul"


def _has_features(template: Template, node: fx.Node, rule: Rule, dims: Dims, batch: Mapping[str, Part]) -> bool:
    """Whether an op on values of the batch has an index beside those of batch and sequence: a second one, or any where the
    sequence is part of the batch's index; or works along an index as a whole, as a norm does."""
    floats = (v for v in operand_values(node) if v in dims and template.type_of(v).is_float)
    others = [f for name, f in rule.factors.items() if name not in batch and f.size > 1]
    merged = any(part.inner > 1 for part in batch.values())
    return any(floats) and (len(others) > 1 or bool(others and merged) or any(f.whole for f in others))


def _factors(tensors: Iterable[Labels | None]) -> set[str]:
    return {f for labels in tensors for dim in labels or () for f in dim}


def _divides(rule: Rule, choice: str, mesh: Mesh, axis: str) -> bool:
    return all(mesh.blocks(rule.factors[f].size, (axis,)) is not None for f in factors_of(choice))
