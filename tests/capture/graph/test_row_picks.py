"""`x[arange(n), y]` and its kin are gathers, and `x[mask] = 0` is a choice element by element, so that every row stays by itself;
what is written twice stays as it is."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.differential.eager import LR, MOMENTUM, STEPS, difference, trained

ROWS, PLACES, CLASSES = 8, 4, 5
NUMBERS = torch.arange(ROWS)
OPTIMIZER = functools.partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM)
Pick = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Scores: (rows, classes), a map: (rows, places, classes), and whatever a case picks of them."""

    def __init__(self, pick: Pick) -> None:
        super().__init__()
        self.scores, self.map, self.pick = nn.Linear(6, CLASSES), nn.Linear(6, PLACES * CLASSES), pick

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return self.pick(self.scores(x), self.map(x).unflatten(1, (PLACES, CLASSES)), y, z).pow(3).mean()


def _written(h: Tensor, m: Tensor, y: Tensor, z: Tensor) -> Tensor:
    h = h.clone()
    h[torch.arange(len(h)), y] = m[:, 0, 0] * 2
    return h


def _masked(mask: Callable[[Tensor, Tensor], Any], value: Callable[[Tensor, Tensor], Any]) -> Pick:
    def pick(h: Tensor, m: Tensor, y: Tensor, z: Tensor) -> Tensor:
        h = h.clone()
        h[mask(h, y)] = value(m, y)
        return h

    return pick


COLUMNS = torch.tensor([True, False, True, False, False])
CASES: dict[str, Pick] = {
    "likelihood": lambda h, m, y, z: h.log_softmax(-1)[torch.arange(len(y)), y],
    "best": lambda h, m, y, z: h[NUMBERS, h.argmax(-1)],
    "from the end": lambda h, m, y, z: h[NUMBERS, y - CLASSES],
    "narrow index": lambda h, m, y, z: h[NUMBERS, y.int()],
    "row of a map": lambda h, m, y, z: m[NUMBERS, z],
    "element of a map": lambda h, m, y, z: m[NUMBERS, z, y],
    "several of each": lambda h, m, y, z: m[NUMBERS[:, None], torch.stack([z, z - 1, z], 1)],
    "of every place": lambda h, m, y, z: m[NUMBERS[:, None], torch.arange(PLACES), y[:, None].expand(-1, PLACES)],
    "the same of each": lambda h, m, y, z: m[NUMBERS, torch.tensor(2)],
    "written": _written,
    "number written": lambda h, m, y, z: h * torch.zeros_like(h).index_put((NUMBERS, y), torch.ones((), dtype=h.dtype)),
    "added": lambda h, m, y, z: h.index_put((NUMBERS[:, None], torch.stack([y, y], 1)), m[:, 0, :2], accumulate=True),
    "number where a mask is true": _masked(lambda h, y: (h < 0) & (h > -1), lambda m, y: 0.5),
    "rows of a mask": _masked(lambda h, y: y > 2, lambda m, y: 1),
    "columns of a mask": _masked(lambda h, y: (slice(None), COLUMNS), lambda m, y: 2.0),
    "computed number": _masked(lambda h, y: h < 0, lambda m, y: torch.ones(3, dtype=m.dtype).sum() / 7),
}


def _batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 6, dtype=torch.float64, generator=draws)
    y, z = (torch.randint(0, most, (ROWS,), generator=draws) for most in (CLASSES, PLACES))
    return x, y, z


@pytest.mark.few(5)
@pytest.mark.parametrize("case", CASES)
def test_what_is_picked_of_every_row_trains_in_microbatches(case: str) -> None:
    torch.manual_seed(0)
    model, batches = Net(CASES[case]).double(), [_batch(seed) for seed in range(STEPS)]
    program = autopar.compile(
        copy.deepcopy(model),
        autopar.ClusterSpec.local(2),
        batches[0],
        optimizer=OPTIMIZER,
        options=autopar.Options(microbatches=2),
    )
    ops = {call.op for template in program.ir.templates.values() for call in template.op_calls.values()}
    assert not any(op.startswith(("aten.index.", "aten.index_put", "aten.arange")) for op in ops)
    result = program.run(batches)
    ours = {f"loss {k}": loss.reshape(()).double() for k, loss in enumerate(result.losses)} | result.state
    assert difference(ours, trained(model, batches, None)) <= 1e-9


@pytest.mark.parametrize(
    "pick",
    [
        lambda h, m, y, z: h[NUMBERS.flip(0), y],
        lambda h, m, y, z: h[y % ROWS, y],
        lambda h, m, y, z: m[:, torch.arange(PLACES), z[:PLACES]],
        lambda h, m, y, z: h.index_put((NUMBERS[:, None], torch.stack([y, y], 1)), m[:, 0, :2]),
    ],
    ids=["rows in another order", "rows by data", "not of rows", "written twice"],
)
def test_other_indices_stay(pick: Pick) -> None:
    torch.manual_seed(0)
    model, batch = Net(pick), _batch(0)
    program = autopar.compile(model.double(), autopar.ClusterSpec.local(2), batch, optimizer=OPTIMIZER)
    ops = {call.op for template in program.ir.templates.values() for call in template.op_calls.values()}
    assert any(op.startswith("aten.index") for op in ops)
    assert autopar.verify(program, model, batch).max_error <= 1e-9


@pytest.mark.parametrize(
    ("place", "is_one"), [(CLASSES - 1, True), (-CLASSES, True), (CLASSES, False), (-CLASSES - 1, False)]
)
def test_an_index_out_of_range_stops_the_program(place: int, is_one: bool) -> None:
    x, y, z = _batch(0)
    program = autopar.compile(
        Net(CASES["likelihood"]).double(), autopar.ClusterSpec.local(2), (x, y, z), optimizer=OPTIMIZER
    )
    y[3] = place
    if is_one:
        program.run([(x, y, z)])
    else:
        with pytest.raises(autopar.GuardError, match=r"test_row_picks\.py:\d+"):
            program.run([(x, y, z)])


def test_rows_whose_numbers_have_no_values_stay() -> None:
    numbers = NUMBERS.to("meta")
    model, batch = Net(lambda h, m, y, z: h[numbers, y]).to("meta"), tuple(t.to("meta") for t in _batch(0))
    program = autopar.compile(
        model.double(), autopar.ClusterSpec.homogeneous(devices=2, device="h100"), batch, optimizer=OPTIMIZER
    )
    ops = {call.op for template in program.ir.templates.values() for call in template.op_calls.values()}
    assert "aten.index.Tensor" in ops
