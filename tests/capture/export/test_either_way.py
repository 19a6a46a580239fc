"""Branches that repair are computed both ways: every batch has its own, in values and in gradients; all others are guards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.capture import capture_program
from tests.capture.equal import SGD, Net

Case = Callable[..., Tensor]


def finite(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    if torch.isinf(h).any() or torch.isnan(h).any():
        h = torch.nan_to_num(h).clamp(-3, 3)
    return net.last(torch.dropout(torch.relu(h), 0.5, True))


def lengths(net: Net, x: Tensor, n: Tensor) -> Tensor:
    if (n == 0).any():
        n = n.clamp(min=1)
    return net.last(net.first(x) / n[:, None])


def scaled(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    return net.last(h / h.norm() if h.norm() > 3 else h)


def steep(net: Net, x: Tensor) -> Tensor:
    """The side that is not taken has infinite slopes and no numbers where the other one is taken."""
    h = net.first(x)
    if (x < 0).any():
        h = h.clamp(min=0) + x
    else:
        h = torch.sqrt(x) * h + h / x
    return net.last(h)


def noted(net: Net, x: Tensor) -> Tensor:
    """The second branch acts on what the first one leaves in Python."""
    h, large = net.first(x), False
    if h.norm() > 3:
        h, large = h * 0.5, True
    if (x > 2).any():
        h = h * 2 if large else h * 3
    return net.last(h)


def drawn() -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def spoiled(value: float) -> Tensor:
    x = drawn()
    x[2, 3] = value
    return x


COUNTS = torch.tensor([1, 2, 3, 4, 1, 2, 3, 4])
REPAIRS: dict[str, tuple[Case, tuple[tuple[Tensor, ...], ...]]] = {
    "finite": (finite, ((drawn(),), (spoiled(float("inf")),), (spoiled(float("nan")),))),
    "infinite": (finite, ((spoiled(float("inf")),), (drawn(),))),
    "lengths": (lengths, ((drawn(), COUNTS), (drawn(), COUNTS - 1))),
    "small": (scaled, ((drawn() / 10,), (drawn() * 10,))),
    "large": (scaled, ((drawn() * 10,), (drawn() / 10,))),
    "steep": (steep, ((drawn(),), (drawn().abs(),), (drawn().relu() - 0.0,))),
    "noted": (noted, ((drawn() / 99,), (drawn() / 9,), (drawn() * 9,), (drawn() * 0 + 2.5,), (drawn() * 0 - 9,))),
}
"""Name: a branch; an example, and batches that go other ways."""


QUICK = ("finite", "lengths", "steep")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in REPAIRS])
def test_every_batch_is_repaired_as_eager_repairs_it(name: str) -> None:
    torch.manual_seed(0)
    case, batches = REPAIRS[name]
    model = Net(case)
    program = trained(model, batches[0])
    assert not program.captured.exported.followed
    random = program.with_plan(autopar.random_plan(program, 0)) if name == "lengths" else program
    for batch in batches:
        assert autopar.verify(random, model, batch).ok, batch


def trained(model: Net, batch: tuple[Tensor, ...], **options: Any) -> autopar.Program:
    cluster = autopar.ClusterSpec.local(2)
    return autopar.compile(model, cluster, batch, loss_fn=squares, optimizer=SGD, options=autopar.Options(**options))


def squares(out: Tensor) -> Tensor:
    return (out**2).mean()


def works(net: Net, x: Tensor) -> Tensor:
    return net.first(x) if x.sum() > 0 else net.last(x)


def chooses_parameters(net: Net, x: Tensor) -> Tensor:
    return net.last(net.first(x)) if x.sum() > 0 else net.first(net.last(x))


def cuts_gradients(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    return net.last(h.detach() if h.norm() > 3 else h)


def draws(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    return net.last(torch.nn.functional.dropout(h, 0.5) if h.norm() > 3 else h)


def has_other_sizes(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    return net.last(h)[:, :4] if h.norm() > 3 else net.last(h)


def goes_on(net: Net, x: Tensor) -> Tensor:
    while x.abs().max() > 2:
        x = x / 2
    return net.last(net.first(x))


def asks_often(net: Net, x: Tensor) -> Tensor:
    for k in range(4):
        if (x > k).all():
            x = x / 2
    return net.last(net.first(x))


def raises(net: Net, x: Tensor) -> Tensor:
    assert (x < 99).all()
    return net.last(net.first(x))


GUARDED: list[Case] = [works, chooses_parameters, cuts_gradients, draws, has_other_sizes, goes_on, asks_often, raises]


@pytest.mark.parametrize("case", GUARDED, ids=lambda case: case.__name__)
def test_what_does_more_than_repair_goes_the_way_of_the_example(case: Case) -> None:
    captured = capture_program(Net(case), (drawn(),), squares)
    assert captured.exported.followed


@pytest.mark.parametrize("options", [{"branches": "guard"}, {"microbatches": 2}], ids=str)
def test_a_guard_may_be_asked_for_and_stands_in_microbatches(options: dict[str, Any]) -> None:
    model = Net(lengths)
    program = trained(model, (drawn(), COUNTS), **options)
    assert autopar.verify(program, model, (drawn(), COUNTS)).ok
    with pytest.raises(autopar.GuardError, match="this depends on the data"):
        program.run([(drawn(), COUNTS - 1)])
