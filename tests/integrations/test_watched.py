"""Who writes to a model whose weights a program has, or freezes a part of it, is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.errors import InputError
from autopar.integrations.watched import Watched


def test_writes_and_frozen_parameters_are_named_until_they_are_settled() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    watched = Watched(model)
    model(torch.ones(1, 2)).sum().backward()
    model.zero_grad()
    watched.check_written("say so")
    with torch.no_grad():
        model[1].weight.mul_(0.5)
    with pytest.raises(InputError, match=r"1\.weight .* was written to.*: say so"):
        watched.check_written("say so")
    watched.settle()
    watched.check_written("say so")
    watched.check_trained()
    model[0].bias.requires_grad_(False)
    watched.settle()
    with pytest.raises(InputError, match=r"0\.bias was frozen or unfrozen"):
        watched.check_trained()
