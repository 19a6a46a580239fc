"""Price a given plan: the factor graph's value at the plan's choices."""

from __future__ import annotations

from typing import Any

from autopar.errors import PlanError
from autopar.ir.program import Program
from autopar.passes.costs import Pricer
from autopar.passes.shard.graph import Key
from autopar.passes.shard.problem import Problem, Setting
from autopar.passes.shard.rules import RuleBook
from autopar.passes.shard.solve import Solution
from autopar.plan import Plan


def evaluate(program: Program, plan: Plan, pricer: Pricer, rules: RuleBook, setting: Setting) -> Solution:
    """Cost and memory of a plan. Raises PlanError when it names choices that do not exist."""
    stage = plan.stages[0]

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

    graph = Problem(program, pricer, rules, setting, given=state).graph
    choice = tuple([0] * len(graph.keys))
    cost = graph.value(list(choice))
    return Solution(choice, cost, graph.memory_of(list(choice)), cost, "replay", graph.size, graph.size)
