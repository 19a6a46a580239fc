"""Bytes held for backward: one exact function, and the bounds that solvers know before anything is lowered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

import autopar
from autopar.ir.lowered import LoweredStage
from autopar.ir.program import Program
from autopar.passes.lower.cut import cut
from autopar.passes.memory.walk import action_bytes, held_by_call, kept_by_call
from autopar.passes.price.pricer import Pricers
from autopar.passes.rules.hubs import flow
from autopar.passes.rules.recomputation import held_values, recomputation
from autopar.passes.shard.evaluate import graph_of
from autopar.plan import StagePlan
from tests.passes.recompute.recomputed import with_policy
from tests.zoo.models import MODELS, ZooModel
from tests.zoo.pipelined import on_ranks

every_model = pytest.mark.parametrize("zoo", MODELS, ids=str)
by_policy = pytest.mark.parametrize("policy", ["none", "selective", "full"])

Part = tuple[autopar.Program, Program, StagePlan, LoweredStage]


def parts(zoo: ZooModel, policy: str) -> Iterator[Part]:
    """Random plans on one mesh and in stages under a recompute policy, stage by stage."""
    base = on_ranks(zoo.name, 4, 1)
    for seed, pp in ((0, 1), (1, 1), (5, 2)):
        made = base.with_plan(with_policy(base, autopar.random_plan(base, seed, pp=pp, pieces=1), policy))
        programs = cut(made.ir, [stage.calls for stage in made.plan.stages])
        for program, plan, stage in zip(programs, made.plan.stages, made.stages, strict=True):
            yield made, program, plan, stage


def filled_bytes(made: autopar.Program, plan: StagePlan, stage: LoweredStage) -> float:
    """Bytes of what a microbatch holds that values fill which own memory: of every storage, the largest of them in it."""
    machine, kept = kept_by_call(stage)
    filled: dict[int, int] = {}
    for number, values in kept.items():
        name = made.ir.calls[number].template
        template = made.ir.templates[name]
        remade = recomputation(template, flow(template), plan.templates[name].recompute)
        own = held_values(template, remade)
        for value_name, value in zip(remade.kept, values, strict=True):
            if value.block >= 0 and value_name in own:
                nbytes = value.layout.nbytes if value.layout is not None else 0
                filled[value.block] = max(filled.get(value.block, 0), min(nbytes, machine.size[value.block]))
    return float(sum(filled.values()))


def solver_bytes(made: autopar.Program, program: Program, plan: StagePlan) -> float:
    """Bytes that the sharding problem counts for a microbatch."""
    setting = replace(made.setting, in_flight=1.0)
    graph = graph_of(program, plan, Pricers(made.cluster)[plan.mesh], made.rules, setting)
    return sum(float(m[0]) for key, m in zip(graph.keys, graph.memory, strict=True) if key[0] in ("op", "at"))


@pytest.mark.few(2)
@every_model
@by_policy
def test_calls_keep_what_a_microbatch_holds(zoo: ZooModel, policy: str) -> None:
    for _, _, _, stage in parts(zoo, policy):
        assert sum(held_by_call(stage).values()) == action_bytes(stage)["F"].end


@pytest.mark.few(2)
@every_model
@by_policy
def test_the_solver_counts_every_value_that_fills_a_storage(zoo: ZooModel, policy: str) -> None:
    for made, program, plan, stage in parts(zoo, policy):
        filled = filled_bytes(made, plan, stage)
        assert filled <= action_bytes(stage)["F"].end
        assert filled <= solver_bytes(made, program, plan)
