"""Which values of a template to keep for backward and which to make again: the optimum at a price on bytes, or in a budget.

h_i says that backward has item i, r_i that it makes the item again; what it has and does not make again is kept:

    minimise  sum c_i r_i + p * sum b_i (h_i - r_i)      c: seconds, b: bytes, p: seconds per byte
    r_i <= h_i;   r_i <= h_u for every operand u of i;   h_i = 1 for what backward's own ops read

Every constraint says "if this then that", so at a price it is a minimum cut (the closure problem). All prices together
give the lower convex hull of (bytes, seconds); the points between its corners need the budget as a row, which CP-SAT
solves. (PyTorch's min-cut partitioner is the special case in which recomputing has no price.)
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from ortools.graph.python import max_flow

from autopar.passes.recompute.problem import RecomputeProblem
from autopar.passes.solvers.cp_sat import cp_sat, solved

_UNIT = 10**9  # all bytes, and all seconds, in the integers of the minimum cut
_STEPS = 10**6  # the largest ratio between the prices of seconds and of bytes
_MOST_CORNERS = 64  # the search for corners of the hull stops here


@dataclass(frozen=True)
class Choice:
    """The items that are kept and those that are made again, what this costs, and the choice in a plan's terms."""

    bytes_kept: float
    again_s: float
    kept: frozenset[int]
    again: frozenset[int]
    recompute: tuple[str, ...]


def settle(problem: RecomputeProblem, again: Collection[int]) -> Choice | None:
    """The choice that makes exactly these items again where they are wanted; None where something cannot be had."""
    wanted, kept, remade = list(problem.needed), set[int](), set[int]()
    while wanted:
        i = wanted.pop()
        if i in kept or i in remade:
            continue
        item = problem.items[i]
        if i in again and math.isfinite(item.again_s):
            remade.add(i)
            wanted += item.operands
        elif math.isfinite(item.bytes_kept):
            kept.add(i)
        else:
            return None
    return Choice(*problem.cost(kept, remade), frozenset(kept), frozenset(remade), problem.recompute(remade))


def at_price(problem: RecomputeProblem, seconds: int, nbytes: int) -> Choice:
    """The choice with the least seconds · (its share of all seconds) + nbytes · (its share of all bytes)."""
    scale_s, scale_b = _scales(problem)
    flow = max_flow.SimpleMaxFlow()
    count = len(problem.items)
    source, sink, never = 2 * count, 2 * count + 1, 2**60
    unary: dict[int, int] = {}
    for i, item in enumerate(problem.items):
        had, remade = i, count + i
        flow.add_arc_with_capacity(remade, had, never)
        for u in item.operands:
            flow.add_arc_with_capacity(remade, u, never)
        if math.isinf(item.again_s):
            flow.add_arc_with_capacity(remade, sink, never)
            unary[remade] = 0
        else:
            unary[remade] = seconds * round(item.again_s * scale_s)
        if math.isinf(item.bytes_kept):
            flow.add_arc_with_capacity(had, remade, never)
        else:
            price = nbytes * round(item.bytes_kept * scale_b)
            unary[had] = price
            unary[remade] -= price
    for i in problem.needed:
        flow.add_arc_with_capacity(source, i, never)
    for node, weight in unary.items():
        if weight > 0:
            flow.add_arc_with_capacity(node, sink, weight)
        elif weight < 0:
            flow.add_arc_with_capacity(source, node, -weight)
    if flow.solve(source, sink) != flow.OPTIMAL:
        raise RuntimeError("the minimum cut of a recompute problem was not found")
    side = {int(n) for n in flow.get_source_side_min_cut()}
    cheapest = settle(problem, {i for i in range(count) if count + i in side})
    assert cheapest is not None, "backward reads what can neither be kept nor made again"
    return cheapest


def at_byte_price(problem: RecomputeProblem, price: float) -> Choice:
    """The choice with the least seconds + price · bytes (price: seconds per byte)."""
    if not problem.needed:
        return Choice(0.0, 0.0, frozenset(), frozenset(), ())
    scale_s, scale_b = _scales(problem)
    seconds, nbytes = 1 / scale_s, price / scale_b
    unit = max(seconds, nbytes) / _STEPS
    return at_price(problem, max(round(seconds / unit), 1), max(round(nbytes / unit), 1))


