"""The seconds of a step by what they are spent on, from the reading of its bill: parts that add up to the step.

A rank computes, waits for messages that nothing hides and for memory tiers, and is idle until its schedule goes on; then
gradients are reduced and parameters updated. The busiest group of ranks is told of until the actions end, and the one that takes
longest from then on.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from autopar.costmodel.bill import group_seconds
from autopar.passes.account.program import Account
from autopar.runtime.data.fields import Seconds


@dataclass(frozen=True)
class Spent:
    """Seconds of a step by what they are spent on. messages_s: of layers, not hidden; tiers_s: waiting for memory tiers while
    actions run; idle_s: the schedule's bubble, with sends between stages; gradients_s: messages for parameters that nothing
    hides; update_s: the optimizer; rest_s: what else comes once; overhead_s: of a step whatever it does."""

    computed_s: Seconds
    messages_s: Seconds
    tiers_s: Seconds
    idle_s: Seconds
    gradients_s: Seconds
    update_s: Seconds
    rest_s: Seconds
    overhead_s: Seconds

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return float(sum(getattr(self, part.name) for part in fields(self)))


def spent(account: Account) -> Spent:
    """The parts of an account's step."""
    step, m = account.step, account.microbatches
    busy_s = [m * seconds for seconds in group_seconds(step.seconds, account.graph.groups)]
    group = max(range(len(busy_s)), key=busy_s.__getitem__)
    messages_s = m * sum(step.non_overlapped_s[group].values())
    tiers_s = m * sum(sum(account.stages[s].bill.waits_s.values()) for s in account.graph.groups[group])
    return Spent(
        busy_s[group] - messages_s - tiers_s,
        messages_s,
        tiers_s,
        max(step.span_s - busy_s[group], 0.0),
        step.parameters_s,
        step.optimizer_s,
        step.rest_s,
        max(step.overhead_s, 0.0),
    )
