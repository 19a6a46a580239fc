"""Small nets with a forward and attributes of one's own, and what capture says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture_program
from autopar.capture.examples.inputs import split_example
from autopar.errors import CaptureError
from autopar.ir.program import Program
from tests.capture.equal import Net

X = torch.randn(4, 8)
Forward = Callable[[Net, Tensor], Any]


def squares(out: Tensor) -> Tensor:
    return (out**2).sum()


def capture(model: nn.Module, inputs: Any = (X,), loss_fn: Any = squares, branches: str = "guard") -> Program:
    inputs, targets = split_example(model, inputs, loss_fn)
    return capture_program(model, inputs, loss_fn, targets, branches=branches)[0]


def refusal(
    model: nn.Module,
    inputs: Any = (X,),
    loss_fn: Any = squares,
    kind: type[Exception] = CaptureError,
    branches: str = "guard",
) -> str:
    with pytest.raises(kind) as caught:
        capture(model, inputs, loss_fn, branches)
    return str(caught.value)


def plain(**attributes: Any) -> Net:
    """A net without peculiarities, and some attributes."""
    return with_attributes(lambda net, x: net.last(net.first(x)), **attributes)


def with_attributes(f: Forward, **attributes: Any) -> Net:
    model = Net(f)
    for name, value in attributes.items():
        setattr(model, name, value)
    return model
