"""AutoParallel's solvers, restated from its source for a factor graph (github.com/meta-pytorch/autoparallel:
optimize_sharding.py, approximate_sharding.py): its integer program and the linear relaxation, and sequential
tree-reweighted message passing with a polish.

They are as there but for two things that make them faster here: states are rows of arrays where the polish there goes one
by one, and neither the building of the program nor of the factors is counted, which there take longer than the search.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from ortools.linear_solver import linear_solver_pb2, pywraplp

from autopar.passes.shard.factors.graph import FactorGraph

_CANDIDATES, _SWEEPS, _POLISHES, _STARS, _STAR_CHILDREN = 64, 400, 12, 2, 32
"""Its defaults: states kept of a variable, sweeps of messages, rounds of either polish, neighbours that are chosen with a
variable."""
LIMIT_S = 60.0
"""The default of what message passing and polish may take together."""


@dataclass(frozen=True)
class Found:
    """An assignment and its cost; bound: what is proven (None: nothing)."""

    choice: tuple[int, ...]
    cost: float
    bound: float | None = None


# --- messages


@dataclass
class _Factors:
    """States that are kept of every variable, their costs, and the pair costs towards each neighbour."""

    kept: list[np.ndarray]
    cost: list[np.ndarray]
    near: list[dict[int, np.ndarray]]
    now: list[int] = field(default_factory=list)

    @staticmethod
    def of(graph: FactorGraph, candidates: int | None) -> _Factors:
        """Factors of a graph; of many states the cheapest stay, with the cheapest way from what a variable reads."""
        least = [c.copy() for c in graph.cost]
        for (_, v), pair in graph.pairs.items():
            least[v] += pair.min(0)
        kept = [np.sort(np.argsort(c, kind="stable")[:candidates]) for c in least]
        near: list[dict[int, np.ndarray]] = [{} for _ in kept]
        for (u, v), pair in graph.pairs.items():
            near[u][v] = pair[np.ix_(kept[u], kept[v])]
            near[v][u] = near[u][v].T
        return _Factors(kept, [c[k] for c, k in zip(graph.cost, kept, strict=True)], near, [0] * len(kept))

    def beside(self, v: int) -> np.ndarray:
        """The cost of every state of a variable beside the others' states."""
        total = self.cost[v].copy()
        for u, pair in self.near[v].items():
            total += pair[:, self.now[u]]
        return total

    def total(self) -> float:
        """The cost of the assignment."""
        pairs = (p[self.now[v], self.now[u]] for v, near in enumerate(self.near) for u, p in near.items() if v < u)
        return float(sum(c[s] for c, s in zip(self.cost, self.now, strict=True)) + sum(pairs))


def by_messages(
    graph: FactorGraph,
    candidates: int | None = _CANDIDATES,
    limit_s: float = LIMIT_S,
    seen: Callable[[float], bool] = lambda _: False,
) -> Found:
    """Message passing in the order of the variables, the best of its assignments polished. seen: is told the cost of each better
    assignment, and says whether it will do, so that nothing is polished."""
    f, end = _Factors.of(graph, candidates), time.process_time() + limit_s
    if not _sweep(f, end, seen):
        _descend(f, end)
        _stars(f, end)
        seen(f.total())
    choice = tuple(int(k[s]) for k, s in zip(f.kept, f.now, strict=True))
    return Found(choice, graph.value(list(choice)))


def _sweep(f: _Factors, end: float, seen: Callable[[float], bool]) -> bool:
    """Sweeps in both directions until nothing changes; leaves the best assignment that was read off after one, and says
    whether that will do."""
    share = [1.0 / max(sum(u < v for u in near), sum(u > v for u in near), 1) for v, near in enumerate(f.near)]
    sent = {(v, u): np.zeros(len(f.cost[u])) for v, near in enumerate(f.near) for u in near}
    best, best_cost = list(f.now), np.inf
    order = range(len(f.cost))
    for _ in range(_SWEEPS):
        change = 0.0
        for forward in (True, False):
            for v in order if forward else order[::-1]:
                total = f.cost[v].copy()
                for u in f.near[v]:
                    total += sent[u, v]
                total *= share[v]
                for u, pair in f.near[v].items():
                    if (u > v) == forward:
                        message = ((total - sent[u, v])[:, None] + pair).min(0)
                        message -= message.min()
                        change = max(change, float(np.abs(message - sent[v, u]).max()))
                        sent[v, u] = message
        for v in order:
            total = f.cost[v].copy()
            for u, pair in f.near[v].items():
                total += pair[:, f.now[u]] if u < v else sent[u, v]
            f.now[v] = int(np.argmin(total))
        cost = f.total()
        if cost < best_cost:
            best, best_cost = list(f.now), cost
            if seen(cost):
                f.now = best
                return True
        if change == 0.0 or time.process_time() > end:
            break
    f.now = best
    return False


