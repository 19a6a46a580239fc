"""Sharding and recompute chosen together: the fewest seconds within so many bytes on one mesh.

At a price per byte both choices are one problem: minimise seconds + price · bytes over strategies, specs, storage and the
sets of values that backward computes again. Each half is solved exactly while the other is held: the sharding as a factor
graph in which ops that run again are paid twice and only values that are kept take bytes (`autopar.passes.shard`), the sets
by one minimum cut per template (`autopar.passes.recompute.choose.at_byte_price`). Alternating between the halves never
raises the sum; it ends where neither half alone can improve, so it is started from several points.

A budget of bytes is met by walking down the lower hull of (bytes, seconds), as in Lagrangian relaxation: take one point
over the budget and one under it, and the price at which both cost the same; alternating at that price finds a point below
the line through them, which replaces one of the two, or shows that there is none. What the hull leaves open is filled with
fewer values that run again, and with the best sharding within the budget (`by_row`), unless estimates are asked for.
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
from autopar.passes.shard.factors.problem import Problem
from autopar.passes.shard.plans import stage_plan
from autopar.passes.shard.solve import ROUGH, Shortage, by_row, priced
from autopar.plan import StagePlan

Sets = Mapping[str, tuple[str, ...]]
"""Per template the values that backward computes again."""
_Key = tuple[tuple[str, tuple[str, ...]], ...]
_ROUNDS = 4
"""Times that both halves are solved in turn at one price."""
_SMALL_ROW = 2_000
"""Variables up to which a MIP with memory as a row ends in a tenth of a second. Above, it takes seconds for one of many budgets,
and what it finds by then depends on the clock."""
_STEPS = 12
"""Prices that are tried for one budget."""
CLOSE = 1e-4
"""Relative distance to its bound at which a sharding at a price is good enough, unless a search says otherwise."""
_HULL_GAP = 0.005
"""Relative distance in seconds to the hull at which a point within a budget is good enough."""


@dataclass(frozen=True)
class Point:
    """A sharding with sets of recomputed values: seconds of a step, bytes that rest and that backward waits for."""

    problem: Problem
    choice: tuple[int, ...]
    seconds: float
    nbytes: float

    def value(self, price: float) -> float:
        """Seconds, with every byte at a price in seconds."""
        return self.seconds + price * self.nbytes

    @cached_property
    def plan(self) -> StagePlan:
        """The choices of this point, as the plan of one stage of all calls."""
        return stage_plan(self.problem, list(self.choice), (0, len(self.problem.program.calls)))


class JointSearch:
    """One program on one mesh; every point that is found is kept, as later budgets start from it.

    build: the factor graph under sets of recomputed values, asked once. tie_price: a price per byte that decides between plans
    that are equally fast. fixed: a recompute policy by name that is not to be departed from; then only the sharding is
    chosen. close: relative distance to its bound at which a sharding at a price is good enough. price: the price per byte that
    was looked at last.
    """

    def __init__(
        self,
        program: Program,
        build: Callable[[Sets], Problem],
        time_limit_s: float = 60.0,
        tie_price: float = 0.0,
        fixed: str | None = None,
        close: float = CLOSE,
    ) -> None:
        self.program, self.build = program, build
        self.price = 0.0
        self.fixed = fixed
        self.close = close
        self.time_limit_s = time_limit_s
        self.tie_price = tie_price
        self.problems: dict[_Key, Problem] = {}
        self.points: list[Point] = []
        self._sharded_at: dict[tuple[float, _Key, tuple[int, ...] | None], Point] = {}
        self._small: Point | None = None
        self._looked_for_named = False
        self._from_the_start = 1

    @property
    def fastest(self) -> Point:
        """The point where memory is no matter: no plan of the mesh is faster."""
        if not self.points:
            self.points.append(self._sharded(self.tie_price, self.policy(self.fixed or "none")))
        return self.points[0]

    def smallest(self) -> Point:
        """The point with about the fewest bytes, which is looked for once."""
        if self._small is None:
            self._small = self._small_point()
            self.points.append(self._small)
            self._from_the_start = len(self.points)
        return self.smallest_so_far

    def forget_budgets(self) -> None:
        """Leave out the points that budgets led to, so that what the next one gets does not depend on those before it."""
        del self.points[self._from_the_start :]

    @property
    def smallest_so_far(self) -> Point:
        """The point with the fewest bytes of those that were found."""
        return min(self.points, key=lambda point: point.nbytes)

    def bound_s(self, price: float, budget: float) -> float:
        """A lower bound, about, of the seconds within so many bytes, by what they cost at a price."""
        point = self.alternate(price, self.fastest)
        self.points += [point] if point is not self.fastest else []
        return point.value(price) - price * budget

    def hull_bound_s(self, budget: float, useless_from_s: float) -> float:
        """The same by the hull near the budget, which is walked until so many seconds are of no interest; 0 where no point is
        within the budget."""
        if self.fastest.nbytes <= budget:
            return self.fastest.seconds
        return self._walk_hull(budget, _HULL_GAP, useless_from_s) if self.smallest().nbytes <= budget else 0.0

    def hull_price(self) -> float:
        """Seconds per byte on the way from the fastest point to the smallest."""
        small, fastest = self._small or self.smallest(), self.fastest
        return max((small.seconds - fastest.seconds) / max(fastest.nbytes - small.nbytes, 1.0), 0.0)

    @property
    def price_paid(self) -> float:
        """Seconds per byte at the price that was looked at last; where none was, on the way to the smallest point, if that was
        looked for (else 0: bytes were no matter)."""
        return self.price or (self.hull_price() if self._small is not None else 0.0)

    def within(self, budget: float, close: float = _HULL_GAP, useless_from_s: float = math.inf) -> Point | Shortage:
        """The fastest point that was found within so many bytes.

        close: relative distance in seconds to the hull that is good enough. useless_from_s: a point that takes so many
        seconds or more is of no interest.
        """
        if self.fastest.nbytes <= budget:
            return self.fastest
        if self.smallest().nbytes > budget:
            return Shortage(self.smallest_so_far.nbytes, self.smallest_so_far.choice)
        if not self._looked_for_named and self.fixed is None:
            self.points += self._named_points(self._small or self.smallest())
            self._looked_for_named, self._from_the_start = True, len(self.points)
        bound_s = self._walk_hull(budget, close, useless_from_s)
        point = self._fastest_within(budget)
        point = point if self.fixed is not None else self._filled_up(point, budget)
        is_close = point.seconds - bound_s <= max(close, self.close) * bound_s or bound_s >= useless_from_s
        return point if is_close or self.close >= ROUGH else self._above_hull(point, budget)

    def _walk_hull(self, budget: float, close: float, useless_from_s: float) -> float:
        """Add points of the hull near the budget, where there is one on either side of it; about a lower bound of the seconds
        within the budget."""
        deadline = time.monotonic() + self.time_limit_s
        over = min((p for p in self.points if p.nbytes > budget), key=lambda p: p.nbytes)
        under = self._fastest_within(budget)
        for _ in range(_STEPS):
            span, rise = over.nbytes - under.nbytes, under.seconds - over.seconds
            if span <= 0 or rise <= close * under.seconds or time.monotonic() > deadline:
                return under.seconds
            self.price = price = rise / span
            between = self._point_below(price, [under, over], over.value(price) * (1 - 1e-4))
            if between is None:
                return under.value(price) - price * budget
            over, under = (over, between) if between.nbytes <= budget else (between, under)
            bound_s = between.value(price) - price * budget
            if self._fastest_within(budget).seconds - bound_s <= close * bound_s or bound_s >= useless_from_s:
                return bound_s
        return bound_s

    def best_sets(self, point: Point, price: float) -> dict[str, tuple[str, ...]]:
        """The sets of recomputed values that are best for a point's sharding at a price."""
        held_s = point.problem.held_s(price)
        return {name: at_byte_price(p, held_s).recompute for name, p in self.graphs(point).items()}

    def graphs(self, point: Point) -> dict[str, RecomputeProblem]:
        """Per template that has a backward what keeping values and computing them again cost there."""
        problem = point.problem
        return recompute_problems(problem.program, point.plan, problem.pricer, problem.rules)

    def policy(self, name: str) -> dict[str, tuple[str, ...]]:
        """The sets of a named policy."""
        return {} if name == "none" else {t.name: policy_set(t, name) for t in self.program.templates.values()}

    def alternate(self, price: float, start: Point) -> Point:
        """The best point of solving the sets and the sharding in turn at a price, starting with a point's sharding."""
        best, sets = start, start.problem.recompute
        for turn in range(_ROUNDS):
            new_sets = self.best_sets(best, price) if self.fixed is None else sets
            if turn and _key(new_sets) == _key(sets):
                break
            sets = new_sets
            point = self._sharded(price, sets, best)
            if point.value(price) >= best.value(price) * (1 - 1e-6):
                break
            best = point
        return best

    def _point_below(self, price: float, starts: list[Point], value: float) -> Point | None:
        """A point that alternating finds from one of these starts and that costs less than this value at this price."""
        for start in starts:
            point = self.alternate(price, start)
            if point.value(price) < value:
                self.points.append(point)
                return point
        return None

    def _small_point(self) -> Point:
        """A point with about the fewest bytes."""
        price = 1e3 * self.fastest.seconds / max(self.fastest.nbytes, 1.0)
        if self.fixed is not None:
            return self._sharded(price, self.policy(self.fixed), self.fastest)
        return self.alternate(price, self._sharded(price, self.policy("full"), self.fastest))

    def _named_points(self, small: Point) -> list[Point]:
        """Points of the named policies at the price that the smallest one means, from which hulls are walked: a mesh whose
        smallest point does not fit needs none."""
        price = self.hull_price()
        tried = [policy.name for policy in RECOMPUTE_POLICIES.values() if policy.tried]
        return [self._sharded(price, self.policy(name), small) for name in tried]

    def _filled_up(self, point: Point, budget: float) -> Point:
        """The same sharding with fewer values recomputed, where the hull leaves room: the template that recomputes most gets
        a budget of its own, which is solved exactly."""
        spare = budget - point.nbytes
        graphs, program, setting = self.graphs(point), point.problem.program, point.problem.setting
        chosen = {name: of_values(g, point.problem.recompute.get(name, ())) for name, g in graphs.items()}
        name = max(chosen, key=lambda n: chosen[n].again_s * program.multiplicity[n], default=None)
        if name is None or spare < 0.01 * budget or not chosen[name].again:
            return point
        copies_held = program.multiplicity[name] * setting.in_flight
        choice = within(graphs[name], chosen[name].bytes_kept + spare / copies_held, 2.0)
        if choice is None or choice.again_s >= chosen[name].again_s:
            return point
        problem = self._problem({**point.problem.recompute, name: choice.recompute})
        states = list(point.choice)
        filled = Point(problem, point.choice, problem.graph.value(states), problem.graph.memory_of(states))
        if filled.nbytes > budget or filled.seconds >= point.seconds:
            return point
        self.points.append(filled)
        return filled

    def _above_hull(self, point: Point, budget: float) -> Point:
        """The fastest sharding with the values that a point computes again, where that is none of the hull's."""
        graph = point.problem.graph
        deadline = time.monotonic() + self.time_limit_s
        choice, _, _ = by_row(graph, budget, self.price, point.choice, deadline, _SMALL_ROW)
        if tuple(choice) == point.choice:
            return point
        self.points.append(Point(point.problem, tuple(choice), graph.value(choice), graph.memory_of(choice)))
        return self.points[-1]

    def _fastest_within(self, budget: float) -> Point:
        return min((p for p in self.points if p.nbytes <= budget), key=lambda p: (p.seconds, p.nbytes))

    def _sharded(self, price: float, sets: Sets, near: Point | None = None) -> Point:
        """The sharding that is best for these sets at a price, found once: budgets start their walks at the same points, so
        they ask alike. near: a point whose sharding may be as good. Raises InfeasibleError where none is found in time."""
        key, known = _key(sets), near.choice if near is not None else None
        if (price, key, known) in self._sharded_at:
            return self._sharded_at[price, key, known]
        problem = self._problem(sets)
        choice, _, _ = priced(problem.graph, price, time.monotonic() + self.time_limit_s, self.close, known)
        if choice is None:
            raise InfeasibleError("the sharding of a mesh was not found in time; raise Options.solver_time_limit_s")
        point = Point(problem, tuple(choice), problem.graph.value(choice), problem.graph.memory_of(choice))
        self._sharded_at[price, key, known] = point
        return point

    def _problem(self, sets: Sets) -> Problem:
        """The factor graph under these sets, which is built once, for the first of them."""
        key = _key(sets)
        if key not in self.problems:
            first = next(iter(self.problems.values()), None)
            self.problems[key] = self.build(sets) if first is None else first.recomputing(sets)
        return self.problems[key]


def _key(sets: Sets) -> _Key:
    return tuple(sorted((name, tuple(sorted(values))) for name, values in sets.items() if values))
