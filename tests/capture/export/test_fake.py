"""Fake parameters are made once, and are parameters."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture.export.fake import exports, fake_mode, faked


def test_export_takes_trained_parameters_as_they_are_and_copies_others() -> None:
    mode, model = fake_mode(), nn.BatchNorm1d(4)
    model.bias.requires_grad_(False)
    with faked(model, mode):
        weight, bias = model.weight, model.bias
        assert isinstance(weight, nn.Parameter)
        assert weight.is_leaf
        assert (weight.requires_grad, bias.requires_grad) == (True, False)
        with exports(model, mode):
            assert mode.from_tensor(weight, static_shapes=True) is weight
            for other in (bias, model.running_mean):
                assert isinstance(other, torch.Tensor)
                assert mode.from_tensor(other, static_shapes=True) is not other


def test_export_traces_in_the_mode_of_the_parameters() -> None:
    mode, model = fake_mode(), nn.Linear(4, 4)
    before = dict(vars(mode))
    with faked(model, mode):
        with exports(model, mode), mode:
            x = torch.empty(2, 4)
        with exports(model, mode):
            exported = torch.export.export(model, (x,), strict=False)
        assert {node.meta["val"].fake_mode for node in exported.graph.nodes if "val" in node.meta} == {mode}
    assert dict(vars(mode)) == before
