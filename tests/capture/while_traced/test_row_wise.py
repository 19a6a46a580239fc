"""Functions that treat rows one by one are told from those that do not, by the rules of the ops that they consist of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten

from autopar.capture.while_traced.row_wise import HOW_MANY, Rows, RowWise, row_wise

X, W = torch.randn(24, 8), torch.randn(8, 8)
Q = torch.randn(24, 2, 6, 4)
FIRST = (Rows(0),)
WISE: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Rows, ...]]] = {
    "linear": (F.linear, (X, W), FIRST),
    "layer norm": (F.layer_norm, (X, (8,)), FIRST),
    "softmax": (F.softmax, (X, -1), FIRST),
    "dropout": (F.dropout, (X, 0.1, True), FIRST),
    "attention": (F.scaled_dot_product_attention, (Q, Q, Q), FIRST),
    "convolution": (F.conv1d, (torch.randn(24, 8, 5), torch.randn(4, 8, 3)), FIRST),
    "split dim": (Tensor.view, (X, HOW_MANY, 2, 4), FIRST),
    "merged dim": (Tensor.view, (X, -1, 4), (Rows(0, 2),)),
    "transposed": (Tensor.t, (X,), (Rows(1),)),
    "stacked": (torch.stack, ([X, X],), (Rows(1),)),
    "sorted within": (torch.sort, (X, -1), (Rows(0), Rows(0))),
    "made": (torch.zeros, (HOW_MANY, 3), FIRST),
    "looked up": (Tensor.__getitem__, (W, torch.randint(0, 8, (24,))), FIRST),
}
AMONG: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "softmax": (F.softmax, (X, 0), "_softmax"),
    "sum": (Tensor.sum, (X, 0), "sum"),
    "cumsum": (torch.cumsum, (X, 0), "cumsum"),
    "batch norm": (F.batch_norm, (X, None, None, None, None, True), "batch_norm"),
    "products of rows": (lambda x: x @ x.T, (X,), "einsum"),
    "place": (torch.tril, (X,), "tril"),
    "slice": (Tensor.__getitem__, (X, slice(0, 5)), "slice"),
    "numbered": (torch.arange, (HOW_MANY,), "arange"),
}


def known(func: Any, args: tuple[Any, ...]) -> RowWise | str:
    leaves, spec = tree_flatten((args, {}))
    rows = {i: Rows(0) for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.shape[0] == 24}
    return row_wise(func, leaves, spec, rows)


@pytest.mark.parametrize("name", WISE)
def test_the_results_have_rows_where_the_rules_say(name: str) -> None:
    func, args, results = WISE[name]
    found = known(func, args)
    assert isinstance(found, RowWise), found
    assert found.results == results


@pytest.mark.parametrize("name", AMONG)
def test_the_op_that_mixes_rows_is_named(name: str) -> None:
    func, args, op = AMONG[name]
    found = known(func, args)
    assert isinstance(found, str)
    assert op in found


def test_rows_of_no_mask_do_not_fit() -> None:
    leaves, spec = tree_flatten(((X, torch.randn(24, 8)), {}))
    assert isinstance(row_wise(Tensor.add, leaves, spec, {0: Rows(0)}), str)


@pytest.mark.parametrize(
    ("func", "finite"), [(torch.log, False), (torch.exp, False), (F.gelu, True), (torch.square, True)]
)
def test_slopes_without_bound_are_told(func: Any, finite: bool) -> None:
    found = known(func, (X,))
    assert isinstance(found, RowWise)
    assert found.finite is finite


def test_views_and_writes_are_told() -> None:
    view, write = known(Tensor.view, (X, HOW_MANY, 2, 4)), known(Tensor.mul_, (X, 2))
    assert isinstance(view, RowWise)
    assert isinstance(write, RowWise)
    assert (view.view, view.writes, write.writes) == (True, (), (0,))
