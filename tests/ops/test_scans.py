"""Scans over a dim in blocks: values and gradients are those of one device, forward and backward, on 2, 4 and 8 ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import autopar
from autopar.counter import ByteCounter
from autopar.errors import InputError
from autopar.ir.mesh import Mesh
from autopar.passes.rules.book import RuleBook
from autopar.runtime import run_threads
from autopar.runtime.comm.axis_comm import Along
from autopar.runtime.kernels import scans
from tests.ops.traced import check_carried, check_gradients

RULES = RuleBook()
RANKS = (2, 4, 8)


def loop(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """h[t] = a[t] · h[t-1] + b[t], step by step."""
    h, states = torch.zeros_like(b.select(dim, 0)), []
    for t in range(b.shape[dim]):
        h = a.select(dim, t) * h + b.select(dim, t)
        states.append(h)
    return torch.stack(states, dim)


SCANS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "cumsum": (torch.cumsum, {"aten.cumsum", "autopar.cumsum_back"}),
    "cumprod": (torch.cumprod, {"aten.cumprod", "autopar.linear_scan_back"}),
    "cummax": (lambda x, dim: tuple(torch.cummax(x, dim)), {"aten.cummax", "autopar.cumextreme_back"}),
    "cummin": (lambda x, dim: tuple(torch.cummin(x, dim)), {"aten.cummin", "autopar.cumextreme_back"}),
    "logcumsumexp": (torch.logcumsumexp, {"aten.logcumsumexp", "aten.flip"}),
    "flip": (lambda x, dim: x.flip(dim), {"aten.flip"}),
    "roll": (lambda x, dim: x.roll((5, -1), (dim, (dim + 1) % x.ndim)), {"aten.roll"}),
    "softmax": (torch.softmax, {"aten._softmax", "aten._softmax_backward_data"}),
    "log_softmax": (torch.log_softmax, {"aten._log_softmax", "aten._log_softmax_backward_data"}),
}


def drawn(data: st.DataObject, kinds: tuple[str, ...] = ("any", "ties", "zeros")) -> tuple[Tensor, int, Mesh]:
    """A tensor, a dim of it, and ranks that this dim divides by."""
    ranks = data.draw(st.sampled_from(RANKS))
    shape = [data.draw(st.sampled_from((1, 2, 3))) for _ in range(data.draw(st.integers(1, 2)))]
    dim = data.draw(st.integers(0, len(shape)))
    shape.insert(dim, ranks * data.draw(st.integers(1, 4)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    kind = data.draw(st.sampled_from(kinds))
    if kind != "any":
        x = x.round() if kind == "ties" else x * (torch.rand(shape, generator=generator) < 0.7)
    return x.requires_grad_(), dim, Mesh.of(a=ranks)


def sweep(name: str, examples: int) -> None:
    function, ops = SCANS[name]

    @settings(max_examples=examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        x, dim, mesh = drawn(data)
        template, values = check_gradients(lambda x: function(x, dim), [x])
        carried = check_carried(template, values, RULES, mesh)
        assert carried >= ops

    check()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SCANS)
def test_over_blocks_it_is_that_of_one_device(name: str) -> None:
    sweep(name, 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCANS)
def test_over_blocks_it_is_that_of_one_device_at_length(name: str) -> None:
    sweep(name, 300)


def _recurrences(examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        b, dim, mesh = drawn(data)
        fewer = [n if i == dim or data.draw(st.booleans()) else 1 for i, n in enumerate(b.shape)]
        least = data.draw(st.sampled_from((-1.0, 0.0)))
        a = torch.empty(fewer, dtype=torch.float64).uniform_(least, 1).requires_grad_()
        template, values = check_gradients(lambda a, b: autopar.linear_scan(a, b, dim), [a, b])
        carried = check_carried(template, values, RULES, mesh)
        assert carried == {"autopar.linear_scan", "autopar.linear_scan_back"}
        theirs = loop(a.expand_as(b), b, dim)
        pull = torch.randn_like(theirs)
        ours = autopar.linear_scan(a, b, dim)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        expected = torch.autograd.grad(theirs, (a, b), pull)
        for got, wanted in zip(torch.autograd.grad(ours, (a, b), pull), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)

    check()


def test_a_linear_recurrence_is_the_loop_over_its_steps() -> None:
    _recurrences(25)


@pytest.mark.slow
def test_a_linear_recurrence_is_the_loop_over_its_steps_at_length() -> None:
    _recurrences(400)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 13, 64, 1000])
def test_a_scan_without_a_loop_is_the_loop(steps: int) -> None:
    a, b = torch.rand(2, steps, 3, dtype=torch.float64) * 2 - 1, torch.randn(2, steps, 3, dtype=torch.float64)
    got, expected = autopar.linear_scan(a, b, 1), loop(a, b, 1)
    assert (got - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_a_scan_needs_as_much_memory_as_its_operands_beside_its_result() -> None:
    a, b = torch.rand(4096, 32), torch.rand(4096, 32)
    counter = ByteCounter()
    with counter:
        h = scans.linear_scan(a, b, 0)
    assert counter.peak <= 2.1 * h.nbytes


def test_complex_factors_are_conjugated_on_the_way_back() -> None:
    a, b = (torch.randn(9, 2, dtype=torch.complex128, requires_grad=True) for _ in range(2))
    pull = torch.randn(9, 2, dtype=torch.complex128)
    expected = torch.autograd.grad(loop(a, b, 0), (a, b), pull)
    for got, wanted in zip(torch.autograd.grad(autopar.linear_scan(a, b, 0), (a, b), pull), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"linear_scan of \(4, 3\) and \(4, 2\) along 0"):
        autopar.linear_scan(torch.ones(4, 3), torch.ones(4, 2), 0)


def on_ranks(ranks: int, function: Callable[[Tensor, Along], Any], x: Tensor, dim: int) -> list[Any]:
    """The result that every rank makes of its block."""
    blocks = x.chunk(ranks, dim)
    return run_threads(ranks, {"a": ranks}, lambda comm: function(blocks[comm.rank], Along(comm, "a")), timeout_s=30)


BAD = torch.tensor(
    [
        [1.0, 2, math.nan, 3, 3, 0, math.nan, 1],
        [-math.inf] * 8,
        [-math.inf] * 4 + [1.0, 2, -math.inf, 0],
        [math.inf, 1, 2, 3, 4, math.inf, 0, -math.inf],
    ],
    dtype=torch.float64,
)
"""NaN, rows and blocks of -inf, +inf: rows of eight."""


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["cumsum", "cummax", "cummin", "logcumsumexp", "cumprod"])
def test_infinities_and_nan_go_on_into_the_next_blocks(name: str, ranks: int) -> None:
    expected = getattr(torch, name)(BAD, 1)
    blocks = on_ranks(ranks, lambda x, along: getattr(scans, name)(x, 1, along=along), BAD, 1)
    if isinstance(expected, Tensor):
        torch.testing.assert_close(torch.cat(blocks, 1), expected, equal_nan=True)
    else:
        for got, wanted in zip(zip(*blocks, strict=True), expected, strict=True):
            torch.testing.assert_close(torch.cat(got, 1), wanted, equal_nan=True)
