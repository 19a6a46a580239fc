"""The ILP over what reduction leaves, with OR-Tools (MathOpt, HiGHS).

One-hot binaries x[v, s] per variable, and per edge y[u, s, v, t] >= 0 with row sums x[u, s] and column sums x[v, t]:
the local-polytope relaxation, integral on trees and nearly so on sharding problems. LP first; an integral answer is
optimal. Otherwise it is rounded and polished (`polish.py`); where that does not come close to the LP's bound, the same model
with integer x, under a time limit, gives assignment and gap. Memory is one row in
bytes (scaled to the budget).
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field, replace

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.core.python import solver
from ortools.math_opt.python import mathopt
from ortools.math_opt.python.result import parse_solve_result
from ortools.math_opt.python.solve import StatusNotOk
from ortools.math_opt.solvers.highs_pb2 import HighsOptionsProto

from autopar.passes.shard.polish import polished
from autopar.passes.shard.reduce import Reduced, assigned

CLOSE = 1e-4
"""Relative distance to the bound at which an assignment will do where the LP is not whole."""
_MANY = 50_000
"""Columns from which on a model is a large one, whose MIP may take minutes to prove the last thousandth."""
_CLOSE_OF_MANY = 1e-3
"""`CLOSE` of a large model."""
_TIMES_LP = 8
"""Times as long as its LP that the MIP of a large model may take."""
_ONE_THREAD = HighsOptionsProto(int_options={"threads": 1}, string_options={"parallel": "off"})
"""HiGHS keeps its threads from one answer to the next: a process forked from this one would wait for them for ever."""
_GAVE_UP = "INTERNAL"
"""MathOpt's code for an error that HiGHS met while it solved; a wrong model or parameter is INVALID_ARGUMENT."""


@dataclass(frozen=True)
class Answer:
    """chosen: position per remaining variable. bound: proven lower bound of the objective over the remaining part."""

    chosen: dict[int, int] | None
    bound: float
    integral: bool


@dataclass(frozen=True)
class _Model:
    """first: number of the first binary of every remaining variable; first_edge: of the first y. costs were divided by
    scale."""

    proto: model_pb2.ModelProto
    first: dict[int, int]
    scale: float
    first_edge: int


@dataclass(frozen=True)
class _Columns:
    """Columns of the model: per variable its states x, then per edge (u, v, its costs, its first column) the pairs y.

    costs: of every column.
    """

    first: dict[int, int]
    edges: list[tuple[int, int, np.ndarray, int]]
    first_edge: int
    costs: np.ndarray

    @staticmethod
    def of(r: Reduced) -> _Columns:
        first: dict[int, int] = {}
        count = 0
        for v in sorted(r.cost):
            first[v] = count
            count += len(r.cost[v])
        first_edge, edges = count, []
        for u in sorted(r.near):
            for v in sorted(r.near[u]):
                if u < v:
                    edges.append((u, v, r.near[u][v], count))
                    count += r.near[u][v].size
        costs = [r.cost[v] for v in first] + [matrix.ravel() for _, _, matrix, _ in edges]
        return _Columns(first, edges, first_edge, np.concatenate(costs))


