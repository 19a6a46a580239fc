"""How the losses of microbatches make the loss of the batch: their mean, their sum, or neither exactly.

The batch is followed through the forward graph as if microbatches were shards of it: a value has the batch in its dims,
or is a sum over it ("owed" by the other microbatches), or is the same in all. A loss that owes a sum, taken through
linear ops only and divided by something on the way, is a mean; never divided, it is a sum. Where what is owed meets a
non-linear op (batch norm's statistics, a load-balancing loss, a root of a mean) the batch couples: each microbatch is
then a batch of its own, as in every framework, and the step is not that of the whole batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from autopar.ir.program import Program, Template, ValueRef, is_getitem, operand_values, resolve
from autopar.passes.batch.rebatch import Dims, NoRebatch, batch_dims, batch_factor
from autopar.passes.batch.whole_batch import batch_sums, with_early_calls
from autopar.passes.rules.book import RuleBook

LossKind = Literal["mean", "sum", "coupled"]
DIVIDES = ("aten.div.", "aten.mean.", "aten.true_divide.", "aten.mul.Scalar", "aten.mul.Tensor")
Owed = dict[str, str]


def in_microbatches(program: Program, rules: RuleBook, probe: Program | None = None) -> Program:
    """The program of one microbatch, made to give the loss of the whole batch where that is possible.

    probe: the same model captured for a larger batch: in a batch of one nothing tells which dims are the batch's.
    """
    if not program.training:
        return program
    probe = probe or program
    known = batch_sums(probe, rules)
    places = known if _same_nodes(program, probe) else batch_sums(program, rules)
    kind = loss_kind(with_early_calls(probe, known), rules)
    return replace(program if kind == "coupled" else with_early_calls(program, places), loss_kind=kind)


def _same_nodes(one: Program, other: Program) -> bool:
    same = [c.template for c in one.calls] == [c.template for c in other.calls]
    return same and all(list(t.nodes) == list(other.templates[n].nodes) for n, t in one.templates.items())


def loss_kind(program: Program, rules: RuleBook) -> LossKind:
    """Of a training program captured for one microbatch."""
    try:
        known = batch_dims(program, rules)
    except NoRebatch:
        return "coupled"
    owed: dict[ValueRef, str] = {}
    for i, call in enumerate(program.calls):
        template = program.template_of(call)
        if call.early:
            continue
        mine = {v: owed[ref] for v, ref in zip(template.inputs, call.inputs, strict=True) if ref in owed}
        if not _follow(template, mine, known[template.name], rules):
            return "coupled"
        for o, value in enumerate(template.outputs):
            if value in mine:
                owed[ValueRef("call", i, o)] = mine[value]
    kind = owed.get(program.outputs[0], "divided")
    return "sum" if kind == "whole" else "mean"


def _follow(template: Template, owed: Owed, known: Dims, rules: RuleBook) -> bool:
    """What the values of a template owe ("whole" or "divided"), into `owed`; False where the batch couples."""
    for name, node in template.nodes.items():
        if node.op != "call_function":
            continue
        producer = resolve(node)[0]
        if is_getitem(node):
            if producer.name in owed:
                owed[name] = owed[producer.name]
            continue
        if node.meta["phase"] != "F":
            continue
        call = template.op_calls[name]
        rule = rules.rule(call)
        reads = operand_values(node)
        partial = frozenset(k for k, v in enumerate(reads) if v in owed)
        if partial:
            if partial not in rule.linear:
                return False
            kinds = {owed[reads[k]] for k in partial}
            divided = call.op.startswith(DIVIDES)
            if len(kinds) > 1 and not divided:
                return False
            owed[name] = "divided" if divided else next(iter(kinds))
            if any(known.get(reads[k]) for k in range(len(reads)) if k not in partial):
                return False
            continue
        kept = {f for labels in rule.results for dim in labels or () for f in dim}
        for value, labels in zip(reads, rule.operands, strict=True):
            for d, part in known.get(value, {}).items():
                held = batch_factor((labels or ())[d], rule, part)
                if held is not None and held[0] not in kept:
                    if rule.factors[held[0]].reduce != "sum":
                        return False
                    owed[name] = "divided" if call.op.startswith("aten.mean.") else "whole"
    return True
