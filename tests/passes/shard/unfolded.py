"""An independent bill of a plan: every op and every edge of the unfolded graph, priced call by call."""

from __future__ import annotations

from autopar import ParallelProgram
from autopar.ir.program import ValueRef, operand_nodes, resolve
from autopar.ir.spec import Spec
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.hubs import flow
from autopar.passes.rules.sends import sent_by
from autopar.runtime.gradients.bucket_sizes import BUCKETED
from autopar.runtime.gradients.gather import GATHERED


def unfolded_cost(program: ParallelProgram, pricer: Pricer) -> float:
    """Seconds per step of the program's plan, walked call by call (no template multiplicities, no factor graph)."""
    ir, stage, rules = program.ir, program.plan.stages[0], program.rules
    m = program.plan.microbatches
    total = 0.0

    def value_spec(template: str, value: str) -> Spec:
        node, index = resolve(ir.templates[template].nodes[value])
        if node.op == "placeholder":
            return stage.templates[template].specs[value]
        call = ir.templates[template].op_calls[node.name]
        spec = rules.rule(call).result_spec(index, stage.templates[template].strategies[node.name], pricer.mesh)
        assert spec is not None
        return spec

    for i, call in enumerate(ir.calls):
        template = ir.templates[call.template]
        planned, fl = stage.templates[call.template], flow(template)
        for hub in fl.hubs.values():
            type_ = template.type_of(hub.value)
            if hub.value in template.params:
                stored = stage.parameters[call.params[template.params.index(hub.value)]].storage
                total += m * pricer.convert_s(type_, stored, planned.specs[hub.name])
            else:
                before = planned.specs[hub.source] if hub.source else value_spec(call.template, hub.value)
                total += m * pricer.convert_s(type_, before, planned.specs[hub.name])
        for node in template.ops:
            op, strategy = template.op_calls[node.name], planned.strategies[node.name]
            rule = rules.rule(op)
            computed_s = pricer.op_s(op, rule, strategy)
            sent_s = pricer.sent_s(sent_by(op, rule, strategy, pricer.mesh), computed_s)
            total += m * (computed_s + sum(sent_s.values()))
            for k, operand in enumerate(operand_nodes(node)):
                source = fl.reads[node.name, k]
                before = planned.specs[source] if source else value_spec(call.template, operand.name)
                wanted = rule.operand_spec(k, strategy, pricer.mesh)
                assert wanted is not None
                total += m * pricer.convert_s(op.operands[k], before, wanted)
        for slot, ref in enumerate(call.inputs):
            type_, wanted = ir.type_of(ref), planned.specs[template.inputs[slot]]
            if ref.kind == "call":
                owner = ir.template_of(ir.calls[ref.index])
                before = value_spec(owner.name, owner.outputs[ref.output])
                grad, tangent = template.input_grads[slot], owner.tangents[ref.output]
                if grad is not None and tangent is not None and i in ir.backward_calls:
                    back = value_spec(call.template, grad)
                    total += m * pricer.convert_s(type_, back, stage.templates[owner.name].specs[tangent])
            else:
                before = Spec.replicated(len(type_.shape))
            total += m * pricer.convert_s(type_, before, wanted)
        for slot, grad in enumerate(template.param_grads):
            if grad is not None and call.params[slot] in ir.trained:
                target = stage.parameters[call.params[slot]].optimizer
                type_, before = template.type_of(grad), value_spec(call.template, grad)
                total += pricer.convert_s(type_, before, target, joined=BUCKETED)
    return total + _ends(program, pricer, value_spec)


def _ends(program: ParallelProgram, pricer: Pricer, value_spec: object) -> float:
    ir, stage, m = program.ir, program.plan.stages[0], program.plan.microbatches
    total = 0.0

    def end(ref: ValueRef, joined: tuple[str, ...] = ()) -> float:
        if ref.kind != "call":
            return 0.0
        owner, type_ = ir.template_of(ir.calls[ref.index]), ir.type_of(ref)
        spec = value_spec(owner.name, owner.outputs[ref.output])  # type: ignore[operator]
        target = Spec.replicated(len(type_.shape)) if ir.training else spec.without_partial()
        ops = tuple(sorted({"sum", *(op for _, op in spec.partial)}))
        return m * pricer.lattice(type_, ops, joined).cost(spec, target)

    for k, ref in enumerate(ir.outputs):
        total += end(ref, BUCKETED if ir.training and k == 0 else ())
    for ref in ir.buffer_updates.values():
        total += end(ref)
    if ir.training:
        ref = ir.outputs[0]
        owner = ir.template_of(ir.calls[ref.index])
        tangent = owner.tangents[ref.output]
        if tangent is not None:
            type_ = ir.type_of(ref)
            total += m * pricer.convert_s(type_, Spec.replicated(0), stage.templates[owner.name].specs[tangent])
    for name in ir.trained:
        planned, type_ = stage.parameters[name], ir.parameters[name].type
        total += pricer.convert_s(type_, planned.optimizer, planned.storage, joined=GATHERED)
        touched = 3 + 2 * program.setting.optimizer.ratio(name)
        total += touched * planned.optimizer.local_bytes(type_, pricer.mesh) * pricer.copy_s
    return total
