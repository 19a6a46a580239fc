"""Sharding and recompute chosen together: against every choice on small programs, and against one after the other."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import nn

import autopar
from autopar.cluster.tiers import Tier
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.setting import OptimizerState, Setting
from autopar.passes.price.pricer import Pricers
from autopar.passes.recompute.choose import of_values, within
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.recomputation import made_forward
from autopar.passes.search.one_mesh import joint as joint_module
from autopar.passes.search.one_mesh.joint import JointSearch, Point
from autopar.passes.shard.factors.problem import Problem
from autopar.passes.shard.solve import Shortage, solve
from tests.passes.recompute.recomputed import llama_on

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
RULES = RuleBook()
ADAM = Setting(optimizer=OptimizerState(elements=2.0, element_bytes=4))


class Mixer(nn.Module):
    """Two products and what is pointwise between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(torch.tanh(self.up(x))) * x).mean()


CASES = [(1024, 1024, 8192, 4)]
MORE = [(4096, 4096, 256, 2), (512, 4096, 2048, 4), (2048, 8192, 512, 4), (2048, 2048, 64, 8)]


def mixed(case: tuple[int, int, int, int]) -> tuple[Program, JointSearch, Pricers, Mesh]:
    width, hidden, batch, devices = case
    cluster = autopar.ClusterSpec.homogeneous(devices=devices, device="a100", devices_per_node=devices)
    with torch.device("meta"):
        model, x = Mixer(width, hidden), torch.zeros(batch, width)
    program = autopar.compile(model, cluster, (x,), optimizer=ADAMW, options=autopar.Options(pp=1, recompute="none")).ir
    pricers, mesh = Pricers(cluster), Mesh.of(dp=devices)
    joint = JointSearch(program, lambda sets: Problem(program, pricers[mesh], RULES, ADAM, recompute=sets))
    return program, joint, pricers, mesh


def every_set(program: Program) -> Iterator[dict[str, tuple[str, ...]]]:
    values = [(name, v) for name, t in program.templates.items() for v in sorted(made_forward(t))]
    for size in range(len(values) + 1):
        for chosen in combinations(values, size):
            yield {name: tuple(v for n, v in chosen if n == name) for name in program.templates}


def budgets(joint: JointSearch, shares: tuple[float, ...] = (0.95, 0.8, 0.6, 0.4, 0.2)) -> list[float]:
    least, most = joint.smallest().nbytes, joint.fastest.nbytes
    return [least + share * (most - least) for share in shares]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(c, marks=pytest.mark.slow) for c in MORE)], ids=str)
def test_on_small_programs_it_is_the_best_of_all_shardings_and_all_sets(case: tuple[int, int, int, int]) -> None:
    program, joint, _, _ = mixed(case)
    graphs = [joint.build(sets).graph for sets in every_set(program)]
    for budget in budgets(joint, (0.3,) if case in CASES else (0.8, 0.3)):
        answers = [solve(graph, budget, close=1e-7) for graph in graphs]
        best = min(a.cost for a in answers if not isinstance(a, Shortage))
        found = joint.within(budget, close=1e-6)
        assert isinstance(found, Point)
        assert found.nbytes <= budget
        assert best * (1 - 1e-6) <= found.seconds <= best * 1.01, f"{found.seconds / best - 1:.2%} from the best"


def test_a_sharding_between_the_points_of_the_hull_is_found() -> None:
    _, joint, _, _ = mixed((512, 4096, 2048, 4))
    graph = joint.build({}).graph
    (budget,) = budgets(joint, (0.9,))
    best = solve(graph, budget, close=1e-7)
    assert not isinstance(best, Shortage)
    above = [p for p in (joint.fastest, joint.smallest()) if p.nbytes <= budget]
    assert best.cost < 0.99 * min(p.seconds for p in above), "it is none of these"
    found = joint.within(budget)
    assert isinstance(found, Point)
    assert found.seconds <= best.cost * (1 + 1e-6)


def test_a_point_is_what_its_plan_costs() -> None:
    _, joint, _, _ = mixed(CASES[0])
    for budget in budgets(joint):
        found = joint.within(budget)
        assert isinstance(found, Point)
        again = joint.build(found.problem.recompute).graph
        assert again.value(list(found.choice)) == pytest.approx(found.seconds, rel=1e-12)
        assert again.memory_of(list(found.choice)) == pytest.approx(found.nbytes, rel=1e-12)


