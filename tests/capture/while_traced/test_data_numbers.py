"""Numbers of the data: those that are computed with vary, those that decide sizes are the example's or stop the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from tests.capture.equal import SGD, Net, square

Case = Callable[..., Tensor]


def _factor(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    scale = x.abs().max().item()
    return net.first(x) * scale / (1 + lengths.sum().item()) - (scale - 1.0) ** 2


def _reflected(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    n, top = lengths.max().item(), x.max().item()
    return (n - net.first(x)) / (top + 3.0) + torch.where(x > 0, x, top) + x.clamp(min=-top, max=2.0)


def _filled(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    top = x.max().item()
    weights = torch.tensor([top, 1.0, -top]) + torch.full((3,), top) + torch.full_like(x[0, :3], top)
    return net.first(x).masked_fill(x < 0, top) * weights.sum()


def _list_of_numbers(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    h = net.first(x)
    return torch.stack([row * n for row, n in zip(h, lengths.tolist(), strict=True)])


def _per_row(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    h = net.first(x)
    rows = enumerate(lengths.tolist())
    return sum(h[i, :n].sum() for i, n in rows) + h.sum(0)  # here


def _longest(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    return net.first(x)[:, : int(lengths.max())]  # here


def _longest_tensor(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    return net.first(x)[:, : lengths.max()]  # here


def _repeated(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    for _ in range(int(lengths.max())):  # here
        x = net.first(x)
    return x


def _cut(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    parts = net.first(x).split(lengths.tolist(), 0)  # here
    return torch.stack([part.sum(0) for part in parts])


def _new_size(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    n = lengths.max()
    return net.first(x)[:, :1] * torch.ones(1, n) + x.sum() * torch.arange(n)  # here


def _row(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    return net.first(x) + x[lengths.argmax().item()]  # here


def _spread(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    return net.first(x).repeat_interleave(lengths, 0)  # here


def _text(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    said = f"at most {lengths.max()} of {lengths.max().item()}"  # here
    assert lengths.max() <= 5, said
    return net.first(x)


def _member(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    return net.first(x) if 5 in lengths else net.last(x)  # here


def _asserted(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    torch._assert_async(lengths.max() <= 4)  # here
    return net.first(x)


def _checked(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    torch._check_tensor_all(lengths <= 4)  # here
    torch._check(lengths.min().item() > 0)
    return net.first(x)


VARY = (_factor, _reflected, _filled, _list_of_numbers)
HELD = (
    _per_row,
    _longest,
    _longest_tensor,
    _repeated,
    _cut,
    _new_size,
    _row,
    _spread,
    _text,
    _member,
    _asserted,
    _checked,
)


def inputs(case: Case, lengths: tuple[int, ...] = (1, 1, 2, 4), seed: int = 0) -> tuple[Tensor, Tensor]:
    rows = 8 if case is _cut else len(lengths)
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)), torch.tensor(lengths)


def trained(case: Case, **options: Any) -> tuple[Net, autopar.Program]:
    torch.manual_seed(0)
    net = Net(case)
    program = autopar.compile(
        net,
        autopar.ClusterSpec.local(2),
        inputs(case),
        loss_fn=square,
        optimizer=SGD,
        options=autopar.Options(**options),
    )
    return net, program


@pytest.mark.few(1)
@pytest.mark.parametrize("case", VARY, ids=lambda case: case.__name__)
def test_numbers_that_are_computed_with_are_those_of_each_batch(case: Case) -> None:
    net, program = trained(case)
    for seed in (0, 1):
        assert autopar.verify(program, net, inputs(case, (3, 1, 2, 1 + seed), seed)).ok


@pytest.mark.few(2)
@pytest.mark.parametrize("case", HELD, ids=lambda case: case.__name__)
def test_numbers_that_decide_sizes_are_the_examples_or_stop_the_program(case: Case) -> None:
    net, program = trained(case)
    assert autopar.verify(program, net, inputs(case, seed=1)).ok
    with pytest.raises(autopar.GuardError, match="# here"):
        program.run([inputs(case, (5, 2, 1, 1))])
