"""A plan that the user gives, checked and priced instead of searched for."""

from __future__ import annotations

from dataclasses import replace

from autopar.cluster import ClusterSpec
from autopar.errors import PlanError
from autopar.passes.search.task import Task
from autopar.passes.shard.evaluate import evaluate
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.plan import Plan, check_plan


def replayed(task: Task, plan: Plan, cluster: ClusterSpec) -> PricedPlan:
    """The plan as a candidate. cluster: that it is for, whose first ranks it takes, or all of them. Raises PlanError when it is
    for another model, cluster or batch."""
    if plan.ranks > cluster.size or (plan.ranks < cluster.size and plan.cluster != cluster.fingerprint()):
        raise PlanError(
            f"this plan is for {plan.ranks} ranks, the cluster has {cluster.size}; compile again without plan="
        )
    if plan.cluster != cluster.fingerprint():
        raise PlanError(
            f"this plan is for another cluster (plan {plan.cluster}, given {cluster.fingerprint()}): devices or links differ; "
            f"compile again without plan=, or, to run it here all the same, write {cluster.fingerprint()!r} as the plan's cluster"
        )
    if plan.program != task.program.fingerprint:
        raise PlanError(
            f"this plan is for another model (plan {plan.program}, model {task.program.fingerprint}): the model, its shapes or "
            "the example inputs changed; compile again without plan="
        )
    check_plan(plan, task.program)
    solution = evaluate(task.program, plan, task.pricers, task.rules, task.setting)
    return PricedPlan(replace(plan, predicted={"step_time_s": task.pricers.least_step_s(solution.cost)}), solution)
