"""Plans whose gradients are reduced after every microbatch, beside those whose are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar.options import Options
from autopar.passes.account.program import Account, under
from autopar.passes.schedule import build
from autopar.passes.search.by_microbatch import finished, reduced_by_microbatch
from autopar.passes.search.stages.schedule_choice import OutlinedPlan
from autopar.passes.search.task import Task, account_of
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.passes.shard.solve import Solution
from autopar.plan import Plan
from tests.zoo.pipelined import on_ranks


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(3))
def test_a_draft_lowered_once_costs_what_it_costs_lowered_anew(seed: int) -> None:
    """Random stages with gradients that are reduced by microbatch have the seconds and bytes of these stages lowered so; they are
    not those of the stages whose gradients are reduced once."""
    base = on_ranks("llama", 4, 4)
    plan = autopar.random_plan(base, seed, pp=2, schedule="1f1b", pieces=1)
    setting = replace(base.setting, microbatches=plan.microbatches)
    task = Task(base.ir, base.cluster, base.rules, setting, Options(), None)  # type: ignore[arg-type]
    once = reduced_by_microbatch(plan, ())
    names = frozenset(base.ir.trained)
    outlined = OutlinedPlan.of(task, once)
    again, anew = outlined.reducing(task, names), OutlinedPlan.of(task, reduced_by_microbatch(plan, names))
    costs = []
    for one in (again, anew, outlined):
        assert one.apart is not None
        accounts = {"1f1b": one.together[1], "zb-h1": one.apart[1]}
        counted = [under(account, build(name, account.graph, plan.microbatches)) for name, account in accounts.items()]
        costs.append([(account.step_time_s, account.peaks, account.seconds) for account in counted])
    assert costs[0] == costs[1]
    assert again.plan == anew.plan
    lowered, _ = again.together
    if plan.microbatches > 1 and any(p.by_microbatch for stage in lowered.stages for p in stage.parameters.values()):
        assert costs[0] != costs[2]


@pytest.mark.parametrize(("share", "fits"), [(1.0, True), (0.99, False)])
def test_of_plans_that_do_not_fit_the_one_that_is_less_short_is_told(share: float, fits: bool) -> None:
    """share: the limit, of the peak with shards of all gradients."""
    base = on_ranks("mlp", 4, 4)
    plan = reduced_by_microbatch(autopar.random_plan(base, 2, pp=1, pieces=1), ())
    whole, reduced = (base.with_plan(reduced_by_microbatch(plan, names)) for names in ((), tuple(base.ir.trained)))
    least = reduced.account.peak_bytes
    assert least < 0.95 * whole.account.peak_bytes
    setting, options = replace(base.setting, microbatches=4), Options(memory_bytes=share * least)
    task = Task(base.ir, base.cluster, base.rules, setting, options, None)  # type: ignore[arg-type]
    found = finished(task, PricedPlan(plan, Solution((), 1.0, 0.0, 1.0, "", {}, {})))
    assert (task.short_bytes(found.plan, account_of(found)) <= 0) == fits
    assert account_of(found).peak_bytes <= least


def test_where_the_larger_half_is_enough_not_all_gradients_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit a little below the peak with whole gradients."""
    base = on_ranks("mlp", 4, 4)
    plan = reduced_by_microbatch(autopar.random_plan(base, 2, pp=1, pieces=1), ())
    whole, reduced = (base.with_plan(reduced_by_microbatch(plan, names)) for names in ((), tuple(base.ir.trained)))
    limit = 0.9 * whole.account.peak_bytes + 0.1 * reduced.account.peak_bytes
    setting, options = replace(base.setting, microbatches=4), Options(memory_bytes=limit)
    task = Task(base.ir, base.cluster, base.rules, setting, options, None)  # type: ignore[arg-type]
    played, short_bytes = list[int](), Task.short_bytes

    def counted(self: Task, one: Plan, account: Account) -> float:
        played.append(sum(p.by_microbatch for p in one.stages[0].parameters.values()))
        return short_bytes(self, one, account)

    monkeypatch.setattr(Task, "short_bytes", counted)
    found = finished(task, PricedPlan(plan, Solution((), 1.0, 0.0, 1.0, "", {}, {})))
    by_microbatch = sum(p.by_microbatch for p in found.plan.stages[0].parameters.values())
    assert 0 < by_microbatch < sum(p.by_microbatch for p in reduced.plan.stages[0].parameters.values())
    assert played[-1] == max(played) == by_microbatch
    assert task.limit < whole.account.peak_bytes
