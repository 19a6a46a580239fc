"""Buffers that a step reads and then updates: who read the value from before keeps it, however it is shown."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.differential.eager import difference

Update = Callable[["Keys", Tensor], Tensor]
"""Gives the keys that a batch is held against, and updates buffers, with what the batch makes."""


class Keys(nn.Module):
    """Rows against keys that rest in buffers, as momentum contrast has them; bank: (8, 4), other: (8, 4), square: (4, 4)."""

    def __init__(self, update: Update) -> None:
        super().__init__()
        self.layer, self.update = nn.Linear(5, 4), update
        for name, rows in (("bank", 8), ("other", 8), ("square", 4)):
            self.register_buffer(name, torch.randn(rows, 4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        rows = F.normalize(self.layer(x), dim=1)
        keys = self.update(self, rows)
        return F.cross_entropy((rows @ keys.t())[:, :4], target)


def queue(m: Keys, rows: Tensor) -> Tensor:
    keys = m.bank.clone()
    with torch.no_grad():
        m.bank.copy_(torch.cat([m.bank[len(rows) :], rows.detach()]))
    return keys


def exchange(m: Keys, rows: Tensor) -> Tensor:
    before = m.bank.clone()
    m.bank.copy_(m.other)
    m.other.copy_(before)
    return m.bank


def shift(m: Keys, rows: Tensor) -> Tensor:
    m.other.copy_(m.bank)
    m.bank.mul_(0.5)
    return m.other


def turn(m: Keys, rows: Tensor) -> Tensor:
    m.square.copy_(m.square.clone().t())
    return m.square


def shown(view: Callable[[Tensor], Tensor]) -> Update:
    def update(m: Keys, rows: Tensor) -> Tensor:
        keys = view(m.bank.clone())
        m.bank.mul_(0.5)
        return keys

    return update


UPDATES: dict[str, Update] = {
    "queue": queue,
    "exchange": exchange,
    "shift": shift,
    "turn": turn,
    "slice": shown(lambda x: x[2:]),
    "split": shown(lambda x: x.split(4)[1]),
    "stack": shown(lambda x: torch.stack(x.unbind(0)[:5])),
    "reshape": shown(lambda x: x.reshape(4, 8)[:, 4:]),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("axes", [{}, {"dp": 2}], ids=str)
@pytest.mark.parametrize("name", UPDATES)
def test_what_read_a_buffer_before_its_update_has_the_value_from_before(name: str, axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = Keys(UPDATES[name]).double()
    batches = [(torch.randn(4, 5).double(), torch.randint(0, 4, (4,))) for _ in range(3)]
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    cluster = autopar.ClusterSpec.local(axes.get("dp", 1))
    program = autopar.compile(copy.deepcopy(model), cluster, batches[0], optimizer=sgd)
    result = program.run(batches)
    optimizer = sgd(model.parameters())
    losses: list[Tensor] = []
    for batch in batches:
        optimizer.zero_grad()
        losses.append(model(*batch))
        losses[-1].backward()
        optimizer.step()
    for ours, eager in zip(result.losses, losses, strict=True):
        assert abs(ours.item() - eager.item()) < 1e-12
    assert difference(result.state, model.state_dict()) < 1e-12


def test_a_buffer_that_nobody_reads_after_its_update_is_not_copied() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    batch = torch.randn(8, 6), torch.randint(0, 4, (8,))
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    program = autopar.compile(model, autopar.ClusterSpec.local(1), batch, loss_fn=F.cross_entropy, optimizer=sgd)
    read = [line for line in program.source(0).splitlines() if "= rt.buffers[" in line]
    assert read
    assert not any("clone" in line for line in read)
