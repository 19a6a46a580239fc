"""The account of a lowered program, against the solver's bill of the same plan and against its own list of collectives.

The solver prices a conversion for every reader; lowering makes each once. So the account is never more than the solver's
bill, and on plans that the solver chose within 1 % of it. Two things it does not see: gradients of a tied parameter that arrive
in several specs are brought to one each, for itself and in every microbatch; and gradients are added up and packed.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.costmodel.bill import hidden_seconds
from autopar.ir.lines import Convert, Function, Line, Prefetch, Start, TemplateCall
from autopar.ir.lowered import LoweredStage, StoredParameter
from autopar.ir.mesh import Mesh
from autopar.ir.steps import bytes_before_per_byte
from autopar.passes.account import stage as stage_module
from autopar.passes.account.program import Account, account
from autopar.passes.account.stage import Later
from autopar.passes.played.gradients import unreduced_bytes
from autopar.passes.price.lines import (
    conversion_copied_s,
    gather_alone_s,
    gather_messages,
    gradient_messages,
    reduce_seconds,
    regather_messages,
    regather_seconds,
)
from autopar.passes.price.pricer import Pricer, Pricers
from autopar.passes.shard.evaluate import evaluate
from tests.zoo.models import MODELS, ZooModel
from tests.zoo.pipelined import on_ranks
from tests.zoo.programs import compiled_zoo

every_model = pytest.mark.parametrize("zoo", MODELS, ids=str)


def solver_s(program: autopar.Program) -> float:
    plan, pricers = program.plan, Pricers(program.cluster)
    return evaluate(program.ir, plan, pricers, program.rules, program.setting).cost


def of_tied_gradients_s(program: autopar.Program) -> float:
    """Seconds by which conversions of parameter gradients outside of buckets exceed those inside."""
    (stage,), m = program.stages, program.plan.microbatches
    pricer = Pricers(program.cluster)[stage.mesh]
    total = 0.0
    for function in (stage.backward, stage.weights):
        for line in function.lines if function is not None else ():
            if isinstance(line, Convert) and line.phase == "W":
                kind, axis = line.step.kind, line.step.axis
                if pricer.mesh.sizes[axis] == 1 or kind in ("shard", "to_partial"):
                    continue
                nbytes = _full_bytes(line, function.lines, stage.mesh.sizes[axis], pricer)
                total += m * pricer.collective_s(kind, nbytes, axis) - pricer.bucketed_s(kind, nbytes, axis)
    return total


def of_gradient_passes_s(stage: LoweredStage, pricer: Pricer) -> float:
    """Seconds of the gradient store in a step: contributions are added to the first, sums are copied into messages."""
    total = 0.0
    for p in stage.parameters.values():
        if p.contributions:
            nbytes, due = unreduced_bytes(p, stage.mesh), p.contributions * stage.microbatches
            times = stage.microbatches if p.by_microbatch else 1
            came = came_bytes(p, stage.mesh)
            total += pricer.copy_s * (3 * came * (due - times) + 3 * p.updated_bytes(stage.mesh) * (times - 1))
            for step in p.reduce:
                size = stage.mesh.product(step.axes)
                if step.kind in ("all_reduce", "reduce_scatter") and size > 1:
                    packed = step.kind == "all_reduce" or step.dims[0] > 0 or nbytes < 1 << 20
                    total += times * pricer.copy_s * 2 * nbytes * packed
                    break
                nbytes = step.facts.table.bytes_after(nbytes, size)
    return total


def came_bytes(p: StoredParameter, mesh: Mesh) -> float:
    """Bytes of a gradient as it comes to the store, where no zeros fill it up yet."""
    for i, step in enumerate(p.reduce):
        if step.kind == "flatten":
            return math.prod(step.dims) * p.type.dtype.itemsize * bytes_before_per_byte(p.reduce[:i], mesh)
    return unreduced_bytes(p, mesh)


def unseen_s(program: autopar.Program) -> float:
    """Seconds of a step without stages that the solver does not see."""
    (stage,) = program.stages
    return of_tied_gradients_s(program) + of_gradient_passes_s(stage, Pricers(program.cluster)[stage.mesh])


def _full_bytes(line: Convert, lines: tuple[Line, ...], size: int, pricer: Pricer) -> float:
    maker = next(x for x in lines if line.value in x.outs)
    at = maker.outs.index(line.value)
    type_, spec = maker.types[at], maker.specs[at]
    assert type_ is not None
    assert spec is not None
    held = float(spec.local_bytes(type_, pricer.mesh))
    return held * size if line.step.kind == "all_gather" else held


@pytest.mark.few(2)
@every_model
@pytest.mark.parametrize("m", [1, 4])
def test_on_one_rank_the_account_is_the_solvers_bill(zoo: ZooModel, m: int) -> None:
    program = on_ranks(zoo.name, 1, m)
    program = program.with_plan(program.plan)
    assert not program.account.collectives
    assert program.account.step_time_s - unseen_s(program) == pytest.approx(solver_s(program), rel=1e-9)


def close_to_the_bill(zoo: ZooModel, mesh: dict[str, int]) -> None:
    program = compiled_zoo(zoo, 4, options=autopar.Options(mesh=mesh, overlap=False))
    assert program.account.step_time_s - unseen_s(program) == pytest.approx(solver_s(program), rel=1e-2)
    assert of_tied_gradients_s(program) == 0 or "tied" in zoo.tags


@pytest.mark.few(1)
@every_model
def test_a_plan_of_the_solver_costs_what_the_solver_said(zoo: ZooModel) -> None:
    close_to_the_bill(zoo, {"dp": 4})


@pytest.mark.slow
@every_model
def test_a_plan_of_the_solver_on_two_axes_costs_what_the_solver_said(zoo: ZooModel) -> None:
    close_to_the_bill(zoo, {"dp": 2, "tp": 2})


@pytest.mark.few(1)
@every_model
@pytest.mark.parametrize("m", [1, 3])
def test_no_plan_costs_more_than_the_solver_would_say(zoo: ZooModel, m: int) -> None:
    """The solver pays for every reader of a value; once is enough."""
    program = on_ranks(zoo.name, 4, m)
    for seed in range(3):
        made = program.with_plan(autopar.random_plan(program, seed, pp=1))
        assert made.account.step_time_s - unseen_s(made) <= solver_s(made) * (1 + 1e-9)


def copied_s(stage: LoweredStage, function: Function | None, pricer: Pricer) -> float:
    """Seconds that a rank copies for the conversions and gathers of a function and of the templates that it calls."""
    if function is None:
        return 0.0
    held, total = function.local_bytes(stage.mesh), 0.0
    for line in function.lines:
        begun = line.line if isinstance(line, Start) else line
        if isinstance(begun, Convert):
            total += conversion_copied_s(begun, held, pricer)
        elif isinstance(line, Prefetch):
            for gather in line.gathers:
                p = stage.parameters[gather.name]
                sent = gather_messages(gather, p, pricer.mesh)
                joined = pricer.software.joins_gathers
                total += gather_alone_s(gather, p, pricer)
                total -= sum(replace(message, bucketed=joined).seconds(pricer) for message in sent)
        elif isinstance(line, TemplateCall):
            template = stage.templates[line.template]
            actions = {"F": template.forward, "B": template.backward, "W": template.weights}
            total += copied_s(stage, actions[line.action], pricer)
    return total


def bill(program: autopar.Program) -> list[float]:
    """Per stage the seconds of a step if nothing hid a message: ops of every call on their blocks, conversions, collectives and
    the optimizer."""
    pricers, m = Pricers(program.cluster), program.plan.microbatches
    found = []
    for stage, planned, counted in zip(program.stages, program.plan.stages, program.account.stages, strict=True):
        pricer = pricers[stage.mesh]
        total = sum(c.time_s for c in counted.collectives)
        functions = (stage.forward, stage.backward, stage.weights, *stage.prepare)
        total += m * sum(copied_s(stage, function, pricer) for function in functions)
        total += of_gradient_passes_s(stage, pricer)
        for i in range(*planned.calls):
            call = program.ir.calls[i]
            if call.prologue and m == 1:
                continue
            template, backward = program.ir.template_of(call), i in program.ir.backward_calls
            for node in template.ops:
                if node.meta["phase"] == "F" or backward:
                    op = template.op_calls[node.name]
                    strategy = planned.templates[template.name].strategies[node.name]
                    rule = program.rules.rule(op)
                    total += m * pricer.op_s(op, rule, strategy)
        for p in stage.parameters.values():
            if p.contributions:
                reduced, gathered = gradient_messages(p, pricer.mesh), regather_messages(p, pricer.mesh)
                times = m if p.by_microbatch else 1
                total += times * (reduce_seconds(p, pricer) - sum(message.seconds(pricer) for message in reduced))
                total += regather_seconds(p, pricer) - sum(message.seconds(pricer) for message in gathered)
            if p.contributions and p.owned:
                touched = 3 + 2 * program.setting.optimizer.ratio(p.name)
                total += touched * p.optimizer.local_bytes(p.type, stage.mesh) * pricer.copy_s
        found.append(total)
    return found


@pytest.mark.few(1)
@every_model
def test_actions_and_the_end_of_the_step_are_ops_collectives_and_optimizer(zoo: ZooModel) -> None:
    """Two walks over a pipeline: by action, where work hides messages, and by kind of cost."""
    program = on_ranks(zoo.name, 4, 3)
    for seed in range(6):
        made = program.with_plan(autopar.random_plan(program, seed, pieces=1))
        m = made.plan.microbatches
        for counted, total in zip(made.account.stages, bill(made), strict=True):
            hidden_s = m * sum(hidden_seconds(counted.bill).values())
            assert m * sum(counted.seconds.values()) + counted.step_s + hidden_s == pytest.approx(total, rel=1e-9)


@pytest.mark.few(1)
@every_model
def test_a_step_is_at_least_the_busiest_group_and_at_most_all_in_a_row(zoo: ZooModel) -> None:
    program = on_ranks(zoo.name, 4, 4)
    for seed in range(4):
        made = program.with_plan(autopar.random_plan(program, seed, pp=2))
        counted, m = made.account, made.plan.microbatches
        work = [m * sum(s.seconds.values()) for s in counted.stages]
        once = max(sum(counted.stages[s].step_s for s in group) for group in counted.graph.groups)
        busiest = max(sum(work[s] for s in group) for group in counted.graph.groups)
        assert counted.step_time_s >= (busiest + once) * (1 - 1e-9)
        sends = 2 * m * sum(counted.hand_over.values())
        assert counted.step_time_s <= (sum(work) + sends + once) * (1 + 1e-9)
        assert counted.step_time_s == pytest.approx(counted.timeline.makespan_s + once)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_sent_to_another_group_takes_time_and_to_the_own_group_none(seed: int) -> None:
    program = on_ranks("llama", 4, 4)
    made = program.with_plan(autopar.random_plan(program, seed, 2, "interleaved"))
    group_of = made.lowered.graph.group_of
    crossing = {(t.source, t.target) for t in made.lowered.transfers if group_of[t.source] != group_of[t.target]}
    assert made.account.hand_over.keys() == crossing
    assert all(s > 0 for s in made.account.hand_over.values())


@pytest.mark.slow
def test_more_microbatches_of_the_same_size_take_longer() -> None:
    times = {}
    for m in (2, 4):
        program = on_ranks("mlp", 4, m)
        made = program.with_plan(autopar.random_plan(program, 3, 2, "1f1b"))
        times[m] = made.account.read_under(made.lowered.table).step_s
        assert math.isclose(times[m], made.account.step_time_s)
    assert times[4] > times[2]


def test_a_later_value_is_made_once_and_goes_to_another_process_as_it_is() -> None:
    asked: list[int] = []

    def make() -> int:
        asked.append(1)
        return 7

    later = Later(make)
    assert asked == []
    assert (later(), later(), pickle.loads(pickle.dumps(later))()) == (7, 7, 7)
    assert asked == [1]


def test_bytes_and_seconds_of_a_candidate_are_counted_when_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    program = on_ranks("mlp", 2, 2)
    counted: list[str] = []

    def note(name: str) -> None:
        count = getattr(stage_module, name)

        def noted(*given: Any) -> Any:
            counted.append(name)
            return count(*given)

        monkeypatch.setattr(stage_module, name, noted)

    note("stage_memory")
    note("stage_bill")

    def again() -> Account:
        return account(
            program.lowered,
            program.plan.stages,
            program.ir.templates,
            Pricers(program.cluster),
            program.setting,
            program.rules,
        )

    timed, held = again(), again()
    assert counted == []
    assert timed.step_time_s == program.account.step_time_s
    assert counted == ["stage_bill"]
    assert held.peaks == program.account.peaks
    assert held.tier_peaks == program.account.tier_peaks
    assert counted == ["stage_bill", "stage_memory"]