def llama_joint(policy: str | None = None) -> tuple[Program, JointSearch]:
    program = llama_on(4, recompute="none", pp=1)
    pricers, mesh = Pricers(program.cluster), Mesh.of(dp=4)
    build = lambda sets: Problem(program.ir, pricers[mesh], RULES, ADAM, recompute=sets)  # noqa: E731
    return program.ir, JointSearch(program.ir, build, fixed=policy)


@pytest.mark.slow
def test_a_transformer_is_no_slower_than_under_any_policy_at_any_budget() -> None:
    _, joint = llama_joint()
    fixed = {name: llama_joint(name)[1] for name in ("none", "selective", "full")}
    won = 0
    for budget in budgets(joint, (0.9, 0.7, 0.5, 0.3, 0.1)):
        found = joint.within(budget)
        others = [p for p in (f.within(budget) for f in fixed.values()) if isinstance(p, Point)]
        assert isinstance(found, Point)
        assert found.seconds <= min((p.seconds for p in others), default=float("inf")) * (1 + 5e-3)
        won += all(found.seconds < p.seconds * 0.99 for p in others)
    assert won >= 2


def test_a_budget_that_is_asked_for_again_is_answered_without_solving(monkeypatch: pytest.MonkeyPatch) -> None:
    _, joint, _, _ = mixed(CASES[0])
    first, second, _, _, _ = budgets(joint)
    points = []
    for budget in (first, second):
        joint.forget_budgets()
        points.append(joint.within(budget))
    monkeypatch.setattr(joint_module, "priced", None)
    joint.forget_budgets()
    assert joint.within(first) == points[0], "and what it gets does not depend on the budget in between"


@pytest.mark.slow
def test_one_after_the_other_is_worse_however_well_each_is_done() -> None:
    """The fastest sharding, then the least that it must make again (an exact budget); and what a policy makes again, then
    the best sharding: both are slower than choosing together, by more than a percent at some budget."""
    program, joint = llama_joint()
    full = llama_joint("full")[1]
    graphs = joint.graphs(joint.fastest)
    chosen = {name: of_values(g, ()).bytes_kept for name, g in graphs.items()}
    block = max(graphs, key=lambda n: chosen[n] * program.multiplicity[n])
    gains = []
    for budget in budgets(joint, (0.6, 0.4, 0.25, 0.15)):
        found = joint.within(budget)
        assert isinstance(found, Point)
        room = chosen[block] - (joint.fastest.nbytes - budget) / program.multiplicity[block]
        first = within(graphs[block], room)
        sharded_first = joint.fastest.seconds + first.again_s * program.multiplicity[block] if first else float("inf")
        second = full.within(budget)
        set_first = second.seconds if isinstance(second, Point) else float("inf")
        gains.append(min(sharded_first, set_first) / found.seconds - 1)
    assert min(gains) >= -5e-3
    assert max(gains) > 0.01


@pytest.mark.few(1)
@pytest.mark.parametrize(("bandwidth_Bps", "again"), [(1e13, False), (1e7, True)])
def test_what_would_go_to_a_slow_tier_is_rather_made_again(bandwidth_Bps: float, again: bool) -> None:
    program = llama_on(4, recompute="none", pp=1)
    cluster = program.cluster.with_tiers(Tier("ddr", 1e12, bandwidth_Bps, 1e-6))
    pricer, setting = Pricers(cluster)[Mesh.of(dp=4)], replace(ADAM, offload=frozenset({"activations"}))
    joint = JointSearch(program.ir, lambda sets: Problem(program.ir, pricer, RULES, setting, recompute=sets))
    found = joint.alternate(0.0, joint.fastest)
    sets = found.problem.recompute
    again_s = sum(of_values(graph, sets.get(name, ())).again_s for name, graph in joint.graphs(found).items())
    assert (again_s > 0) == again
    assert found.seconds <= joint.fastest.seconds


def test_budgets_that_are_too_small_make_no_points_of_policies_and_change_no_answer() -> None:
    _, asked, _, _ = mixed(CASES[0])
    _, fresh, _, _ = mixed(CASES[0])
    assert isinstance(asked.within(0.0), Shortage)
    assert len(asked.points) == 2, "the fastest and the smallest"
    enough = budgets(fresh, (0.5,))[0]
    found, again = asked.within(enough), fresh.within(enough)
    assert isinstance(found, Point)
    assert isinstance(again, Point)
    assert (found.choice, found.seconds, found.nbytes) == (again.choice, again.seconds, again.nbytes)
    assert {tuple(p.choice) for p in asked.points} == {tuple(p.choice) for p in fresh.points}
