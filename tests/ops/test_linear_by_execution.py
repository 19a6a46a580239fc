"""The linearity that the table states of ops is tested by execution: terms of a sum give terms of the sum of what they give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.ir.call import OpCall
from autopar.ir.program import op_call
from autopar.passes.batch.terms import more_linear
from tests.ops.all_generators import GENERATORS, Draw
from tests.ops.execution import Case, as_node, rule_of

aten = torch.ops.aten


def _with(case: Case, tensors: list[Tensor]) -> Case:
    """The case with these tensors, in order, for its own."""
    left = iter(tensors)

    def place(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return next(left)
        return type(arg)(place(a) for a in arg) if isinstance(arg, (list, tuple)) else arg

    args = tuple(place(a) for a in case.args)
    return Case(case.target, args, {k: place(v) for k, v in case.kwargs.items()})


def _term(x: Tensor) -> Tensor:
    """Another tensor like this one."""
    moved = x.flatten().roll(1).view(x.shape)
    return moved * 3 if not (x.is_floating_point() or x.is_complex()) else moved * 0.75 - 0.25


def check_linear(case: Case) -> int:
    """Raises AssertionError where the op is not linear in a group of operands of which the table says that it is. Number of
    groups."""
    whole = case.whole()
    node, tensors = as_node(case, whole)
    call = op_call(node)
    assert isinstance(call, OpCall)
    groups = {*map(frozenset, rule_of(call).linear), *more_linear(call)}
    for group in groups:
        other = [_term(x) if k in group else x for k, x in enumerate(tensors)]
        both = [x + other[k] if k in group else x for k, x in enumerate(tensors)]
        results = zip(whole, _with(case, other).whole(), _with(case, both).whole(), strict=True)
        for first, second, sum_ in results:
            if first is not None and second is not None and sum_ is not None:
                torch.testing.assert_close(first + second, sum_, rtol=1e-9, atol=1e-9, equal_nan=True)
    return len(groups)


def sweep(op: str, examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        case = GENERATORS[op](Draw(data))
        if not case.shapes_only:
            check_linear(case)

    check()


@pytest.mark.parametrize("op", sorted(GENERATORS))
def test_terms_of_a_sum_give_terms_of_a_sum(op: str) -> None:
    sweep(op, 2)


@pytest.mark.slow
@pytest.mark.parametrize("op", sorted(GENERATORS))
def test_terms_of_a_sum_give_terms_of_a_sum_at_length(op: str) -> None:
    sweep(op, 100)
