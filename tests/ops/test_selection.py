"""Softmax, maxima and top-k over a dim in blocks: values, places and ties are those of one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.ir.program import op_call
from autopar.passes.rules.book import RuleBook
from autopar.runtime.kernels import selection, softmax
from tests.ops.execution import Case, as_node
from tests.ops.test_scans import BAD, RANKS, drawn, on_ranks
from tests.ops.traced import check_carried, check_gradients

aten = torch.ops.aten
RULES = RuleBook()
CHOOSERS: dict[str, tuple[Callable[..., Any], str]] = {
    "max": (lambda x, dim: tuple(x.max(dim)), "aten.max.dim"),
    "min, kept": (lambda x, dim: tuple(x.min(dim, keepdim=True)), "aten.min.dim"),
    "argmax": (lambda x, dim: (x.argmax(dim), x), "aten.argmax"),
    "argmin, kept": (lambda x, dim: (x.argmin(dim, keepdim=True), x), "aten.argmin"),
}


def sweep(name: str, examples: int) -> None:
    function, op = CHOOSERS[name]

    @settings(max_examples=examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        x, dim, mesh = drawn(data)
        assert op in check_carried(*check_gradients(lambda x: function(x, dim), [x]), RULES, mesh)

    check()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CHOOSERS)
def test_of_equal_values_the_first_is_found_as_on_one_device(name: str) -> None:
    sweep(name, 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOOSERS)
def test_of_equal_values_the_first_is_found_as_on_one_device_at_length(name: str) -> None:
    sweep(name, 300)


def _top(examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        x, dim, mesh = drawn(data, kinds=("any",))
        k, largest = data.draw(st.integers(1, x.shape[dim] - 1)), data.draw(st.booleans())
        made = check_gradients(lambda x: tuple(x.topk(k, dim, largest)), [x])
        assert check_carried(*made, RULES, mesh) >= {"aten.topk"}

    check()


def test_the_largest_entries_of_all_blocks_are_those_of_one_device() -> None:
    _top(20)


@pytest.mark.slow
def test_the_largest_entries_of_all_blocks_are_those_of_one_device_at_length() -> None:
    _top(400)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin"])
def test_nan_counts_as_on_one_device(name: str, ranks: int) -> None:
    function = {"max": selection.largest, "min": selection.smallest}.get(name) or getattr(selection, name)
    expected = getattr(torch, name)(BAD, 1)
    for got in on_ranks(ranks, lambda x, along: function(x, 1, along=along), BAD, 1):
        pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
        for one, other in pairs:
            torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("ranks", RANKS)
def test_of_equal_values_top_k_has_values_that_are_there(ranks: int) -> None:
    x = torch.randint(0, 3, (5, 16), generator=torch.Generator().manual_seed(0)).double()
    for values, places in on_ranks(ranks, lambda x, along: selection.topk(x, 6, 1, along=along), x, 1):
        torch.testing.assert_close(values, x.topk(6, 1).values, rtol=0, atol=0)
        torch.testing.assert_close(x.gather(1, places), values, rtol=0, atol=0)
        assert all(len(set(row)) == 6 for row in places.tolist())


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["_softmax", "_log_softmax", "_safe_softmax"])
def test_a_row_of_minus_infinity_is_what_it_is_on_one_device(name: str, ranks: int) -> None:
    more = () if name == "_safe_softmax" else (False,)
    blocks = on_ranks(ranks, lambda x, along: getattr(softmax, name)(x, 1, *more, along=along), BAD, 1)
    expected = getattr(aten, name)(BAD, 1, *more)
    torch.testing.assert_close(torch.cat(blocks, 1), expected, equal_nan=True, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", RANKS)
def test_half_precision_rounds_once(ranks: int) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).mul(5).bfloat16()
    blocks = on_ranks(ranks, lambda x, along: softmax._softmax(x, 1, along=along), x, 1)
    got, exact = torch.cat(blocks, 1).double(), x.double().softmax(1)
    assert ((got - exact).abs() <= exact * 2**-8).all()


def carried_by(target: Any, *args: Any, ranks: int = 2) -> list[str]:
    """The choices with messages of a call, on an axis of so many ranks."""
    case = Case(target, args, {})
    rule = RULES.rule(op_call(as_node(case, case.whole())[0]))
    return [s[0] for s in rule.strategies(Mesh.of(a=ranks)) if s[0].startswith("+")]


def test_a_dim_that_ranks_do_not_divide_is_not_carried() -> None:
    x = torch.randn(6, 2)
    assert carried_by(aten.topk.default, x, 2, 0) == ["+d0"]
    assert carried_by(aten.topk.default, x, 2, 0, ranks=4) == []
    assert carried_by(aten._softmax.default, x, 0, False, ranks=8) == []


def test_what_needs_all_of_every_block_is_not_carried() -> None:
    x = torch.randn(8, 2)
    assert carried_by(aten.sort.default, x, 0) == []
    assert carried_by(aten.topk.default, x, 8, 0) == []
    assert carried_by(aten.argmax.default, x) == []
    assert carried_by(aten.roll.default, x, [1]) == []


def test_what_is_sent_is_rows() -> None:
    """A softmax over 1024 entries on 4 ranks sends two rows of statistics, a maximum a value and a place."""
    from autopar.passes.rules.sends import sent_by

    x = torch.randn(1024, 3)

    def sent(target: Any, *args: Any) -> list[tuple[str, float]]:
        case = Case(target, args, {})
        call = op_call(as_node(case, case.whole())[0])
        return [(s.kind, s.nbytes) for s in sent_by(call, RULES.rule(call), ("+d0",), Mesh.of(a=4))]

    assert sent(aten._softmax.default, x, 0, False) == [("all_gather", 4 * 2 * 3 * 4)]
    assert sent(aten.max.dim, x, 0) == [("all_gather", 4 * 3 * 4), ("all_gather", 4 * 3 * 8)]
    assert sent(aten.topk.default, x, 5, 0) == [("all_gather", 4 * 5 * 3 * 4), ("all_gather", 4 * 5 * 3 * 8)]
    assert sent(aten.flip.default, x, [0]) == [("shift", x.nbytes / 4)]
    assert math.isclose(sent(aten.cumsum.default, x, 0)[0][1], 4 * 3 * 4)


def test_gradients_go_to_the_block_that_has_the_place() -> None:
    x = torch.randn(8, 3, dtype=torch.float64)
    values, places = x.topk(3, 0)
    blocks = on_ranks(4, lambda _, along: selection.put(values, places, 0, 2, 2 * along.index), x, 0)
    expected: Tensor = torch.zeros_like(x).scatter(0, places, values)
    torch.testing.assert_close(torch.cat(blocks), expected)
