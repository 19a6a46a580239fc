"""The ILP over what reduction leaves, with OR-Tools (MathOpt, HiGHS).

One-hot binaries x[v, s] per variable, and per edge y[u, s, v, t] >= 0 with row sums x[u, s] and column sums x[v, t]:
the local-polytope relaxation, integral on trees and nearly so on sharding problems. LP first; an integral answer is
optimal. Otherwise the same model with integer x, under a time limit, whose bound gives the gap. Memory is one row in
bytes (scaled to the budget).
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from autopar.passes.shard.reduce import Reduced


@dataclass(frozen=True)
class Answer:
    """chosen: position per remaining variable. bound: proven lower bound of the objective over the remaining part."""

    chosen: dict[int, int] | None
    bound: float
    integral: bool


@dataclass(frozen=True)
class _Model:
    proto: model_pb2.ModelProto
    first: dict[int, int]
    scale: float
    first_edge: int


def _build(r: Reduced, budget: float | None) -> _Model:
    first: dict[int, int] = {}
    count = 0
    costs: list[np.ndarray] = []
    for v in sorted(r.cost):
        first[v] = count
        count += len(r.cost[v])
        costs.append(r.cost[v])
    nodes = count
    edges = [(u, v, r.near[u][v]) for u in sorted(r.near) for v in sorted(r.near[u]) if u < v]
    offsets = []
    for _, _, m in edges:
        offsets.append(count)
        count += m.size
        costs.append(m.ravel())
    scale = max(1e-12, float(np.median(np.abs(np.concatenate(costs)))) if costs else 1.0)
    rows: list[np.ndarray] = []
    cols: list[np.ndarray] = []
    vals: list[np.ndarray] = []
    bounds: list[tuple[int, float, float]] = []
    row = 0
    for v in sorted(r.cost):
        n = len(r.cost[v])
        rows.append(np.full(n, row))
        cols.append(first[v] + np.arange(n))
        vals.append(np.ones(n))
        row += 1
    bounds.append((row, 1.0, 1.0))
    equalities = 0
    for (u, v, m), at in zip(edges, offsets, strict=True):
        grid = at + np.arange(m.size).reshape(m.shape)
        for ids, w in ((grid, u), (grid.T, v)):
            n = len(ids)
            rows.append(np.repeat(row + np.arange(n), ids.size // n))
            cols.append(ids.ravel())
            vals.append(np.ones(ids.size))
            rows.append(row + np.arange(n))
            cols.append(first[w] + np.arange(n))
            vals.append(-np.ones(n))
            row += n
            equalities += n
    bounds.append((equalities, 0.0, 0.0))
    if budget is not None:
        memory = np.concatenate([r.memory[v] for v in sorted(r.cost)])
        rows.append(np.full(nodes, row))
        cols.append(np.arange(nodes))
        vals.append(memory / budget)
        bounds.append((1, -np.inf, 1.0 - r.constant_memory / budget))
        row += 1
    proto = model_pb2.ModelProto()
    proto.variables.ids.extend(range(count))
    proto.variables.lower_bounds.extend([0.0] * count)
    proto.variables.upper_bounds.extend([1.0] * count)
    proto.variables.integers.extend([False] * count)
    objective = np.concatenate(costs) / scale
    keep = np.nonzero(objective)[0]
    proto.objective.linear_coefficients.ids.extend(keep.tolist())
    proto.objective.linear_coefficients.values.extend(objective[keep].tolist())
    proto.linear_constraints.ids.extend(range(row))
    for n, low, high in bounds:
        proto.linear_constraints.lower_bounds.extend([low] * n)
        proto.linear_constraints.upper_bounds.extend([high] * n)
    all_rows, all_cols, all_vals = np.concatenate(rows), np.concatenate(cols), np.concatenate(vals)
    order = np.lexsort((all_cols, all_rows))
    all_rows, all_cols, all_vals = all_rows[order], all_cols[order], all_vals[order]
    keep = np.nonzero(all_vals)[0]
    proto.linear_constraint_matrix.row_ids.extend(all_rows[keep].tolist())
    proto.linear_constraint_matrix.column_ids.extend(all_cols[keep].tolist())
    proto.linear_constraint_matrix.coefficients.extend(all_vals[keep].tolist())
    return _Model(proto, first, scale, nodes)


def solve_ilp(r: Reduced, budget: float | None, time_limit_s: float) -> Answer:
    """LP, then MIP when the LP is fractional. `chosen` is None when no answer was found in time (or none exists)."""
    if not r.cost:
        fits = budget is None or r.constant_memory <= budget * (1 + 1e-12)
        return Answer({} if fits else None, 0.0, True)
    model = _build(r, budget)
    limit = datetime.timedelta(seconds=max(time_limit_s, 0.1))
    lp = _solved(model, mathopt.SolveParameters(time_limit=limit))
    if lp is None:
        return Answer(None, -float("inf"), False)
    reason = lp.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return Answer(None, float("inf"), True)
    if not lp.has_primal_feasible_solution():
        return Answer(None, -float("inf"), False)
    bound = lp.objective_value() * model.scale
    chosen, whole = _read(r, model, lp)
    if whole:
        return Answer(chosen, bound, True)
    for i in range(model.first_edge):
        model.proto.variables.integers[i] = True
    mip = _solved(model, mathopt.SolveParameters(time_limit=limit, relative_gap_tolerance=1e-4))
    if mip is None or not mip.has_primal_feasible_solution():
        return Answer(None, bound, False)
    chosen, _ = _read(r, model, mip)
    return Answer(chosen, max(bound, mip.best_objective_bound() * model.scale), True)


def _solved(model: _Model, params: mathopt.SolveParameters) -> mathopt.SolveResult | None:
    """The solver's result; None where it gives up for numerical reasons (it raises what its own binding cannot tell)."""
    try:
        return mathopt.solve(mathopt.Model.from_model_proto(model.proto), mathopt.SolverType.HIGHS, params=params)
    except (AttributeError, RuntimeError):
        return None


def _read(r: Reduced, model: _Model, result: mathopt.SolveResult) -> tuple[dict[int, int], bool]:
    values = result.variable_values()
    x = np.zeros(model.first_edge)
    for variable, value in values.items():
        if variable.id < model.first_edge:
            x[variable.id] = value
    chosen, whole = {}, True
    for v, at in model.first.items():
        part = x[at : at + len(r.cost[v])]
        chosen[v] = int(np.argmax(part))
        whole &= float(part.max()) > 1 - 1e-6
    return chosen, whole
