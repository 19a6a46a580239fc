"""Plans: priced edge by edge, replayable, equal to what lowering makes of them."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

import autopar
from autopar import ClusterSpec, Options, ParallelProgram, Plan
from autopar.ir.lines import Compute
from autopar.passes.price.pricer import Pricer, Pricers
from autopar.passes.shard.evaluate import evaluate
from tests.passes.shard.unfolded import unfolded_cost
from tests.zoo.models import MODELS
from tests.zoo.programs import compiled_zoo

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
BY_NAME = {m.name: m for m in MODELS}


@functools.lru_cache
def compiled(name: str, ranks: int = 4, mesh: tuple[tuple[str, int], ...] | None = None) -> ParallelProgram:
    zoo = BY_NAME[name]
    options = Options(mesh=dict(mesh) if mesh else None)
    return compiled_zoo(zoo, ranks, options=options)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "resnet", "partly-frozen"])
def test_every_edge_is_priced_also_between_repeated_blocks(name: str) -> None:
    program = compiled(name)
    pricer = Pricer(program.cluster, program.plan.stages[0].mesh)
    solver_said = evaluate(program.ir, program.plan, Pricers(program.cluster), program.rules, program.setting)
    assert unfolded_cost(program, pricer) == pytest.approx(solver_said.cost, rel=1e-9)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_random_plans_are_priced_edge_by_edge_too(seed: int) -> None:
    program = compiled("llama")
    other = program.with_plan(autopar.random_plan(program, seed, pp=1))
    pricer = Pricer(other.cluster, other.plan.stages[0].mesh)
    solver_said = evaluate(other.ir, other.plan, Pricers(other.cluster), other.rules, other.setting)
    assert unfolded_cost(other, pricer) == pytest.approx(solver_said.cost, rel=1e-9)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gpt2", "resnet", "t5"])
def test_every_planned_spec_is_the_spec_that_lowering_makes(name: str) -> None:
    program = compiled(name)
    for plan in (program.plan, autopar.random_plan(program, 1, pp=1)):
        made = program.with_plan(plan)
        stage, planned = made.stages[0], plan.stages[0]
        for template_name, template in stage.templates.items():
            ir = made.ir.templates[template_name]
            lines = {line.node: line for line in _op_lines(template)}
            for node, strategy in planned.templates[template_name].strategies.items():
                rule = made.rules.rule(ir.op_calls[node])
                if node in lines:
                    expected = [rule.result_spec(i, strategy, planned.mesh) for i in range(len(lines[node].outs))]
                    assert list(lines[node].specs) == expected
            for argument, (_, spec) in template.forward.arg_types.items():
                for key in (argument, f"{argument}@use"):
                    if key in planned.templates[template_name].specs:
                        assert spec == planned.templates[template_name].specs[key]
                        break


def _op_lines(template: object) -> list[Compute]:
    functions = [template.forward, template.backward]  # type: ignore[attr-defined]
    return [line for f in functions if f is not None for line in f.lines if isinstance(line, Compute)]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama", "resnet"])
def test_chosen_plan_is_never_predicted_worse_than_a_baseline(name: str) -> None:
    program = compiled(name)
    for other in program.alternatives:
        assert program.predicted.step_time_s <= other.predicted.step_time_s * (1 + 1e-6)


def test_plan_survives_a_file_and_replays_to_the_same_program(tmp_path: Path) -> None:
    program = compiled("gpt2")
    program.plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan == program.plan
    zoo = BY_NAME["gpt2"]
    again = compiled_zoo(zoo, 4, plan=plan)
    assert again.source(0) == program.source(0)
    assert again.predicted.step_time_s == pytest.approx(program.predicted.step_time_s)


@pytest.mark.slow
def test_solving_twice_gives_the_same_plan() -> None:
    zoo = BY_NAME["llama"]

    def plan() -> Plan:
        return autopar.compile(zoo.make(), ClusterSpec.local(4), zoo.batch(), optimizer=zoo.optimizer).plan

    assert plan() == plan()


def test_depth_costs_no_variables() -> None:
    from benchmarks.models import Llama, LlamaShape

    sizes = set()
    for layers in (8, 12):
        with torch.device("meta"):
            model = Llama(LlamaShape(layers, 64, 128, 4, 2, 128), 32)
        ids = torch.empty(8, 32, dtype=torch.long, device="meta")
        options = autopar.Options(pp=1, microbatches=1)
        program = autopar.compile(model, ClusterSpec.local(4), (ids, ids), optimizer=ADAMW, options=options)
        sizes.add((program.solver.nodes_before, program.solver.variables_before))
    assert len(sizes) == 1
