"""program.json of an emitted directory: what `autopar-dump` shows, filled in from a compiled program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import torch

from autopar.capture.examples.trees import shapes_text
from autopar.compiled import Compiled
from autopar.costmodel.bill import StageBill, exposed_seconds, hidden_seconds
from autopar.ir.lines import Compute, Convert, Function, Line, Start, TemplateCall, label
from autopar.ir.lowered import LoweredStage, LoweredTemplate
from autopar.ir.resting import resting_rows
from autopar.passes.account.spent import spent
from autopar.passes.account.stage import probe_of
from autopar.passes.memory.walk import held_by_call
from autopar.passes.played.gradients import summed_bytes
from autopar.passes.price.pricer import Pricers
from autopar.report.advice.limits import predicted_limits
from autopar.report.answer import room_facts, why_not, work_facts
from autopar.report.long_run import long_run_facts
from autopar.report.machines import machine_facts
from autopar.report.program_facts import (
    AlternativeFacts,
    CallFacts,
    FormFacts,
    FunctionFacts,
    LineFacts,
    ParameterFacts,
    ProgramFacts,
    ScheduleFacts,
    StageFacts,
    TemplateFacts,
    TransferFacts,
)
from autopar.report.worst import worst_facts


def facts(program: Compiled) -> ProgramFacts:
    """Everything about a program that its plan does not say."""
    return ProgramFacts(
        torch=torch.__version__,
        python=sys.version.split()[0],
        training=program.training,
        ranks=program.plan.ranks,
        origin=program.plan.origin,
        solver=program.solver,
        predicted=program.decision.predicted,
        work=work_facts(program),
        spent=spent(program.account),
        limits=predicted_limits(program),
        room=room_facts(program),
        timings=program.timings,
        memory=program.peak_kinds,
        peak_bytes=program.account.peak_bytes,
        alternatives=tuple(
            AlternativeFacts(a.name, a.predicted.step_time_s, a.predicted.peak_bytes, why_not(a, program))
            for a in program.alternatives
        ),
        microbatches=program.plan.microbatches,
        model=type(program.model).__name__,
        cluster=program.cluster.name,
        cluster_described=program.request.cluster.to_dict(),
        long_run=long_run_facts(program),
        machines=machine_facts(program),
        calls=_calls(program),
        schedule=_schedule(program),
        transfers=tuple(
            TransferFacts(
                t.name,
                t.kind,
                t.source,
                t.target,
                t.type.nbytes,
                t.source_spec.show(t.type),
                t.target_spec.show(t.type),
            )
            for t in program.lowered.transfers
        ),
        worst=worst_facts(program),
        recompute=tuple(program.recompute_curves()),
        by_node=program.emitted.by_node.axes,
        shared=program.lowered.shared,
        stages=tuple(_stage(stage, program) for stage in program.stages),
        buckets=tuple(map(_form, program.of_buckets if program.buckets else ())),
        entries={name: tuple(map(_form, entry.of_buckets)) for name, entry in program.entries.items()},
    )


def _form(program: Compiled) -> FormFacts:
    predicted = program.decision.predicted
    inputs, plan = shapes_text(program.request.inputs), program.plan.show_meshes()
    return FormFacts(inputs, plan, predicted.step_time_s, predicted.peak_bytes)


def _calls(program: Compiled) -> tuple[CallFacts, ...]:
    """Calls with what they keep for backward; stages that share their functions keep the same. The first calls of a template that
    recompute otherwise than the others are of the template that lowering made of them."""
    pricers, by_function = Pricers(program.cluster), dict[int, list[tuple[str, float, float]]]()
    facts: list[CallFacts] = []
    for stage, plan in zip(program.stages, program.plan.stages, strict=True):
        first, last = plan.calls
        if id(stage.forward) not in by_function:
            probe = probe_of(pricers[stage.mesh])
            held = held_by_call(stage, probe) if program.training else {}
            later = held_by_call(stage, probe, "B") if stage.weights is not None else {}
            template_of = {call.number: call.template for function in stage.functions for call in function.calls}
            by_function[id(stage.forward)] = [
                (name, float(held.get(n, 0)), float(later.get(n, 0))) for n, name in sorted(template_of.items())
            ]
        paths = [call.path for call in program.ir.calls[first:last]]
        kept = zip(paths, by_function[id(stage.forward)], strict=True)
        facts += [CallFacts(name, path, *nbytes) for path, (name, *nbytes) in kept]
    return tuple(facts)


def _schedule(program: Compiled) -> ScheduleFacts:
    counted = program.account
    bills = [stage.bill for stage in counted.stages]

    def by_action(listed: Callable[[StageBill], Mapping[str, float]]) -> dict[tuple[int, str], float]:
        return {(stage, kind): s for stage, bill in enumerate(bills) for kind, s in listed(bill).items() if s > 0}

    return ScheduleFacts(
        name=program.plan.schedule,
        peaks=tuple(counted.peaks),
        graph=counted.graph,
        table=counted.table,
        seconds=counted.seconds,
        hand_over=counted.hand_over,
        exposed=tuple(sum(by_purpose.values()) for by_purpose in counted.step.non_overlapped_s),
        hidden=by_action(hidden_seconds),
        shown=by_action(lambda bill: exposed_seconds(bill, counted.software)),
        beside=by_action(_beside),
        once=by_action(lambda bill: {"F": bill.parameters.gather_s, "B": bill.parameters.reduce_s}),
    )


def _beside(bill: StageBill) -> dict[str, float]:
    """Seconds of messages of parameters in every microbatch's forward and backward."""
    traffic = bill.parameters
    return {"F": traffic.each_forward_s, "B": traffic.each_backward_s + traffic.each_reduce_s}


