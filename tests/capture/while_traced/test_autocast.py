"""Regions under torch.autocast: the program casts as eager does, and is held to eager in float64 and in its own dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import capture_program
from autopar.errors import InputError
from autopar.ir.program import Program, op_name
from tests.capture.equal import Net, assert_equal_to_eager, compiled, square
from tests.capture.nets import refusal
from tests.proof.precise import eager, emitted

X, IMAGES, IDS = torch.randn(4, 6, 8), torch.randn(4, 4, 6, 6), torch.randint(0, 8, (4, 6))
Forward = Callable[..., Tensor]


def inside(f: Forward, low: torch.dtype = torch.bfloat16) -> Forward:
    """All of a forward in one region."""

    def run(*args: Any) -> Tensor:
        with torch.autocast("cpu", dtype=low):
            return f(*args)

    return run


def _part(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.first(x).relu()
    return m.last(y.float())


def _nested(m: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        y = m.first(x)
        with torch.autocast(x.device.type, enabled=False):
            y = m.last(y.float())
        return m.first(y)


def _off(m: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return m.last(m.first(x.float()).sin())


@torch.autocast("cpu", dtype=torch.bfloat16)
def _decorated(m: Any, x: Tensor) -> Tensor:
    return m.last(m.first(x).relu()).softmax(-1)


def _attend(m: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(m.first(x)[:, None], m.last(x)[:, None], x[:, None])


def _no_grad(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    with torch.no_grad():
        gate = h.exp()
    return h * gate


CASES: dict[str, tuple[Forward, Tensor, dict[str, nn.Module]]] = {
    "a part": (_part, X, {}),
    "nested": (_nested, X, {}),
    "switched off": (_off, X, {}),
    "a decorator": (_decorated, X, {}),
    "attention": (inside(_attend), X, {}),
    "without gradients inside": (inside(_no_grad), X, {}),
    "layer norm": (inside(lambda m, x: m.n(m.first(x)).float()), X, {"n": nn.LayerNorm(8)}),
    "rms norm": (inside(lambda m, x: m.last(m.n(m.first(x)))), X, {"n": nn.RMSNorm(8)}),
    "einsum and matmul": (
        inside(lambda m, x: torch.einsum("bsi,oi->bso", x, m.first.weight) @ m.last(x).mT @ x),
        X,
        {},
    ),
    "convolution and batch norm": (
        inside(lambda m, x: F.max_pool2d(m.n(m.c(x)).relu(), 2)),
        IMAGES,
        {"c": nn.Conv2d(4, 4, 3), "n": nn.BatchNorm2d(4)},
    ),
    "group norm": (inside(lambda m, x: m.n(m.c(x))), IMAGES, {"c": nn.Conv2d(4, 4, 3), "n": nn.GroupNorm(2, 4)}),
    "an encoder layer": (
        inside(lambda m, x: m.t(x)),
        X,
        {"t": nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)},
    ),
    "a loss": (inside(lambda m, x: F.cross_entropy(m.first(x).flatten(0, 1), IDS.flatten())), X, {}),
    "concatenation of two dtypes": (inside(lambda m, x: torch.cat([m.first(x), x], -1)), X, {}),
    "float16": (inside(lambda m, x: m.first(x).relu(), torch.float16), X, {}),
}


def _model(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    forward, x, modules = CASES[name]
    torch.manual_seed(0)
    return Net(lambda net, *inputs: square(forward(net, *inputs).float()), **modules), (x,)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_a_region_equals_eager_in_float64(name: str) -> None:
    model, batch = _model(name)
    assert_equal_to_eager(model, batch, ranks=4, seeds=(0, 1))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
def test_a_region_rounds_as_eager_does(name: str) -> None:
    """One step in the model's dtypes: as far from eager's as sums in another order are, in the unit of 16 bits."""
    model, batch = _model(name)
    program = compiled(model, batch)
    found, wanted = emitted(program, batch, 1), eager(program, model, batch, 1, torch.float32)
    assert torch.allclose(found.losses, wanted.losses, rtol=4e-3)
    start = dict(model.named_parameters())
    for parameter, value in wanted.parameters.items():
        way = (value - start[parameter].double()).norm()
        assert (found.parameters[parameter] - value).norm() <= 0.02 * way + 1e-7, parameter


def _products(program: Program) -> set[torch.dtype]:
    nodes = [n for t in program.templates.values() for n in t.ops if op_name(n.target).startswith("autopar.linear")]
    return {n.meta["type"].dtype for n in nodes}


def test_products_are_those_of_the_region() -> None:
    def captured(forward: Forward) -> Program:
        return capture_program(Net(forward), (X,), lambda out: square(out.float()))[0]

    low = captured(lambda m, x: torch.autocast("cpu", dtype=torch.bfloat16)(m.first)(x))
    assert _products(low) == {torch.bfloat16}
    assert _products(captured(_part)) == {torch.bfloat16, torch.float32}
    assert _products(captured(_off)) == {torch.float32}


def test_no_grad_inside_a_region_that_is_off_keeps_its_values_from_the_gradient() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return _no_grad(m, x)

    assert_equal_to_eager(Net(forward), (X,), square)


def test_a_region_of_another_device_is_refused_with_its_line() -> None:
    message = refusal(Net(lambda m, x: torch.autocast("cuda", dtype=torch.bfloat16)(m.first)(x)))
    assert "test_autocast.py" in message
    assert "Options(precision=" in message


def test_an_op_whose_casts_are_not_known_is_refused_by_name() -> None:
    message = refusal(Net(inside(lambda m, x: m.cell(x)), cell=nn.GRUCell(8, 8)))
    assert "gru_cell" in message
    assert "Options(precision=" in message


class Product(torch.autograd.Function):
    """Autocast would cast inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x @ w).float()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.t(), x.flatten(0, -2).t() @ g.flatten(0, -2)


def test_a_function_of_the_users_own_is_refused_inside_a_region() -> None:
    assert "torch.autograd.Function" in refusal(Net(inside(lambda m, x: Product.apply(x, m.first.weight))))


def test_compile_under_autocast_is_refused() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(InputError, match="call it outside"):
        autopar.compile(Net(lambda m, x: m.first(x)), autopar.ClusterSpec.local(2), (X,), loss_fn=square)
