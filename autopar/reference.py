"""The user's model run as it is: how a batch splits into model inputs and loss targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.capture.export import own_loss, split_inputs


def run_model(model: nn.Module, inputs: Any) -> Any:
    """The model's output for a batch without targets."""
    args, kwargs, _ = split_inputs(inputs, 0, model)
    return model(*args, **kwargs)


def loss_of(model: nn.Module, inputs: Any, loss_fn: Any, targets: int) -> torch.Tensor:
    """The scalar that is trained on."""
    args, kwargs, wanted = split_inputs(inputs, targets, model)
    out = model(*args, **kwargs)
    loss = loss_fn(out, *wanted) if loss_fn is not None else own_loss(out)
    assert loss is not None
    return loss.reshape(())
