"""The oracle of updates: what a rule does on one device, by torch's own clipping, GradScaler and schedulers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from autopar.runtime.update.update_rule import UpdateRule, make_optimizers
from tests.runtime import pipelines, stages


class Eager:
    """The references' stand-in for an optimizer: `step` is the whole update. log: norms, scales, learning rates."""

    def __init__(self, rule: UpdateRule, names: list[str], parameters: list[nn.Parameter]) -> None:
        self.rule, self.parameters = rule, parameters
        self.optimizers = make_optimizers(rule.optimizer, list(zip(names, parameters, strict=True)))
        self.schedulers = [rule.scheduler(one) for one in self.optimizers] if rule.scheduler else []
        self.scaler: Any = None
        if rule.loss_scaling is not None:
            given = rule.loss_scaling
            self.scaler = torch.amp.GradScaler("cpu", given.initial, given.growth, given.backoff, given.interval)
        self.loss = 0.0
        """The loss of the step, which the references set before they call `step`."""
        self.log: dict[str, list[float]] = {"norm": [], "scale": [], "lr": []}

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        (optimizer, *others), rule = self.optimizers, self.rule
        assert self.scaler is None or not others
        before = 1.0
        if self.scaler is not None:
            self.scaler.scale(torch.ones(()))
            before = self.scaler.get_scale()
            for parameter in self.parameters:
                parameter.grad *= before
            self.scaler.unscale_(optimizer)
        if rule.clip_value is not None:
            nn.utils.clip_grad_value_(self.parameters, rule.clip_value)
        if rule.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.parameters, rule.clip_norm.max_norm, rule.clip_norm.norm_type)
            self.log["norm"].append(norm.item())
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
            self.log["scale"].append(self.scaler.get_scale())
        for one in self.optimizers if self.scaler is None else []:
            one.step()
        if self.scaler is None or self.scaler.get_scale() >= before:
            for scheduler in self.schedulers:
                scheduler.step(**self._told(scheduler))
        self.log["lr"].append(optimizer.param_groups[0]["lr"])

    def _told(self, scheduler: Any) -> dict[str, float]:
        if isinstance(scheduler, ReduceLROnPlateau):
            return {"metrics": self.loss}
        return {"loss": self.loss} if type(scheduler).__name__ == "OnLoss" else {}


def mlp_reference(steps: int, rule: UpdateRule) -> dict[str, Any]:
    """stages.reference under a rule, with its log."""
    return _logged(lambda make: stages.reference(steps, make), rule, ["w1", "b1", "w2", "b2"])


def chain_reference(steps: int, rule: UpdateRule, **known: Any) -> dict[str, Any]:
    """pipelines.reference under a rule, with its log."""
    names = [name for name in pipelines.weights(known["stages"], known.get("tied", ())) if name != "gain"]
    return _logged(lambda make: pipelines.reference(steps, optimizer=make, **known), rule, names)


def _logged(run: Any, rule: UpdateRule, names: list[str]) -> dict[str, Any]:
    made: list[Eager] = []

    def make(parameters: list[nn.Parameter]) -> Eager:
        made.append(Eager(rule, names, parameters))
        return made[0]

    return run(make) | {"log": made[0].log}


def agree(got: dict[str, Any], want: dict[str, Any], rtol: float = 1e-12) -> None:
    """Losses, last gradients and weights."""
    torch.testing.assert_close(got["losses"], want["losses"], rtol=rtol, atol=0, equal_nan=True)
    for part in ("grads", "weights"):
        for name, value in want[part].items():
            torch.testing.assert_close(
                got[part][name],
                value,
                rtol=rtol,
                atol=1e-12,
                equal_nan=True,
                msg=lambda text, name=name: f"{name}: {text}",
            )