def _stage(stage: LoweredStage, program: Compiled) -> StageFacts:
    counted = program.account.stages[stage.index]
    resting: dict[str, dict[str, float]] = {}
    for p, row in resting_rows(stage, program.setting):
        if not p.tiers[row.moves]:
            kinds = resting.setdefault(p.name, {})
            kinds[row.kind] = kinds.get(row.kind, 0.0) + row.nbytes
    return StageFacts(
        mesh=stage.mesh,
        seconds=counted.seconds,
        step_s=counted.step_s,
        resting=counted.memory.resting,
        held_bytes=counted.memory.actions["F"].after,
        inputs={r.name: r.spec.show(r.type) for r in stage.inputs},
        outputs={r.name: r.spec.show(r.type) for r in stage.outputs},
        templates={name: _template(t) for name, t in stage.templates.items()},
        functions={f.name: _function(f) for f in stage.functions},
        collectives=counted.collectives,
        parameters={
            p.name: ParameterFacts(
                p.storage.show(p.type),
                p.optimizer.show(p.type),
                p.contributions > 0,
                p.storage.local_bytes(p.type, stage.mesh),
                [list(step.row) for step in p.reduce],
                resting.get(p.name, {}),
                p.compression,
                summed_bytes(p, stage.mesh) if p.contributions else 0.0,
            )
            for p in stage.parameters.values()
        },
    )


def _template(t: LoweredTemplate) -> TemplateFacts:
    functions = {"forward": t.forward, "backward": t.backward, "weights": t.weights}
    return TemplateFacts(t.saved, t.later, {kind: _function(f) for kind, f in functions.items() if f is not None})


def _function(f: Function) -> FunctionFacts:
    return FunctionFacts(
        {name: spec.show(type_) for name, (type_, spec) in f.arg_types.items()},
        tuple(_line(line) for line in f.lines),
        tuple(name for name in f.returns if name),
    )


def _line(line: Line) -> LineFacts:
    begun = line.line if isinstance(line, Start) else line
    return LineFacts(
        out=line.outs,
        op=label(line),
        reads=tuple(line.reads()),
        specs=tuple(s.show(t) if t is not None and s is not None else "" for _, t, s in line.made()),
        phase=line.phase,
        source=line.source,
        axis=begun.step.axis if isinstance(begun, Convert) else None,
        sent=begun.sent if isinstance(begun, Compute) else (),
        call=line.number if isinstance(line, TemplateCall) else None,
    )