def _descend(f: _Factors, end: float) -> None:
    """One variable after the other at its cheapest, until nothing changes."""
    for _ in range(_POLISHES):
        changed = False
        for v in range(len(f.cost)):
            total = f.beside(v)
            best = int(np.argmin(total))
            if total[best] < total[f.now[v]] - 1e-6:
                f.now[v], changed = best, True
        if not changed or time.process_time() > end:
            return


def _stars(f: _Factors, end: float) -> None:
    """Every variable with those around it: each of its states with the best that its neighbours then take."""
    ranked = sorted((v for v, near in enumerate(f.near) if len(near) >= 2), key=lambda v: (-len(f.near[v]), -v))
    for _ in range(_STARS):
        changed = False
        for v in ranked:
            if time.process_time() > end:
                return
            changed |= _star(f, v)
        if not changed:
            return


def _star(f: _Factors, v: int) -> bool:
    """Whether a variable and the dearest of its neighbours, chosen together, are better than before."""
    dearest = sorted(f.near[v], key=lambda u: (-f.beside(u)[f.now[u]], u))[:_STAR_CHILDREN]
    block = {v, *dearest}

    def cost() -> float:
        alone = sum(float(f.cost[u][f.now[u]]) for u in block)
        pairs = {(min(u, w), max(u, w)) for u in block for w in f.near[u]}
        return alone + sum(float(f.near[u][w][f.now[u], f.now[w]]) for u, w in pairs)

    before, least = {u: f.now[u] for u in block}, cost()
    best, found = before, False
    for state in range(len(f.cost[v])):
        f.now[v] = state
        for u in dearest:
            f.now[u] = int(np.argmin(f.beside(u)))
        if (total := cost()) < least - 1e-6:
            best, least, found = {u: f.now[u] for u in block}, total, True
    for u, state in best.items():
        f.now[u] = state
    return found


# --- integer program and relaxation


def by_program(graph: FactorGraph, whole: bool, limit_s: float, forbidden: float) -> tuple[Found | None, float]:
    """The integer program by CBC, or its relaxation by CLP, with CPU seconds of the solver alone; None where it gives no answer.

    Binaries as there: of every edge one per pair of states, of which one is taken; a variable's share of them is the same
    over all its edges. Pairs of cost `forbidden` and more have none.
    """
    model = linear_solver_pb2.MPModelProto()
    shares: list[dict[int, list[list[int]]]] = [{} for _ in graph.cost]  # per variable and edge, binaries of each state

    def binary(cost: float) -> int:
        model.variable.add(lower_bound=0.0, upper_bound=1.0, objective_coefficient=cost, is_integer=whole)
        return len(model.variable) - 1

    def equal(plus: list[int], minus: list[int], value: float) -> None:
        row = model.constraint.add(lower_bound=value, upper_bound=value)
        row.var_index.extend(plus + minus)
        row.coefficient.extend([1.0] * len(plus) + [-1.0] * len(minus))

    degree = np.zeros(len(graph.cost))
    for u, v in graph.pairs:
        degree[[u, v]] += 1
    for number, ((u, v), pair) in enumerate(graph.pairs.items()):
        of_u: list[list[int]] = [[] for _ in graph.cost[u]]
        of_v: list[list[int]] = [[] for _ in graph.cost[v]]
        costs = pair + (graph.cost[u] / degree[u])[:, None] + graph.cost[v] / degree[v]
        for s, t in zip(*np.nonzero(pair < forbidden), strict=True):
            x = binary(float(costs[s, t]))
            of_u[s].append(x)
            of_v[t].append(x)
        shares[u][number], shares[v][number] = of_u, of_v
        equal([x for xs in of_u for x in xs], [], 1.0)
    for v, of_edges in enumerate(shares):
        if not of_edges:
            of_edges[-1] = [[binary(float(c))] for c in graph.cost[v]]
            equal([x for xs in of_edges[-1] for x in xs], [], 1.0)
        first, *others = of_edges.values()
        for other in others:
            for a, b in zip(first, other, strict=True):
                equal(a, b, 0.0)
    solver = pywraplp.Solver.CreateSolver("CBC" if whole else "CLP")
    solver.LoadModelFromProto(model)
    solver.SetTimeLimit(int(1000 * limit_s))
    begin = time.process_time()
    status = solver.Solve()
    took_s = time.process_time() - begin
    if status not in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE):
        return None, took_s
    values = np.array([variable.solution_value() for variable in solver.variables()])
    chosen = tuple(int(np.argmax([values[xs].sum() for xs in next(iter(of_edges.values()))])) for of_edges in shares)
    bound = solver.Objective().BestBound() if whole else solver.Objective().Value()
    return Found(chosen, graph.value(list(chosen)), float(bound)), took_s
