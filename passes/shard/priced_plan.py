"""`PricedPlan`: a plan with what is known of its cost so far."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.lowered import LoweredProgram
from autopar.passes.account.program import Account
from autopar.passes.shard.solve import Solution
from autopar.plan import Plan


@dataclass(frozen=True)
class PricedPlan:
    """A plan with what the solver said of it; `lowered` and `account` where it was lowered already, to see its peak.

    left_out: kinds of plans that were not looked at, or not all of them, where the search was ended before.
    """

    plan: Plan
    solution: Solution
    lowered: LoweredProgram | None = None
    account: Account | None = None
    left_out: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        """Seconds of a step; once lowered with the transfers to memory tiers that it really waits for."""
        if self.account is not None and len(self.plan.stages) == 1 and self.account.stages[0].moves:
            return self.account.step_time_s
        return self.solution.cost
