"""The door from a compiled program: what a plan of it would cost.

The program prices the plan with the same op, collective and memory formulas that `estimate` uses; this module only
asks it, so that the cost model never touches a graph.
"""

from __future__ import annotations

from typing import Any, Protocol


class Predictable(Protocol):
    """A compiled program: it can take another plan, and says what it expects of its own."""

    plan: Any
    predicted: Any

    def with_plan(self, plan: Any) -> Predictable: ...


def predict(program: Predictable, plan: Any = None) -> Any:
    """`step_time_s`, `peak_bytes` and `comm_time_s` per rank of `program` under `plan` (default: its own plan).

    Raises PlanError when the plan is for another model or names choices that do not exist.
    """
    return (program if plan is None or plan == program.plan else program.with_plan(plan)).predicted
