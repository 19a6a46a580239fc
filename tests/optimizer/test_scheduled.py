"""Learning rate schedulers through `compile`: those that take a metric are told the loss, and others are refused by name."""

from __future__ import annotations

import functools

import pytest
import torch

import autopar
from autopar.runtime.update.update_rule import UpdateRule
from tests.optimizer.test_optimizers import compiled, equal_to_eager, program, with_update  # noqa: F401


@pytest.mark.few(1)
def test_a_plateau_is_judged_by_the_loss(program):  # noqa: F811
    plateau = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, threshold=0.5)
    rule = UpdateRule(functools.partial(torch.optim.SGD, lr=0.5), plateau)
    equal_to_eager(with_update(program, rule), steps=5)


def warm_then(optimizer):
    """A scheduler of the user's own around two of torch's, which hands on what it is told."""
    warm, plateau = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2), OwnPlateau(optimizer)

    class Both:
        optimizer = warm.optimizer

        def step(self, metrics):
            warm.step()
            plateau.step(metrics)

        def state_dict(self):
            return {"warm": warm.state_dict(), "plateau": plateau.state_dict()}

    return Both()


class OwnPlateau:
    """A scheduler that is no class of torch's: it wants a metric, and takes none for nothing."""

    def __init__(self, optimizer):
        self.optimizer, self.best = optimizer, float("inf")

    def step(self, metric=None):
        assert metric is not None
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5 if metric > 0.5 * self.best else 1.1
        self.best = min(self.best, metric)

    def state_dict(self):
        return {"best": self.best}


@pytest.mark.few(3)
@pytest.mark.parametrize("scheduler", [warm_then, OwnPlateau])
def test_any_scheduler_that_takes_a_metric_is_told_the_loss(program, scheduler):  # noqa: F811
    rule = UpdateRule(functools.partial(torch.optim.SGD, lr=0.5), scheduler)
    equal_to_eager(with_update(program, rule), steps=4)


class Timed(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler like those of timm: it wants to know the epoch."""

    def get_lr(self):
        return list(self.base_lrs)

    def step(self, epoch, metric=None):
        self.last_epoch = epoch

    def _initial_step(self):
        self._last_lr = self.get_lr()


class Handing(OwnPlateau):
    def step(self, *args, **named):
        super().step(named["metric"])


def test_a_scheduler_whose_step_wants_what_nobody_knows_is_refused_by_name():
    with pytest.raises(
        autopar.InputError, match=r"Timed.step wants epoch; .* metrics or metric or loss, and with nothing"
    ):
        compiled(scheduler=Timed)
    with pytest.raises(autopar.InputError, match=r"Handing.step fails after the first step of the optimizer: KeyError"):
        compiled(scheduler=Handing)
