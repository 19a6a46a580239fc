"""Price a given plan: the factor graph's value at the plan's choices."""

from __future__ import annotations

from dataclasses import replace
from itertools import starmap
from typing import Any

from autopar.errors import PlanError
from autopar.ir.program import Program
from autopar.ir.setting import Setting
from autopar.passes.lower.cut import cut
from autopar.passes.lower.first_calls import first_calls_apart
from autopar.passes.price.pricer import Pricer, Pricers
from autopar.passes.rules.book import RuleBook
from autopar.passes.shard.factors.graph import FactorGraph, Key
from autopar.passes.shard.factors.problem import Problem
from autopar.passes.shard.solve import Solution
from autopar.plan import Plan, StagePlan


def evaluate(program: Program, plan: Plan, pricers: Pricers, rules: RuleBook, setting: Setting) -> Solution:
    """Cost and memory of a plan, of its stages one after the other. Raises PlanError when its choices do not exist."""
    parts = cut(program, [stage.calls for stage in plan.stages])
    stages = starmap(first_calls_apart, zip(parts, plan.stages, strict=True))
    solutions = [_stage(part, stage, pricers[stage.mesh], rules, setting) for part, stage in stages]
    if len(solutions) == 1:
        return solutions[0]
    cost, memory = sum(s.cost for s in solutions), max(s.memory for s in solutions)
    return replace(solutions[0], cost=cost, memory=memory, bound=cost)


def _stage(program: Program, stage: StagePlan, pricer: Pricer, rules: RuleBook, setting: Setting) -> Solution:
    graph = graph_of(program, stage, pricer, rules, setting)
    choice = tuple([0] * len(graph.keys))
    cost = graph.value(list(choice))
    return Solution(choice, cost, graph.memory_of(list(choice)), cost, "replay", graph.size, graph.size)


def graph_of(program: Program, stage: StagePlan, pricer: Pricer, rules: RuleBook, setting: Setting) -> FactorGraph:
    """The factor graph of a stage with the plan's choices alone. Raises PlanError when they do not exist."""

    def state(key: Key) -> Any:
        try:
            if key[0] == "op":
                return stage.templates[key[1]].strategies[key[2]]
            if key[0] == "at":
                return stage.templates[key[1]].specs[key[2]]
            parameter = stage.parameters[key[1]]
            return parameter.storage, parameter.optimizer
        except KeyError:
            raise PlanError(f"the plan says nothing about {' '.join(key[1:])}; it is for another model") from None

    some = any(parameter.by_microbatch for parameter in stage.parameters.values())
    setting = replace(setting, by_microbatch=setting.by_microbatch or some)
    recompute = {name: stage.templates[name].recompute for name in program.templates if name in stage.templates}
    return Problem(program, pricer, rules, setting, given=state, recompute=recompute).graph
