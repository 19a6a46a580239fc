"""The parts of a step by what limits them, where the whole is known."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import autopar
from autopar.report.advice.limits import predicted_limits

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def test_the_host_has_the_launches_that_come_once_a_step() -> None:
    """One small product on one H100, whose kernels take next to nothing."""
    with torch.device("meta"):
        model, x = nn.Linear(8, 1), torch.empty(8, 8)
    node = autopar.ClusterSpec.preset("dgx-h100")
    cluster = autopar.ClusterSpec("one", ((1, node.device(0)),), node.levels[:1])
    program = autopar.compile(model, cluster, (x,), loss_fn=lambda y: y.sum(), optimizer=SGD)
    (own,), once_s = predicted_limits(program), program.account.software.constants.once_host_s
    assert once_s > 0
    assert own.seconds["host"] > 0.99 * once_s
    assert own.seconds["overhead"] == pytest.approx(0, abs=1e-3 * once_s)
    assert sum(own.seconds.values()) == pytest.approx(program.account.step_time_s, rel=1e-12)
