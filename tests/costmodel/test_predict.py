"""`predict` prices plans of a compiled program."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import ClusterSpec
from autopar.costmodel import predict


def test_predict_prices_own_and_other_plans() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    batch = (torch.randn(8, 16), torch.zeros(8, dtype=torch.long))
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    program = autopar.compile(model, ClusterSpec.local(2), batch, loss_fn=F.cross_entropy, optimizer=optimizer)
    assert predict(program) == program.predicted
    other = autopar.random_plan(program, 3)
    found = predict(program, other)
    assert found.step_time_s == pytest.approx(program.with_plan(other).predicted.step_time_s)
    assert found.step_time_s >= program.predicted.step_time_s
    assert found.peak_bytes > 0
