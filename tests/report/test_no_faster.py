"""`save(also=…)` says which numbers of ranks gain nothing over smaller ones."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.report.words import no_faster


def test_a_number_of_ranks_is_compared_with_the_fastest_smaller_one():
    assert no_faster({4: 1.0, 2: 2.0, 1: 3.0}) == []
    (line,) = no_faster({1: 1.0, 2: 0.5, 3: 0.6, 4: 0.4})
    assert line.startswith("a step on 3 ranks is predicted to take 600 ms, no less than the 500 ms on 2;")
    assert [line.split()[3] for line in no_faster({1: 1.0, 2: 1.0, 4: 2.0})] == ["2", "4"]


def test_saving_says_so(tmp_path):
    """A step over a slow link takes longer than on one rank."""
    local = autopar.ClusterSpec.local(2)
    program = autopar.compile(
        nn.Linear(512, 512),
        replace(local, levels=tuple(replace(level, bandwidth_Bps=1e6) for level in local.levels)),
        (torch.zeros(2, 512), torch.zeros(2, 512)),
        loss_fn=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        options=autopar.Options(mesh={"dp": 2}),
    )
    with pytest.warns(UserWarning, match=r"save\(also=…\): a step on 2 ranks is predicted to take .* on 1; a run that"):
        program.save(tmp_path / "out", also=[autopar.ClusterSpec.local(1)])
