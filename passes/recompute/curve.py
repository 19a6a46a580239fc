"""What keeping less for backward would cost: the curve of a plan's recompute from bytes kept to seconds made again.

Per template the corners of its curve are exact (`passes.recompute.choose.hull`); one price per byte cuts the curves of all
templates of a stage, so the stage's curve takes their corners in order of price. Named policies are points beside it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from autopar.ir.memory_levers import RECOMPUTE_POLICIES
from autopar.ir.program import Program
from autopar.passes.lower.cut import cut
from autopar.passes.price.pricer import Pricers
from autopar.passes.recompute.choose import Choice, hull, of_values
from autopar.passes.recompute.problem import RecomputeProblem, recompute_problems
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.policies import policy_set
from autopar.plan import Plan

Place = tuple[float, float]
"""(bytes that one microbatch keeps on a rank, seconds that backward spends making values again in a step)"""


@dataclass(frozen=True)
class Curve:
    """corners: from most bytes to fewest. policies: what a named policy is on this sharding. chosen: the plan's own."""

    corners: tuple[Place, ...]
    policies: dict[str, Place]
    chosen: Place


def curves(program: Program, plan: Plan, pricers: Pricers, rules: RuleBook) -> list[Curve]:
    """One per stage of a plan for training."""
    found: list[Curve] = []
    known: dict[Any, tuple[RecomputeProblem, list[Choice]]] = {}
    for part, stage in zip(cut(program, [s.calls for s in plan.stages]), plan.stages, strict=True):
        times = {n: sum(part.calls[i].template == n for i in part.backward_calls) for n in part.templates}
        parts: dict[str, tuple[RecomputeProblem, list[Choice]]] = {}
        for name, problem in recompute_problems(part, stage, pricers[stage.mesh], rules).items():
            if problem not in known:
                known[problem] = problem, hull(problem)
            parts[name] = known[problem]

        def place(chosen: dict[str, Choice], times: dict[str, int] = times) -> Place:
            kept = sum(times[n] * c.bytes_kept for n, c in chosen.items())
            return kept, plan.microbatches * sum(times[n] * c.again_s for n, c in chosen.items())

        now = {n: corners[0] for n, (_, corners) in parts.items()}
        moves = sorted(
            ((b.again_s - a.again_s) / (a.bytes_kept - b.bytes_kept), k, n)
            for n, (_, corners) in parts.items()
            for k, (a, b) in enumerate(pairwise(corners), 1)
        )
        corners = [place(now)]
        for _, k, n in moves:
            now = {**now, n: parts[n][1][k]}
            corners.append(place(now))
        policies = {
            policy: place({n: of_values(p, policy_set(part.templates[n], policy)) for n, (p, _) in parts.items()})
            for policy in RECOMPUTE_POLICIES
        }
        chosen = place({n: of_values(p, stage.templates[n].recompute) for n, (p, _) in parts.items()})
        found.append(Curve(tuple(corners), policies, chosen))
    return found


def as_data(found: list[Curve]) -> list[dict[str, Any]]:
    """Plain data for JSON."""
    return [asdict(curve) for curve in found]
