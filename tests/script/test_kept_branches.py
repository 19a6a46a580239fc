"""Programs that go the example's way through branches on data are kept for examples of the same numbers; others for all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api import request_of
from autopar.script import cache, together
from autopar.script.fingerprint import fingerprint


class Net(nn.Module):
    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.inner, self.asks = nn.Linear(4, 4), asks

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return h @ h.mT @ h if self.asks and x.sum() < 0 else h


def directory(asks: bool, value: float) -> Path:
    torch.manual_seed(0)
    given = dict.fromkeys(
        ("optimizer", "scheduler", "clip_grad_norm", "clip_grad_value", "options", "plan", "buckets", "pad_values")
    )
    batch = (torch.full((2, 4), value),)
    request = request_of(Net(asks), autopar.ClusterSpec.local(1), batch, loss_fn=None, loss_scaling=False, **given)
    return together._first_program(request, fingerprint(request))


@pytest.mark.few(1)
@pytest.mark.parametrize("asks", [False, True])
def test_an_example_of_other_numbers_has_another_program_where_branches_follow_it(
    asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "kept"))
    first, again, other = (directory(asks, value) for value in (1.0, 1.0, -1.0))
    assert first == again
    assert (first != other) == asks
