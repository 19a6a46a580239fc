"""The user's model run as it is: how a batch splits into model inputs and loss targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from autopar.capture.export import own_loss, split_inputs
from autopar.runtime.update_rule import Named, UpdateRule, make_optimizers


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


class EagerUpdate:
    """What a rule does to a model on one device, written with torch's own functions (loss scaling changes no number that
    does not overflow, and is left out)."""

    def __init__(self, rule: UpdateRule, named: Named) -> None:
        self.rule = rule
        self.parameters = [parameter for _, parameter in named]
        self.optimizers = make_optimizers(rule.optimizer, named) if rule.optimizer is not None else ()
        self.schedulers = [rule.scheduler(one) for one in self.optimizers] if rule.scheduler is not None else []

    def clip(self) -> None:
        norm, value = self.rule.clip_norm, self.rule.clip_value
        if value is not None:
            nn.utils.clip_grad_value_(self.parameters, value)
        if norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, norm.max_norm, norm.norm_type)

    def step(self, loss: torch.Tensor) -> None:
        for one in self.optimizers:
            one.step()
        for scheduler in self.schedulers:
            scheduler.step(*((loss.item(),) if isinstance(scheduler, ReduceLROnPlateau) else ()))
