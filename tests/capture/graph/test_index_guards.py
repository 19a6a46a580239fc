"""Every integer that is used as an index is in range, or a guard says so: what eager refuses is never computed in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture_program
from autopar.capture.graph.index_guards import _Sources, without_guards
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
        for name, rows in (("order", [4, 0, 2]), ("beyond", [4, 0, ROWS]), ("before", [4, -1, 2])):
            self.register_buffer(name, torch.tensor(rows), persistent=False)
        self.f = f

    def forward(self, ids: Tensor) -> Tensor:
        return self.f(self, ids)

    def scores(self, ids: Tensor) -> Tensor:
        """The scores of ROWS classes for every id. (rows, ROWS, columns)"""
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
    "constant with the number of rows": lambda net, ids: net.rows(net.beyond) + ids.sum(),
    "constant with a negative number": lambda net, ids: net.rows(net.before) + ids.sum(),
    "remainder by one more": lambda net, ids: net.rows(ids % (ROWS + 1)),
    "clamped one too high": lambda net, ids: net.rows(ids.clamp(0, ROWS)),
    "clamped one too low": lambda net, ids: net.rows(ids.clamp(-1, ROWS - 1)),
    "argmax of one more": lambda net, ids: net.rows(F.pad(ids, (0, 3)).argmax(1)),
    "positions to one more": lambda net, ids: net.rows(torch.arange(ROWS + 1)) + ids.sum(),
    "halved by one more": lambda net, ids: net.rows((ids % 11) // 2),
    "one bucket more": lambda net, ids: net.rows(torch.bucketize(ids, torch.arange(ROWS))),
    "zeros of a triangle, less one": lambda net, ids: net.rows((ids % 4 + 1).tril() - 1),
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
    "buckets": lambda net, ids: net.rows(torch.bucketize(ids, torch.tensor([1, 2, 3, 4]))),
    "triangle": lambda net, ids: net.rows((ids % ROWS).tril()),
}


INTEGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "tril": lambda x: (x % 3 + 2).tril(),
    "triu": lambda x: (x % 3 - 4).triu(),
    "arange": lambda x: torch.arange(7, 1, -2),
    "full": lambda x: torch.full((3,), -2),
    "ones": lambda x: torch.ones_like(x) + torch.zeros_like(x),
    "sum": lambda x: (x % 3 - 1).sum(1),
    "sum of positive": lambda x: (x % 3 + 1).sum(0),
    "cumsum": lambda x: (x % 4 - 2).cumsum(1),
    "cumsum of positive": lambda x: (x % 3 + 1).cumsum(0),
    "cumsum of negative": lambda x: (x % 3 - 4).cumsum(0),
    "count": lambda x: (x > 0).sum(),
    "difference": lambda x: (x % 4) - (x % 3),
    "product": lambda x: (x % 5 - 2) * (x % 4 - 3),
    "maximum": lambda x: torch.maximum(x % 4 - 3, x % 3 - 2),
    "minimum": lambda x: torch.minimum(x % 4 - 3, x % 3 - 1),
    "clamp": lambda x: (x % 9 - 4).clamp(-2, 3),
    "clamp_max": lambda x: (x % 9 - 4).clamp(max=2),
    "clamp with ends exchanged": lambda x: (x % 9).clamp(5, 2),
    "floor division": lambda x: (x % 9 - 4) // 3,
    "truncated division": lambda x: torch.div(x % 3 - 3, 3, rounding_mode="trunc"),
    "remainder": lambda x: x % 7,
    "negative remainder": lambda x: x % -3,
    "negated": lambda x: -(x % 4),
    "absolute": lambda x: (x % 7 - 4).abs(),
    "where": lambda x: torch.where(x > 2, x % 3, -4),
    "masked_fill": lambda x: (x % 3).masked_fill(x > 2, 9),
    "padded": lambda x: F.pad(x % 3 + 4, (1, 1)),
    "padded with": lambda x: F.pad(x % 3 + 4, (1, 1), value=-3),
    "cat": lambda x: torch.cat([x % 3, x % 4 + 3]),
    "argmax": lambda x: x.argmax(1),
    "argmax of all": lambda x: x.argmax(),
    "argsort": lambda x: x.argsort(0),
    "max": lambda x: (x % 4 - 2).max(1).values,
    "place of the max": lambda x: x.max(0).indices,
    "topk": lambda x: x.topk(2, 1).indices,
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([0, 3])),
    "searchsorted": lambda x: torch.searchsorted(torch.tensor([0, 3, 5]), x, right=True),
    "bool": lambda x: (x > 3).long(),
    "one_hot": lambda x: F.one_hot(x % 3, 4),
    "scattered": lambda x: torch.zeros(4, 3, dtype=torch.long).scatter(1, x[:, :1] % 3, x[:, :1] % 3 + 5),
    "narrower": lambda x: (x % 200).to(torch.int8).long(),
    "roll": lambda x: (x % 3 - 1).roll(1, 0),
    "twice": lambda x: torch.add(x % 3, x % 4, alpha=2),
    "shifted": lambda x: (x % 5) << 1,
    "anded": lambda x: (x % 7 - 3) & 6,
    "powers": lambda x: (x % 5 - 2) ** 2,
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


@pytest.mark.few(16)
@pytest.mark.parametrize("case", INTEGERS)
def test_a_range_of_integers_holds_all_that_is_computed(case: str) -> None:
    """The oracle is eager, on random integers of either sign."""
    f = INTEGERS[case]
    program = without_guards(captured(lambda net, ids: net.rows(f(ids) % 97 % ROWS)))
    sources = _Sources(program, {})
    (place,) = (
        (number, node)
        for number, call in enumerate(program.calls)
        for node in program.template_of(call).ops
        if op_name(node.target) == "aten.remainder.Scalar" and node.args[1] == 97
    )
    (operand,) = sources.operands(place)
    draw = torch.Generator().manual_seed(1)
    values = torch.cat([f(torch.randint(-20, 20, (4, 3), generator=draw)).flatten() for _ in range(200)])
    assert Range(int(values.min()), int(values.max()) + 1) in sources.range(operand)
