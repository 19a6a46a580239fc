"""The arguments of `compile` about updates (optimizer, scheduler, clipping, loss scaling), checked, as one `UpdateRule`."""

from __future__ import annotations

from dataclasses import replace
from numbers import Real
from typing import Any

import torch

from autopar.errors import InputError
from autopar.runtime.data.schema import is_integer, is_number, shown
from autopar.runtime.update.scaling import LEAST_SCALE
from autopar.runtime.update.update_rule import ClipNorm, LossScaling, UpdateRule, as_rule


def update_rule(
    optimizer: Any,
    scheduler: Any = None,
    clip_grad_norm: Any = None,
    clip_grad_value: Any = None,
    loss_scaling: Any = None,
    compensated: bool = False,
) -> UpdateRule:
    """The arguments of `compile` as one rule. Raises InputError where they are wrong, or do not go together."""
    rule = as_rule(optimizer)
    is_norm = isinstance(clip_grad_norm, Real) and not isinstance(clip_grad_norm, bool)
    clip = ClipNorm(float(clip_grad_norm)) if is_norm else clip_grad_norm
    scaling = LossScaling() if loss_scaling is True else loss_scaling or None
    arguments = {
        "scheduler": scheduler,
        "clip_norm": clip,
        "clip_value": clip_grad_value,
        "loss_scaling": scaling,
        "compensated": compensated or None,
    }
    rule = replace(rule, **{name: value for name, value in arguments.items() if value is not None})
    if isinstance(rule.optimizer, torch.optim.Optimizer):
        raise InputError(
            "optimizer must be a factory, not an optimizer instance: each rank makes its own over its shards; pass "
            f"functools.partial(torch.optim.{type(rule.optimizer).__name__}, lr=…)"
        )
    if rule.optimizer is not None and not callable(rule.optimizer):
        kind = type(rule.optimizer).__name__
        raise InputError(f"optimizer must be a factory params -> torch.optim.Optimizer, not {kind}")
    if rule.scheduler is not None and not callable(rule.scheduler):
        raise InputError(
            "scheduler must be a factory optimizer -> scheduler, such as "
            f"functools.partial(torch.optim.lr_scheduler.StepLR, step_size=30), not {type(rule.scheduler).__name__}"
        )
    if rule.scheduler is not None and rule.optimizer is None:
        raise InputError("a scheduler without an optimizer has nothing to schedule; give optimizer= too")
    norm = rule.clip_norm
    if norm is not None and not (
        isinstance(norm, ClipNorm) and _above_zero(norm.max_norm) and _above_zero(norm.norm_type)
    ):
        raise InputError(
            f"clip_grad_norm must be a positive number or autopar.ClipNorm(max_norm, norm_type), not {shown(norm)}"
        )
    value = rule.clip_value
    if value is not None and not (_above_zero(value) and is_number(float(value))):
        raise InputError(f"clip_grad_value must be a positive number, not {shown(value)}")
    if norm is not None and value is not None:
        raise InputError("choose one of clip_grad_norm and clip_grad_value")
    _check_scaling(rule.loss_scaling)
    return rule


def _above_zero(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) > 0


def _check_scaling(scaling: Any) -> None:
    if scaling is None:
        return
    if not isinstance(scaling, LossScaling):
        raise InputError(f"loss_scaling must be True or autopar.LossScaling(…), not {shown(scaling)}")
    numbers = all(map(_above_zero, (scaling.initial, scaling.growth, scaling.backoff, scaling.interval)))
    finite = numbers and max(scaling.initial, scaling.growth) <= torch.finfo(torch.float32).max
    finite = finite and scaling.initial >= LEAST_SCALE
    whole = is_integer(scaling.interval, 1, 1 << 53)
    if not (finite and scaling.growth > 1 and 0 < scaling.backoff < 1 and whole):
        raise InputError(
            f"{shown(scaling)}: initial must be a float32 from 2**-24 on, growth > 1, 0 < backoff < 1, interval >= 1"
        )
