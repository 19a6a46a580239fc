"""CP-SAT asked for a solution, where a model that is none is a fault of who built it and no answer.

It is imported for the first model that is built: that takes half a second, which a program that was kept needs not wait for.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


def cp_sat() -> ModuleType:
    """The module of CP-SAT's models and solvers."""
    from ortools.sat.python import cp_model

    return cp_model


def solved(solver: cp_model.CpSolver, model: cp_model.CpModel) -> cp_model.CpSolverStatus:
    """The status after solving, in the solver's time. Raises ValueError for a model that CP-SAT cannot read, which is not to be
    taken for one that has no solution."""
    status = solver.solve(model)
    if status == cp_sat().MODEL_INVALID:
        raise ValueError(f"CP-SAT was given a model that is none: {model.validate() or 'it does not say why'}")
    return status


def counted_solver(time_limit_s: float, seed: int = 0) -> cp_model.CpSolver:
    """A solver that ends after so many seconds of its own clock, which counts work, and so answers alike on every machine."""
    solver = cp_sat().CpSolver()
    solver.parameters.max_deterministic_time = time_limit_s
    solver.parameters.max_time_in_seconds = 10 * time_limit_s
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    return solver
