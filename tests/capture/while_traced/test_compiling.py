"""A model that asks whether it is compiled is traced by eager's way, or by the other one where that branches on data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tests.capture.equal import Net, assert_equal_to_eager
from tests.capture.nets import X, refusal, squares


def _mask_in_eager(net: Any, x: Tensor) -> Tensor:
    mask = None
    if not torch.compiler.is_compiling():
        mask = torch.arange(8.0)
    return net.first(x) * mask[None]  # type: ignore[index]


def test_what_is_left_out_when_compiled_is_traced_as_in_eager() -> None:
    assert_equal_to_eager(Net(_mask_in_eager), (X,), squares)


def test_a_model_that_fails_in_eager_too_is_refused_with_its_line() -> None:
    def fails(net: Any, x: Tensor) -> Tensor:
        torch.compiler.is_compiling()
        return net.first(x) * None

    assert "test_compiling.py" in refusal(Net(fails))


def test_where_both_ways_can_be_traced_eagers_is() -> None:
    def asks(net: Any, x: Tensor) -> Tensor:
        return net.first(x) if torch.compiler.is_compiling() else net.last(net.first(x))

    assert_equal_to_eager(Net(asks), (X,), squares)


def test_a_branch_on_data_that_is_left_out_when_compiled_is_left_out() -> None:
    def checks(net: Any, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and not x.isfinite().all():
            raise ValueError("not finite")
        return net.first(x)

    assert_equal_to_eager(Net(checks), (X,), squares)


def test_a_check_that_is_left_out_when_compiled_or_traced_is_asked_of_no_example_beside_another_branch() -> None:
    def checks(net: Any, x: Tensor) -> Tensor:
        traced = torch.compiler.is_compiling() or isinstance(x, FakeTensor)
        if not traced and x.isnan().any():
            raise ValueError("not a number")
        return net.last(net.first(x)) if x.sum() > 1e6 else net.first(x)

    assert_equal_to_eager(Net(checks), (X,), squares, seeds=())
