"""A model that is none is a fault of who built it: no solver may take it for one that has no solution."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ortools.math_opt.python import mathopt
from ortools.sat.python import cp_model

from autopar.passes.shard import ilp
from autopar.passes.shard.reduce import Reduced
from autopar.passes.solvers.cp_sat import solved


def two_states() -> ilp._Model:
    """minimize x0 + 2 x1, where x0 + x1 = 1"""
    rows = ilp._Rows()
    ilp._one_state_each(rows, ilp._Columns({0: 0}, [], 2, np.array([1.0, 2.0])), _reduced())
    return ilp._Model(ilp._proto(np.array([1.0, 2.0]), rows), {0: 0}, 1.0, 2)


def _reduced() -> Reduced:
    return type("OneVariable", (), {"cost": {0: np.array([1.0, 2.0])}})()  # type: ignore[return-value]


def no_number(model: ilp._Model) -> None:
    model.proto.objective.linear_coefficients.values[0] = float("nan")


def bounds_crossed(model: ilp._Model) -> None:
    model.proto.linear_constraints.lower_bounds[0] = 3.0
    model.proto.linear_constraints.upper_bounds[0] = 2.0


def no_such_column(model: ilp._Model) -> None:
    model.proto.linear_constraint_matrix.column_ids[1] = 7


def test_the_model_of_these_tests_is_solved() -> None:
    answer = ilp._solved(two_states(), mathopt.SolveParameters())
    assert answer is not None
    assert answer.values.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("spoil", [no_number, bounds_crossed, no_such_column])
def test_a_model_that_is_no_linear_program_raises(spoil: Callable[[ilp._Model], None]) -> None:
    model = two_states()
    spoil(model)
    with pytest.raises(Exception, match="INVALID_ARGUMENT"):
        ilp._solved(model, mathopt.SolveParameters())


def test_a_parameter_that_highs_does_not_have_raises() -> None:
    with pytest.raises(Exception, match="cutoff_limit not supported"):
        ilp._solved(two_states(), mathopt.SolveParameters(cutoff_limit=1.0))


def test_a_mistake_in_the_call_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def misspelled(*args: object) -> None:
        raise AttributeError("no attribute 'to_prot'")

    monkeypatch.setattr(ilp.solver, "solve", misspelled)
    with pytest.raises(AttributeError):
        ilp._solved(two_states(), mathopt.SolveParameters())


def test_numbers_too_large_for_its_arithmetic_are_no_answer() -> None:
    model = two_states()
    model.proto.linear_constraint_matrix.coefficients[0] = 1e30
    assert ilp._solved(model, mathopt.SolveParameters()) is None


def test_a_model_that_is_no_constraint_program_raises() -> None:
    model = cp_model.CpModel()
    x = model.new_int_var(0, 1 << 60, "x")
    model.add(x * (1 << 40) <= 5)
    with pytest.raises(ValueError, match=r"given a model that is none: .*overflow"):
        solved(cp_model.CpSolver(), model)


def test_a_constraint_program_without_solution_is_an_answer() -> None:
    model = cp_model.CpModel()
    x = model.new_bool_var("x")
    model.add(x + x == 1)
    assert solved(cp_model.CpSolver(), model) == cp_model.INFEASIBLE
