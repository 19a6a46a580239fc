"""Fake parameters are made once, and are parameters."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture.export.fake import fake_mode, faked


def test_a_trained_parameter_is_its_own_copy_and_others_are_copied() -> None:
    mode, model = fake_mode(), nn.BatchNorm1d(4)
    model.bias.requires_grad_(False)
    with faked(model, mode):
        weight, bias = model.weight, model.bias
        assert isinstance(weight, nn.Parameter)
        assert weight.is_leaf
        assert (weight.requires_grad, bias.requires_grad) == (True, False)
        assert mode.from_tensor(weight, static_shapes=True) is weight
        for other in (bias, model.running_mean):
            assert isinstance(other, torch.Tensor)
            assert mode.from_tensor(other, static_shapes=True) is not other
