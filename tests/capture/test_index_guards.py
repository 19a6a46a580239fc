"""Every integer that is used as an index is in range, or a guard says so: what eager refuses is never computed in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture_program
from autopar.ir.program import Program, op_name
from autopar.ir.ranges import Range
from autopar.runtime.errors import GuardError
from autopar.runtime.guards import Guards, InputLike, InputRange

ROWS = 5
Forward = Callable[["Table", Tensor], Tensor]


class Table(nn.Module):
    """A table of ROWS rows, and whatever a case does with it and with integers."""

    def __init__(self, f: Forward) -> None:
        super().__init__()
        self.rows = nn.Embedding(ROWS, 4)
        self.register_buffer("order", torch.tensor([4, 0, 2]), persistent=False)
        self.f = f

    def forward(self, ids: Tensor) -> Tensor:
        return self.f(self, ids)

    def scores(self, ids: Tensor) -> Tensor:
        """Of ROWS classes for every id. (rows, ROWS, columns)"""
        return self.rows.weight.t().expand(ids.shape[1], 4, ROWS).permute(1, 2, 0)


class _OwnGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.n = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return g.new_zeros(ctx.n, g.shape[1]).index_add(0, index, g), None


def _scatter(net: Table, ids: Tensor) -> Tensor:
    return torch.zeros(3, ROWS).scatter(1, ids[:3, :1], 1.0) @ net.rows.weight


AT_ENTRY: dict[str, Forward] = {
    "embedding": lambda net, ids: net.rows(ids),
    "reshaped": lambda net, ids: net.rows(ids.t().reshape(-1)),
    "wider": lambda net, ids: net.rows(ids.long()),
    "joined": lambda net, ids: net.rows(torch.cat([ids, torch.zeros_like(ids)])),
    "index_select": lambda net, ids: net.rows.weight.index_select(0, ids.flatten()),
    "gather": lambda net, ids: net.rows.weight.t().gather(1, ids),
    "brackets": lambda net, ids: net.rows.weight[ids],
    "masked": lambda net, ids: net.rows(torch.where(ids == -1, 0, ids)),
    "filled": lambda net, ids: net.rows(ids.masked_fill(ids == 7, 2)),
    "one_hot": lambda net, ids: F.one_hot(ids, ROWS).float() @ net.rows.weight,
    "cross_entropy": lambda net, ids: F.cross_entropy(net.scores(ids), ids, reduction="none"),
    "ignored": lambda net, ids: F.cross_entropy(net.scores(ids), ids, ignore_index=7, reduction="none"),
    "smoothed": lambda net, ids: F.cross_entropy(
        net.scores(ids), ids, net.rows.weight.detach()[:, 0], reduction="none", label_smoothing=0.1
    ),
    "nll": lambda net, ids: F.nll_loss(net.scores(ids), ids, reduction="none"),
    "own function": lambda net, ids: _OwnGather.apply(net.rows.weight, ids.flatten()),
}
INSIDE: dict[str, Forward] = {
    "sliced": lambda net, ids: net.rows(ids[:, 1:]),
    "shifted": lambda net, ids: net.rows(ids + 1),
    "from floats": lambda net, ids: net.rows((ids.float() * 1.5).long()),
    "scatter": _scatter,
    "counted": lambda net, ids: net.rows((ids > 0).cumsum(1) - 1),
}
PROVEN: dict[str, Forward] = {
    "positions": lambda net, ids: net.rows(torch.arange(ids.shape[1])) + ids.sum(),
    "argmax": lambda net, ids: net.rows(ids.argmax(1)),
    "remainder": lambda net, ids: net.rows(ids % ROWS),
    "clamped": lambda net, ids: net.rows(ids.clamp(0, ROWS - 1)),
    "compared": lambda net, ids: net.rows((ids > 2).long()),
    "halved": lambda net, ids: net.rows((ids % 10) // 2),
    "wrapped": lambda net, ids: torch.take_along_dim(net.rows.weight.t(), ids, 1),
    "topk": lambda net, ids: net.rows(ids.topk(2).indices) + net.rows(ids.float().sort(dim=0).indices)[:, :2],
    "constant": lambda net, ids: net.rows(net.order) + ids.sum(),
    "buckets": lambda net, ids: net.rows(torch.bucketize(ids, torch.tensor([1, 2, 3]))),
}


def captured(f: Forward) -> Program:
    return capture_program(Table(f).eval(), (torch.tensor([[0, 1, 2], [2, 3, 4], [1, 1, 0], [4, 2, 2]]),))[0]


def checks(program: Program) -> list[Range]:
    """The checks of computed values."""
    nodes = [node for template in program.templates.values() for node in template.ops]
    return [Range(*n.args[1:3]) for n in nodes if op_name(n.target) == "autopar.in_range"]


def eager_takes(f: Forward, ids: Tensor) -> bool:
    try:
        Table(f).eval()(ids)
    except (IndexError, RuntimeError):
        return False
    return True


def entry_takes(program: Program, ids: Tensor) -> bool:
    ranges = [InputRange(g.input, g.allowed.low, g.allowed.high, tuple(g.also), g.source) for g in program.guards]
    try:
        Guards().check_batch([ids], [InputLike("ids", tuple(ids.shape), (ids.dtype,))], ranges)
    except GuardError:
        return False
    return True


@pytest.mark.parametrize("case", AT_ENTRY)
def test_an_index_that_is_an_input_is_checked_at_the_entry_as_eager_checks_it(case: str) -> None:
    f = AT_ENTRY[case]
    program = captured(f)
    assert program.guards
    assert not checks(program)
    for value in (-ROWS - 1, -ROWS, -1, 0, 3, 4, 5, 7, 100):
        ids = torch.full((4, 3), value)
        assert entry_takes(program, ids) == eager_takes(f, ids), value


@pytest.mark.parametrize("case", INSIDE)
def test_an_index_that_is_computed_is_checked_where_it_is_used(case: str) -> None:
    program = captured(INSIDE[case])
    assert checks(program) == [Range(0, ROWS)]
    assert not program.guards


@pytest.mark.parametrize("case", PROVEN)
def test_an_index_that_cannot_be_out_of_range_is_not_checked(case: str) -> None:
    program = captured(PROVEN[case])
    assert not program.guards
    assert not checks(program)
