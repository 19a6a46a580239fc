"""Plans whose gradients are reduced after every microbatch, beside those whose are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar.options import Options
from autopar.passes.account.program import under
from autopar.passes.schedule import build
from autopar.passes.search.by_microbatch import reduced_by_microbatch
from autopar.passes.search.stages.schedule_choice import OutlinedPlan
from autopar.passes.search.task import Task
from tests.zoo.pipelined import on_ranks


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