def hull(problem: RecomputeProblem) -> list[Choice]:
    """Corners of the lower convex hull, from least seconds to least bytes."""
    if not problem.needed:
        return [Choice(0.0, 0.0, frozenset(), frozenset(), ())]
    most, least = at_price(problem, _STEPS, 1), at_price(problem, 1, _STEPS)
    scale_s, scale_b = _scales(problem)
    corners = [most, least]
    pairs = [(most, least)]
    while pairs and len(corners) < _MOST_CORNERS:
        a, b = pairs.pop(0)
        ds, db = (b.again_s - a.again_s) * scale_s, (a.bytes_kept - b.bytes_kept) * scale_b
        if ds <= 0 or db <= 0:
            continue
        unit = max(ds, db) / _STEPS
        s, n = max(round(db / unit), 1), max(round(ds / unit), 1)
        c = at_price(problem, s, n)
        value = s * c.again_s * scale_s + n * c.bytes_kept * scale_b
        ends = min(s * x.again_s * scale_s + n * x.bytes_kept * scale_b for x in (a, b))
        if value < ends * (1 - 1e-9) and a.bytes_kept > c.bytes_kept > b.bytes_kept:
            corners.append(c)
            pairs += [(a, c), (c, b)]
    unique = {(c.bytes_kept, c.again_s): c for c in corners}
    ordered = sorted(unique.values(), key=lambda c: (c.again_s, c.bytes_kept))
    return [c for i, c in enumerate(ordered) if i == 0 or c.bytes_kept < min(x.bytes_kept for x in ordered[:i])]


def within(problem: RecomputeProblem, budget: float, time_limit_s: float = 10.0) -> Choice | None:
    """The choice of the fewest seconds that keeps at most `budget` bytes; None where none does."""
    scale_s, _ = _scales(problem)
    cp = cp_sat()
    model = cp.CpModel()
    had = [model.new_bool_var(f"h{i}") for i in range(len(problem.items))]
    remade = [model.new_bool_var(f"r{i}") for i in range(len(problem.items))]
    for i, item in enumerate(problem.items):
        model.add_implication(remade[i], had[i])
        for u in item.operands:
            model.add_implication(remade[i], had[u])
        if math.isinf(item.again_s):
            model.add(remade[i] == 0)
        if math.isinf(item.bytes_kept):
            model.add(had[i] == remade[i])
        if i in problem.needed:
            model.add(had[i] == 1)
    sized = [(i, math.ceil(item.bytes_kept)) for i, item in enumerate(problem.items) if math.isfinite(item.bytes_kept)]
    model.add(sum(b * (had[i] - remade[i]) for i, b in sized) <= math.floor(budget))
    timed = [(i, round(item.again_s * scale_s)) for i, item in enumerate(problem.items) if math.isfinite(item.again_s)]
    model.minimize(sum(s * remade[i] for i, s in timed))
    solver = cp.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 2  # its LP is nearly integral: a hundred times faster than without all rows
    if solved(solver, model) not in (cp.OPTIMAL, cp.FEASIBLE):
        return None
    return settle(problem, {i for i in range(len(remade)) if solver.value(remade[i])})


def _scales(problem: RecomputeProblem) -> tuple[float, float]:
    seconds = sum(i.again_s for i in problem.items if math.isfinite(i.again_s))
    nbytes = sum(i.bytes_kept for i in problem.items if math.isfinite(i.bytes_kept))
    return _UNIT / seconds if seconds else 1.0, _UNIT / nbytes if nbytes else 1.0


def of_values(problem: RecomputeProblem, values: Collection[str]) -> Choice:
    """The choice that a plan's set of values means. A view is never kept: the value that it shows is."""
    again = {i for i, item in enumerate(problem.items) if item.value in values or not math.isfinite(item.bytes_kept)}
    choice = settle(problem, again)
    assert choice is not None, "backward reads what can neither be kept nor made again"
    return choice
