"""CP-SAT asked for a solution, where a model that is none is a fault of who built it and no answer."""

from __future__ import annotations

from ortools.sat.python import cp_model


def solved(solver: cp_model.CpSolver, model: cp_model.CpModel) -> cp_model.CpSolverStatus:
    """The status after solving, in the solver's time. Raises ValueError for a model that CP-SAT cannot read, which is not to be
    taken for one that has no solution."""
    status = solver.solve(model)
    if status == cp_model.MODEL_INVALID:
        raise ValueError(f"CP-SAT was given a model that is none: {model.validate() or 'it does not say why'}")
    return status
