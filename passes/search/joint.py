"""Sharding and recompute chosen together: the fewest seconds within so many bytes on one mesh.

At a price per byte both choices are one problem: minimise seconds + price · bytes over strategies, specs, storage and the
sets of values that backward makes again. Either half is solved exactly while the other is held: the sharding as a factor
graph in which what runs again is paid twice and only what is kept counts (`autopar.passes.shard`), the sets by one
minimum cut per template (`choose.at_price`). Taking turns never raises the sum; it ends where neither half alone can
improve, so it is started from several sets. The price that a budget means is found by walking down the hull of (bytes,
seconds): the price at which the points on both sides of the budget cost the same shows a point between them, or that
there is none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import InfeasibleError
from autopar.ir.memory_levers import RECOMPUTE_POLICIES
from autopar.ir.program import Program
from autopar.passes.recompute.choose import at_byte_price, of_values, within
from autopar.passes.recompute.problem import RecomputeProblem, recompute_problems
from autopar.passes.rules.policies import policy_set
from autopar.passes.shard.plans import stage_plan
from autopar.passes.shard.problem import Problem
from autopar.passes.shard.solve import Shortage, priced
from autopar.plan import StagePlan

Sets = Mapping[str, tuple[str, ...]]
_Key = tuple[tuple[str, tuple[str, ...]], ...]
_ROUNDS = 4
_STEPS = 12
_CLOSE = 1e-4  # relative distance to a bound at which a sharding at a price will do


@dataclass(frozen=True)
class Point:
    """A sharding with sets of values made again: seconds of a step, bytes that rest and that backward waits for."""

    problem: Problem
    choice: tuple[int, ...]
    seconds: float
    nbytes: float

    def value(self, price: float) -> float:
        """Seconds with bytes at a price."""
        return self.seconds + price * self.nbytes

    @cached_property
    def plan(self) -> StagePlan:
        """As a stage of all calls."""
        return stage_plan(self.problem, list(self.choice), (0, len(self.problem.program.calls)))


class Joint:
    """One program on one mesh. build: the factor graph under sets of values made again (same variables for all sets).

    fixed: a policy that is not to be departed from (then only the sharding is chosen). price: the last that was looked at.
    """

    def __init__(
        self,
        program: Program,
        build: Callable[[Sets], Problem],
        time_limit_s: float = 60.0,
        tie_price: float = 0.0,
        fixed: str | None = None,
    ) -> None:
        self.program, self.build = program, build
        self.price = 0.0
        self.fixed = fixed
        self.time_limit_s = time_limit_s
        self.tie_price = tie_price
        self.problems: dict[_Key, Problem] = {}
        self.points: list[Point] = []
        self._ends: list[Point] = []

    @property
    def free(self) -> Point:
        """Where memory is no matter: no plan of the mesh is faster."""
        if not self.points:
            self.points.append(self._solved(self.tie_price, self.policy(self.fixed or "none")))
        return self.points[0]

    def least(self) -> Point:
        """The point with about the fewest bytes; it is looked for once."""
        if not self._ends:
            self._ends = self._small()
            self.points += self._ends
        return self.smallest

    @property
    def smallest(self) -> Point:
        """The point with the fewest bytes that was found."""
        return min(self.points, key=lambda p: p.nbytes)

    def bound_s(self, price: float, budget: float) -> float:
        """About the fewest seconds within so many bytes, by what they cost at a price."""
        found = self.turns(price, self.free)
        self.points += [found] if found is not self.free else []
        return found.value(price) - price * budget

    def within(self, budget: float, close: float = 0.005, worth: float = math.inf) -> Point | Shortage:
        """The fastest point that was found within so many bytes. close: seconds more than the hull, relative, that will do.
        worth: from so many seconds on no point is of interest."""
        if self.free.nbytes <= budget:
            return self.free
        if self.least().nbytes > budget:
            return Shortage(self.smallest.nbytes, self.smallest.choice)
        deadline = time.monotonic() + self.time_limit_s
        over = min((p for p in self.points if p.nbytes > budget), key=lambda p: p.nbytes)
        under = self._fastest(budget)
        for _ in range(_STEPS):
            span, rise = over.nbytes - under.nbytes, under.seconds - over.seconds
            if span <= 0 or rise <= close * under.seconds or time.monotonic() > deadline:
                break
            self.price = price = rise / span
            level = over.value(price) * (1 - 1e-4)
            found = self._better(price, [under, over], level)
            if found is None:
                break
            over, under = (over, found) if found.nbytes <= budget else (found, under)
            bound = found.value(price) - price * budget
            if self._fastest(budget).seconds - bound <= close * bound or bound >= worth:
                break
        fastest = self._fastest(budget)
        return fastest if self.fixed is not None else self._filled(fastest, budget)

    def cheapest(self, point: Point, price: float) -> dict[str, tuple[str, ...]]:
        """The sets that are best for a sharding at a price."""
        held_s = point.problem.held_s(price)
        return {name: at_byte_price(p, held_s).recompute for name, p in self.graphs(point).items()}

    def graphs(self, point: Point) -> dict[str, RecomputeProblem]:
        """Per template that has a backward what keeping and making again cost there."""
        problem = point.problem
        return recompute_problems(problem.program, point.plan, problem.pricer, problem.rules)

    def policy(self, name: str) -> dict[str, tuple[str, ...]]:
        """The sets of a named policy."""
        return {} if name == "none" else {t.name: policy_set(t, name) for t in self.program.templates.values()}

    def turns(self, price: float, start: Point) -> Point:
        """Taking turns at a price, from a point."""
        best, sets = start, start.problem.recompute
        for turn in range(_ROUNDS):
            again = self.cheapest(best, price) if self.fixed is None else sets
            if turn and _key(again) == _key(sets):
                break
            sets = again
            found = self._solved(price, sets)
            if found.value(price) >= best.value(price) * (1 - 1e-6):
                break
            best = found
        return best

    def _better(self, price: float, starts: list[Point], level: float) -> Point | None:
        """An end of taking turns that costs less than the level at this price."""
        for start in starts:
            found = self.turns(price, start)
            if found.value(price) < level:
                self.points.append(found)
                return found
        return None

    def _small(self) -> list[Point]:
        """With about the fewest bytes, and with those of the named policies at a like price."""
        price = 1e3 * self.free.seconds / max(self.free.nbytes, 1.0)
        if self.fixed is not None:
            return [self._solved(price, self.policy(self.fixed))]
        found = [self.turns(price, self._solved(price, self.policy("full")))]
        price = (found[0].seconds - self.free.seconds) / max(self.free.nbytes - found[0].nbytes, 1.0)
        tried = (name for name, policy in RECOMPUTE_POLICIES.items() if policy.tried)
        return [*found, *(self._solved(max(price, 0.0), self.policy(name)) for name in tried)]

    def _filled(self, point: Point, budget: float) -> Point:
        """The same sharding with less made again, where the hull leaves room: the largest template has a budget of its own."""
        spare = budget - point.nbytes
        graphs, program, setting = self.graphs(point), point.problem.program, point.problem.setting
        chosen = {name: of_values(g, point.problem.recompute.get(name, ())) for name, g in graphs.items()}
        times = {name: program.multiplicity[name] * setting.in_flight for name in graphs}
        name = max(chosen, key=lambda n: chosen[n].again_s * program.multiplicity[n], default=None)
        if name is None or spare < 0.01 * budget or not chosen[name].again:
            return point
        found = within(graphs[name], chosen[name].bytes_kept + spare / times[name], 2.0)
        if found is None or found.again_s >= chosen[name].again_s:
            return point
        problem = self.build({**point.problem.recompute, name: found.recompute})
        choice = list(point.choice)
        filled = Point(problem, point.choice, problem.graph.value(choice), problem.graph.memory_of(choice))
        if filled.nbytes > budget or filled.seconds >= point.seconds:
            return point
        self.points.append(filled)
        return filled

    def _fastest(self, budget: float) -> Point:
        return min((p for p in self.points if p.nbytes <= budget), key=lambda p: (p.seconds, p.nbytes))

    def _solved(self, price: float, sets: Sets) -> Point:
        """The sharding that is best for these sets at a price."""
        key = _key(sets)
        if key not in self.problems:
            self.problems[key] = self.build(sets)
        problem = self.problems[key]
        choice, _, _ = priced(problem.graph, price, time.monotonic() + self.time_limit_s, _CLOSE)
        if choice is None:
            raise InfeasibleError("the sharding of a mesh was not found in time; raise Options.solver_time_limit_s")
        return Point(problem, tuple(choice), problem.graph.value(choice), problem.graph.memory_of(choice))


def _key(sets: Sets) -> _Key:
    return tuple(sorted((name, tuple(sorted(values))) for name, values in sets.items() if values))