@dataclass
class _Rows:
    """Rows of the model as (row, column, value) triplets, in blocks that share a lower and an upper bound."""

    count: int = 0
    triplets: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def open(self, count: int, lower: float, upper: float) -> np.ndarray:
        """Numbers of so many new rows within these bounds."""
        self.lower += [lower] * count
        self.upper += [upper] * count
        self.count += count
        return np.arange(self.count - count, self.count)

    def put(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
        self.triplets.append((rows, columns, values))


def _build(r: Reduced, budget: float | None) -> _Model:
    columns, rows = _Columns.of(r), _Rows()
    _one_state_each(rows, columns, r)
    _pairs_agree(rows, columns)
    if budget is not None:
        _within_budget(rows, columns, r, budget)
    scale = max(1e-12, float(np.median(np.abs(columns.costs))))
    return _Model(_proto(columns.costs / scale, rows), columns.first, scale, columns.first_edge)


def _one_state_each(rows: _Rows, columns: _Columns, r: Reduced) -> None:
    """Add the constraint that every variable has one state: sum_s x[v, s] = 1."""
    for v, at in columns.first.items():
        n = len(r.cost[v])
        rows.put(np.repeat(rows.open(1, 1.0, 1.0), n), at + np.arange(n), np.ones(n))


def _pairs_agree(rows: _Rows, columns: _Columns) -> None:
    """sum_t y[u, s, v, t] = x[u, s] for every s, and sum_s y[u, s, v, t] = x[v, t] for every t"""
    for u, v, matrix, at in columns.edges:
        pairs = at + np.arange(matrix.size).reshape(matrix.shape)
        for of_state, variable in ((pairs, u), (pairs.T, v)):
            n = len(of_state)
            opened = rows.open(n, 0.0, 0.0)
            rows.put(np.repeat(opened, of_state.size // n), of_state.ravel(), np.ones(of_state.size))
            rows.put(opened, columns.first[variable] + np.arange(n), -np.ones(n))


def _within_budget(rows: _Rows, columns: _Columns, r: Reduced, budget: float) -> None:
    """sum_v memory[v, s] x[v, s] <= budget, beside what was eliminated; in parts of the budget"""
    memory = np.concatenate([r.memory[v] for v in columns.first])
    opened = rows.open(1, -np.inf, 1.0 - r.constant_memory / budget)
    rows.put(np.repeat(opened, len(memory)), np.arange(len(memory)), memory / budget)


def _proto(objective: np.ndarray, rows: _Rows) -> model_pb2.ModelProto:
    """The LP as the solver takes it; zeros are left out, the matrix goes row by row."""
    proto, count = model_pb2.ModelProto(), len(objective)
    proto.variables.ids.extend(range(count))
    proto.variables.lower_bounds.extend([0.0] * count)
    proto.variables.upper_bounds.extend([1.0] * count)
    proto.variables.integers.extend([False] * count)
    keep = np.nonzero(objective)[0]
    proto.objective.linear_coefficients.ids.extend(keep.tolist())
    proto.objective.linear_coefficients.values.extend(objective[keep].tolist())
    proto.linear_constraints.ids.extend(range(rows.count))
    proto.linear_constraints.lower_bounds.extend(rows.lower)
    proto.linear_constraints.upper_bounds.extend(rows.upper)
    row, column, value = (np.concatenate(part) for part in zip(*rows.triplets, strict=True))
    order = np.lexsort((column, row))
    order = order[value[order] != 0]
    proto.linear_constraint_matrix.row_ids.extend(row[order].tolist())
    proto.linear_constraint_matrix.column_ids.extend(column[order].tolist())
    proto.linear_constraint_matrix.coefficients.extend(value[order].tolist())
    return proto


def solve_ilp(r: Reduced, budget: float | None, time_limit_s: float) -> Answer:
    """LP, then MIP when the LP is fractional. `chosen` is None when no answer was found in time (or none exists)."""
    if not r.cost:
        fits = budget is None or r.constant_memory <= budget * (1 + 1e-12)
        return Answer({} if fits else None, 0.0, True)
    model = _build(r, budget)
    is_large = len(model.proto.variables.ids) > _MANY
    close = _CLOSE_OF_MANY if is_large else CLOSE
    limit = datetime.timedelta(seconds=max(time_limit_s, 0.1))
    lp = _solved(model, mathopt.SolveParameters(time_limit=limit))
    if lp is None:
        return Answer(None, -float("inf"), False)
    reason = lp.result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return Answer(None, float("inf"), True)
    if not lp.result.has_primal_feasible_solution():
        return Answer(None, -float("inf"), False)
    bound = lp.result.objective_value() * model.scale
    chosen, whole = _read(r, model, lp.values)
    if whole:
        return Answer(chosen, bound, True)
    if budget is None:
        chosen, cost = polished(r, chosen, bound + close * abs(bound))
        if cost - bound <= close * abs(bound):
            return Answer(chosen, bound, True)
    for i in range(model.first_edge):
        model.proto.variables.integers[i] = True
    if is_large:
        limit = min(limit, _TIMES_LP * lp.result.solve_stats.solve_time)
    mip = _solved(model, mathopt.SolveParameters(time_limit=limit, relative_gap_tolerance=close))
    if mip is None or not mip.result.has_primal_feasible_solution():
        return Answer(chosen if budget is None else None, bound, False)
    by_mip, _ = _read(r, model, mip.values)
    if budget is not None or assigned(r, by_mip) < assigned(r, chosen):
        chosen = by_mip
    return Answer(chosen, max(bound, mip.result.best_objective_bound() * model.scale), True)


@dataclass(frozen=True)
class _Solved:
    """The solver's result for a model, and the values of the binaries x in its best solution."""

    result: mathopt.SolveResult
    values: np.ndarray


def _solved(model: _Model, params: mathopt.SolveParameters) -> _Solved | None:
    """The solver's answer; None where it gives up for numerical reasons. Raises StatusNotOk for a model or parameters that are
    none.

    The model goes in as it is, and of what comes out only the x are read: MathOpt's Python would make an object of every
    variable and row, which takes longer than solving.
    """
    try:
        answer = solver.solve(
            model.proto,
            mathopt.SolverType.HIGHS.value,
            mathopt.StreamableSolverInitArguments().to_proto(),
            replace(params, highs=_ONE_THREAD).to_proto(),
            mathopt.ModelSolveParameters().to_proto(),
            None,
            mathopt.CallbackRegistration().to_proto(),
            None,
            None,
        )
    except StatusNotOk as error:
        if error.status.code().name != _GAVE_UP:
            raise
        return None
    x = np.zeros(model.first_edge)
    for i, solution in enumerate(answer.solutions):
        values = solution.primal_solution.variable_values
        if i == 0:
            ids = np.array(values.ids, int)
            x[ids[ids < len(x)]] = np.array(values.values)[ids < len(x)]
        values.Clear()
        solution.ClearField("dual_solution")
        solution.ClearField("basis")
    return _Solved(parse_solve_result(answer, mathopt.Model(), validate=False), x)


def _read(r: Reduced, model: _Model, x: np.ndarray) -> tuple[dict[int, int], bool]:
    """Position per variable, and whether the solution is whole."""
    chosen, whole = {}, True
    for v, at in model.first.items():
        part = x[at : at + len(r.cost[v])]
        chosen[v] = int(np.argmax(part))
        whole &= float(part.max()) > 1 - 1e-6
    return chosen, whole
