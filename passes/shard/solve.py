"""Choose a state for every variable of a factor graph: eliminate, bound and prune, LP; memory by price, then by row.

1. Without the memory row, solve (`priced`). If the optimum fits the budget it is the answer.
2. Otherwise put a price on memory (Lagrange): each price is such a problem again, gives a lower bound and often a plan
   that fits; bisection finds the best price.
3. If bound and plan are still apart, the ILP with memory as a row settles it within the time limit, over the states that
   the bound leaves to plans that are better.

When time runs out before any answer, a greedy pass (largest op first, cheapest next to what is decided) is the
fallback; `Solution.method` says so. The gap reported is (cost - bound) / cost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.passes.shard import messages
from autopar.passes.shard.eliminate import eliminated, elimination_order
from autopar.passes.shard.factors.graph import FactorGraph
from autopar.passes.shard.ilp import Answer, solve_ilp
from autopar.passes.shard.messages import Bounds
from autopar.passes.shard.reduce import Reduced, copy_of, keep_states, reduce_graph, restore, shortened, start

_LARGEST = 500_000  # binary variables from which a problem is too large for the ILP
_LARGEST_ROW = 400_000  # the same with memory as a row
_LARGEST_NEAR = 5_000  # the same where messages leave an estimate as close as is asked
_CLOSED = 1e-6  # relative distance of bound and plan that counts as proven
ROUGH = 1e-3  # `close` from which on a solution is an estimate: no MIP, and no optimum where memory is no matter
_FREE = 0.1  # of `close`: how close an estimate is where memory is no matter
NARROW = 6  # variables per step of a sweep of messages up to which what a step takes is not what its numbers take
_PER_STEP = 200_000  # numbers in tables, as many as are eliminated while ten rounds of messages take a step
_PER_VARIABLE = 6_000  # the same while LP and MIP take a binary variable of theirs
_ROW_SHARE = 0.05  # of the time that is left: what a row for memory may take to better a plan by memory's price


@dataclass(frozen=True)
class Solution:
    """choice: state per variable. cost in the graph's unit (s), memory in bytes; gap relative to a proven bound."""

    choice: tuple[int, ...]
    cost: float
    memory: float
    bound: float
    method: str
    before: dict[str, int]
    after: dict[str, int]

    @property
    def gap(self) -> float:
        """0 when proven optimal."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost > 0 else 0.0


@dataclass(frozen=True)
class Shortage:
    """The shortage where no assignment fits: the least memory that any needs."""

    least_bytes: float
    choice: tuple[int, ...]


def solve(
    graph: FactorGraph,
    budget: float | None = None,
    time_limit_s: float = 60.0,
    tie_price: float = 0.0,
    close: float = 1e-4,
    by_price_alone: bool = False,
) -> Solution | Shortage:
    """Minimise cost subject to memory <= budget (bytes; None: no limit).

    tie_price: a small price per byte that decides between equally fast plans (a parameter that every use slices for
    free is as fast whole as sharded). The reported cost is without it, the gap is that of the priced objective. close:
    relative distance to the bound at which memory prices are good enough; from 1e-3 on an estimate is asked for. by_price_alone:
    whether what memory prices find will do, however far that is from the bound.
    """
    deadline = time.monotonic() + time_limit_s
    least = [int(np.argmin(memory)) for memory in graph.memory]
    if budget is not None and graph.memory_of(least) > budget:
        return Shortage(graph.memory_of(least), tuple(least))
    estimate = close >= ROUGH
    free, bound, after = priced(
        graph, tie_price, deadline, close * _FREE if estimate else _CLOSED, enough=close if estimate else 0.0
    )
    if free is not None:
        bound -= tie_price * graph.memory_of(free)
    method = "exact" if free is not None else "greedy"
    choice = free if free is not None else greedy(graph)
    if budget is None or graph.memory_of(choice) <= budget:
        return _solution(graph, choice, bound, method, after)
    best, bound, price = _by_price(graph, budget, choice, least, bound, deadline, close)
    solution = _solution(graph, best, bound, "priced memory", after)
    if not by_price_alone and close < ROUGH < solution.gap and time.monotonic() < deadline:
        best, row_bound, size = by_row(graph, budget, price, best, deadline)
        solution = _solution(graph, best, max(bound, row_bound), "memory row", size)
    return solution


def by_row(
    graph: FactorGraph, budget: float, price: float, best: Sequence[int], deadline: float, largest: int = _LARGEST_ROW
) -> tuple[list[int], float, dict[str, int]]:
    """The best assignment within a budget of bytes by the MIP with memory as a row, in a share of the time that is left, over the
    states that the bound at a price leaves to anything better than `best`, which fits; the proven bound; the MIP's size. largest:
    of more variables none is solved."""
    cost, choice = graph.value(list(best)), list(best)
    r = reduce_graph(better_within(graph, budget, price, cost, deadline), with_memory=True)
    if r.size["variables"] > largest:
        return choice, -float("inf"), r.size
    answer = solve_ilp(r, budget, _ROW_SHARE * (deadline - time.monotonic()))
    if answer.chosen is not None:
        restored = restore(r, answer.chosen)
        if graph.memory_of(restored) <= budget * (1 + 1e-9) and graph.value(restored) < cost:
            choice = restored
    return choice, _total_bound(r, answer), r.size


def _solution(graph: FactorGraph, choice: list[int], bound: float, method: str, after: dict[str, int]) -> Solution:
    cost = graph.value(choice)
    return Solution(tuple(choice), cost, graph.memory_of(choice), min(bound, cost), method, graph.size, after)


def priced(
    graph: FactorGraph,
    price: float,
    deadline: float,
    close: float = _CLOSED,
    known: Sequence[int] | None = None,
    enough: float = 0.0,
) -> tuple[list[int] | None, float, dict[str, int]]:
    """(optimum of cost + price · memory, its proven bound, size after reduction). deadline: of time.monotonic(). close:
    relative distance to the bound that will do; enough: at which a large MIP is not worth its time. known: an assignment that
    may be good, as the optimum at another price is.

    Message passing bounds and prunes until elimination can solve what is left, or bound and assignment are close; only what
    they leave open goes to the ILP.
    """
    r = shortened(start(graph, price))
    size = r.size
    if (optimum := _by_elimination(r) or _along_chains(r)) is not None:
        return optimum
    at_hand = {v: int(np.searchsorted(r.alive[v], known[v])) for v in r.cost} if known is not None else None
    bounds = messages.bound(r, 200, time.monotonic() + (deadline - time.monotonic()) / 2, close / 2, at_hand)
    if (optimum := _by_elimination(r)) is not None:
        return optimum
    lower = _settled(r) + bounds.lower
    choice = restore(r, bounds.chosen)
    upper = graph.value(choice) + price * graph.memory_of(choice)
    if upper - lower <= close * abs(upper):
        return choice, lower, size
    _prune(r, bounds, upper - lower)
    r = reduce_graph(r)
    if r.size["variables"] > (_LARGEST_NEAR if upper - lower <= enough * abs(upper) else _LARGEST):
        return choice, lower, size
    exact, proven, _ = _exact(r, deadline)
    if exact is not None and graph.value(exact) + price * graph.memory_of(exact) <= upper:
        return exact, max(lower, proven), r.size
    return choice, max(lower, min(proven, upper)), r.size


def _exact(r: Reduced, deadline: float) -> tuple[list[int] | None, float, dict[str, int]]:
    """The optimum of what is left as a full assignment; its proven bound; the size of what was left. By elimination where that
    is quicker than LP and MIP."""
    worth = _PER_VARIABLE * r.size["variables"]
    if (optimum := _by_elimination(r) or _by_elimination(r, worth)) is not None:
        return optimum
    answer = solve_ilp(r, None, max(deadline - time.monotonic(), 1.0))
    if answer.chosen is None:
        return None, -float("inf"), r.size
    return restore(r, answer.chosen), _total_bound(r, answer), r.size


def _along_chains(r: Reduced) -> tuple[list[int], float, dict[str, int]] | None:
    """The same of a long and narrow graph, as deep models of unlike layers have: messages would go step by step, so larger tables
    than elsewhere are worth it. None where the graph is wide, or tables get too large for that too."""
    steps = messages.levels(r)
    if len(r.cost) > NARROW * steps:
        return None
    return _by_elimination(reduce_graph(copy_of(r)), _PER_STEP * steps)


def _by_elimination(r: Reduced, most: float | None = None) -> tuple[list[int], float, dict[str, int]] | None:
    """The same by elimination; None where tables get too large. most: as of `elimination_order`."""
    order = elimination_order({v: len(c) for v, c in r.cost.items()}, r.near, most)
    if order is None:
        return None
    chosen, value = eliminated(r, order)
    return restore(r, chosen), _settled(r) + value, r.size


def _prune(r: Reduced, bounds: Bounds, slack: float) -> None:
    """Drop states that add more to the bound than there is between bound and best assignment."""
    for v, extra in bounds.extra.items():
        kept = np.nonzero(extra <= slack * (1 + 1e-9))[0]
        if 0 < len(kept) < len(extra):
            keep_states(r, v, kept)


def _total_bound(r: Reduced, answer: Answer) -> float:
    """Bound of the whole problem: what was eliminated without neighbours, plus the bound of the rest."""
    return _settled(r) + answer.bound


def _settled(r: Reduced) -> float:
    """Cost of the variables that were eliminated without neighbours."""
    return sum(float(cost[0]) for _, cost, near, _ in r.log if not near)


def better_within(graph: FactorGraph, budget: float, price: float, cost: float, deadline: float) -> Reduced:
    """The graph without the states that no assignment has which fits the budget and costs less than `cost`.

    At any price per byte such an assignment costs less than cost + price · budget with its memory, so a state goes that lifts
    the bound at a price above that.
    """
    r = shortened(start(graph), with_memory=True)
    at_price = copy_of(r)
    at_price.cost = {v: c + price * r.memory[v] for v, c in r.cost.items()}
    ceiling = cost + price * (budget - r.constant_memory) - _settled(r)
    messages.bound(at_price, 200, time.monotonic() + (deadline - time.monotonic()) / 4, ceiling=ceiling)
    for v, alive in at_price.alive.items():
        keep_states(r, v, np.searchsorted(r.alive[v], alive))
    return r


def _by_price(
    graph: FactorGraph, budget: float, cheap: list[int], small: list[int], bound: float, deadline: float, close: float
) -> tuple[list[int], float, float]:
    """Walk down the convex hull of (memory, cost): (best assignment that fits, best lower bound, the price that it is from).

    `over` is too large, `under` fits. The price at which both cost the same shows either a better assignment between
    them, which replaces one, or that there is none: then the hull is found, and with it the best bound.
    """
    over, under, best, best_price = cheap, small, small, 0.0
    for _ in range(40):
        span = graph.memory_of(over) - graph.memory_of(under)
        rise = graph.value(under) - graph.value(over)
        if span <= 0 or rise <= 0 or time.monotonic() > deadline:
            break
        price = rise / span
        choice, value, _ = priced(graph, price, deadline, known=under)
        if choice is None:
            break
        if value - price * budget > bound:
            bound, best_price = value - price * budget, price
        fits = graph.memory_of(choice) <= budget
        if fits and graph.value(choice) < graph.value(best):
            best = choice
        level = graph.value(over) + price * graph.memory_of(over)
        priced_choice = graph.value(choice) + price * graph.memory_of(choice)
        if priced_choice >= level - 1e-7 * abs(level) or graph.value(best) - bound <= close * abs(graph.value(best)):
            break
        over, under = (over, choice) if fits else (choice, under)
    return best, bound, best_price


def greedy(graph: FactorGraph) -> list[int]:
    """Largest variable first, each at its cheapest next to what is already decided (the texts' heuristic fallback)."""
    near: dict[int, list[tuple[int, np.ndarray]]] = {v: [] for v in range(len(graph.keys))}
    for (u, v), m in graph.pairs.items():
        near[u].append((v, m))
        near[v].append((u, m.T))
    order = sorted(near, key=lambda v: -float(graph.cost[v].max() - graph.cost[v].min()))
    chosen: dict[int, int] = {}
    for v in order:
        total = graph.cost[v].copy()
        for u, m in near[v]:
            total = total + (m[:, chosen[u]] if u in chosen else m.min(1))
        chosen[v] = int(np.argmin(total))
    return [chosen[v] for v in range(len(graph.keys))]
