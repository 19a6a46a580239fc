"""Which index of every op is the batch: what pure data parallelism (and ZeRO) may shard.

The batch dim of the inputs is followed through the rules of all ops, forward and backward: a factor that leads an
operand's batch dim is a batch factor, and the result dims that it leads are batch dims. The gradient of a value has its
value's batch dims.
"""

from __future__ import annotations

from autopar.ir.program import Program, Template, ValueRef, operand_values, resolve
from autopar.passes.rules.book import RuleBook

Dims = frozenset[int]
NONE: Dims = frozenset()
OpKey = tuple[str, str]


def batch_factors(program: Program, rules: RuleBook) -> dict[OpKey, frozenset[str]]:
    """(template, op node) -> factors that split the batch, or that only results have (constants, broadcasts)."""
    factors: dict[OpKey, frozenset[str]] = {}
    values: dict[ValueRef, Dims] = {}
    for i, (_, type_) in enumerate(program.inputs):
        batch_dim = program.batch_dims[i] if i < len(program.batch_dims) else 0
        values[ValueRef("input", i)] = NONE if batch_dim is None or not type_.shape else frozenset({batch_dim})
    for index, call in enumerate(program.calls):
        template = program.template_of(call)
        dims = {name: values.get(ref, NONE) for name, ref in zip(template.inputs, call.inputs, strict=True)}
        _follow(template, dims, rules, factors)
        for o, name in enumerate(template.outputs):
            values[ValueRef("call", index, o)] = dims.get(name, NONE)
    return factors


def _follow(template: Template, dims: dict[str, Dims], rules: RuleBook, factors: dict[OpKey, frozenset[str]]) -> None:
    """Batch dims of every value of a template, from those of its inputs, into `dims`; factors into `factors`."""
    names: dict[tuple[str, int], list[str]] = {}
    for name, node in template.nodes.items():
        if node.op == "call_function":
            producer, result = resolve(node)
            names.setdefault((producer.name, result), []).append(name)
    value_of = {t: o for t, o in zip(template.tangents, template.outputs, strict=True) if t is not None}
    for node in template.ops:
        rule = rules.rule(template.op_calls[node.name])
        leading = {
            labels[d][0]
            for name, labels in zip(operand_values(node), rule.operands, strict=True)
            for d in dims.get(value_of.get(name, name), NONE)
            if labels is not None and labels[d]
        }
        key = (template.name, node.name)
        factors[key] = factors.get(key, frozenset()) | leading | (rule.factors.keys() - rule.contracted)
        for i, labels in enumerate(rule.results):
            held = frozenset(d for d, dim in enumerate(labels or ()) if dim and dim[0] in leading)
            dims.update(dict.fromkeys(names.get((node.name, i), ()), held))
