"""`PricedPlan`: a plan with what is known of its cost so far."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.lowered import LoweredProgram
from autopar.passes.account.program import Account
from autopar.passes.shard.solve import Solution
from autopar.plan import Plan


@dataclass(frozen=True)
class PricedPlan:
    """A plan with what the solver said of it, a sum of parts (`solution`), and what the step comes to as far as it is known:
    before it is lowered the bound that its plan predicts, then its account.

    left_out: kinds of plans that were not looked at, or not all of them, where the search was ended before. placed_by: how the
    order of ranks on the cluster was found, empty where it was not looked for; placement_gap: how far above the least its
    traffic's cost can be, relative to that.
    """

    plan: Plan
    solution: Solution
    lowered: LoweredProgram | None = None
    account: Account | None = None
    left_out: tuple[str, ...] = ()
    placed_by: str = ""
    placement_gap: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step: the reading of its bill (`autopar.costmodel.bill`), or a bound on it."""
        return self.plan.predicted["step_time_s"] if self.account is None else self.account.step_time_s
