"""Tensor parallelism as Megatron-LM has it, as the choices that it leaves along one mesh axis.

What is said of a program is read off its rules, never off names. Along the axis

- a product of a weight with values of the batch is split by an index of the weight, and the weight is stored so: an output
  feature makes it column-parallel, an input feature row-parallel; products of one input, which Megatron makes at once, are
  column-parallel;
- a look-up by values of the batch takes the rows of its table: vocabularies are sharded;
- no op is split by the batch, and what has features beside batch and sequence is split by something: norms and residuals by
  the sequence, attention by heads, the loss by the vocabulary.

The rest follows from the costs: gathering the sequence before column-parallel products and scattering it after row-parallel
ones is the least that can be sent (Korthikanti et al. 2022, section 4.2). A projection whose features are cut into parts
that are not shards (query, key and value side by side) is gathered after its product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

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


@dataclass(frozen=True)
class BatchedProgram:
    """A program on a mesh, and where its batch is. dims: per template where values hold the batch; batch: per op the factors that
    are the batch."""

    program: Program
    rules: RuleBook
    dims: Mapping[str, Dims]
    batch: Mapping[OpKey, Mapping[str, Part]]
    mesh: Mesh

    def ops(self) -> Iterator[BatchedOp]:
        """Every op of every template."""
        for template in self.program.templates.values():
            origins = _origins(template)
            for node in template.ops:
                yield BatchedOp(self, template, node, self.rules.rule(template.op_calls[node.name]), origins)


@dataclass(frozen=True)
class BatchedOp:
    """An op of such a program. origins: the parameters that values of its template are made of alone."""

    of: BatchedProgram
    template: Template
    node: fx.Node
    rule: Rule
    origins: Mapping[str, frozenset[int]]

    @property
    def key(self) -> OpKey:
        return self.template.name, self.node.name

    @property
    def batch(self) -> Mapping[str, Part]:
        """The factors that are the batch."""
        return self.of.batch[self.key]

    @cached_property
    def weight(self) -> set[str]:
        """The factors by which a product or a look-up may be split."""
        return _weight_factors(
            self.template, self.node, self.rule, self.of.dims.get(self.template.name, {}), self.origins
        )

    @property
    def slots(self) -> set[Slot]:
        """The parameters that it reads."""
        values = operand_values(self.node)
        return {(self.template.name, slot) for v in values for slot in self.origins.get(v, ())}

    @cached_property
    def rows(self) -> Mapping[str, Labels | None]:
        """The values of the batch that it reads beside a weight, with their factors."""
        values = operand_values(self.node)
        labels = zip(values, self.rule.operands, strict=True) if self.weight and self.slots else ()
        return {value: dims for value, dims in labels if value not in self.origins}

    @property
    def computes(self) -> bool:
        """Whether it is a product or attention of values of the batch."""
        definition = find(self.template.op_calls[self.node.name].op)
        held = self.of.dims.get(self.template.name, {})
        return (
            definition is not None and definition.work is not None and any(v in held for v in operand_values(self.node))
        )

    def divides(self, choice: str, axis: str) -> bool:
        """Whether an axis can cut the factors of a choice."""
        return all(self.of.mesh.blocks(self.rule.factors[f].size, (axis,)) is not None for f in factors_of(choice))


def tensor_parallel(batched: BatchedProgram, axis: str) -> AxisChoices:
    """The choices of ops along an axis that takes weights, and never the batch."""
    choices: dict[OpKey, frozenset[str]] = {}
    slots: set[Slot] = set()
    ops = list(batched.ops())
    readers = Counter((op.template.name, value) for op in ops if op.weight and op.slots for value in op.rows)
    for op in ops:
        possible = {
            c
            for c in op.rule.choices()
            if c not in op.batch
            and (c not in op.rule.carries or op.weight.issuperset(factors_of(c)))
            and op.divides(c, axis)
        }
        of_weight = {c for c in possible if factors_of(c) and op.weight.issuperset(factors_of(c))}
        if of_weight:
            slots |= op.slots
        if any(readers[op.template.name, value] > 1 for value in op.rows):
            inputs = _factors(op.rows.values())
            of_weight = {c for c in of_weight if inputs.isdisjoint(factors_of(c))} or of_weight
        splits = bool(possible & op.rule.factors.keys()) and _has_features(op)
        choices[op.key] = frozenset(of_weight or (possible - {""} if splits else possible))
    return AxisChoices(choices, _parameters(batched.program, slots))


def expert_parallel(batched: BatchedProgram, axis: str) -> AxisChoices:
    """The choices of ops that can carry along an axis, which shards their weights together with the batch."""
    choices: dict[OpKey, frozenset[str]] = {}
    slots: set[Slot] = set()
    for op in batched.ops():
        carrying = frozenset(
            choice
            for choice, carried in op.rule.carries.items()
            if carried.factors[0] in op.batch and len(carried.factors) > 1 and op.divides(choice, axis)
        )
        if carrying:
            choices[op.key] = carrying
            slots |= op.slots
    return AxisChoices(choices, _parameters(batched.program, slots))


def context_parallel(batched: BatchedProgram, axis: str) -> Mapping[OpKey, frozenset[str]]:
    """The choices of ops along an axis that takes neither the batch nor weights. Products and attention on values of the batch
    are split by something where they can be: ranks that all do the same share no sequences."""
    choices: dict[OpKey, frozenset[str]] = {}
    for op in batched.ops():
        taken = {*op.batch, *op.weight}
        possible = {c for c in op.rule.choices() if taken.isdisjoint(factors_of(c)) and op.divides(c, axis)}
        splits = op.computes and any(factors_of(c) for c in possible)
        choices[op.key] = frozenset(possible - {""} if splits else possible)
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


def _has_features(op: BatchedOp) -> bool:
    """Whether an op on values of the batch has an index beside those of batch and sequence: a second one, or any where the
    sequence is part of the batch's index; or works along an index as a whole, as a norm does. Which of the pieces of a dim, and
    where in it, are no indices of features."""
    held = op.of.dims.get(op.template.name, {})
    floats = (v for v in operand_values(op.node) if v in held and op.template.type_of(v).is_float)
    others = [f for name, f in op.rule.factors.items() if name not in (*op.batch, *_pieces(op.rule)) and f.size > 1]
    merged = any(part.inner > 1 for part in op.batch.values())
    return any(floats) and (len(others) > 1 or bool(others and merged) or any(f.whole for f in others))


def _pieces(rule: Rule) -> set[str]:
    """Factors of dims that joins and splits take for pieces, of which there are whole ones."""
    dims = (dim for labels in (*rule.operands, *rule.results) for dim in labels or ())
    return {f for dim in dims if len(dim) > 1 and rule.factors[dim[0]].whole for f in dim}


def _factors(tensors: Iterable[Labels | None]) -> set[str]:
    return {f for labels in tensors for dim in labels or () for f in dim}
