"""A user's script with factories of its own; test_factories.py runs it as `__main__`."""

from __future__ import annotations

import functools
import math as m
from typing import Any

import torch
from torch.optim import AdamW, Optimizer

from autopar.codegen.factories import factories_source, named_rule
from autopar.errors import EmitError
from autopar.runtime.update.update_rule import UpdateRule

RATE, BETAS = 0.25, (0.5, 0.75)
HELD = torch.ones(2)
lr = 0.125


def groups(params: list[torch.Tensor]) -> list[dict[str, Any]]:
    return [{"params": params, "weight_decay": m.sqrt(4.0)}]


def made(params: Any, rate: float = RATE) -> Optimizer:
    return AdamW(groups(params), lr=rate, betas=BETAS)


def shadowed(params: Any) -> Optimizer:
    chosen = (lambda lr: lr)(lr)
    return AdamW(params, lr=chosen)


def holds(params: Any) -> Optimizer:
    return AdamW(params, lr=float(HELD.sum()))


@functools.cache
def decorated(params: Any) -> Optimizer:
    return AdamW(params)


class Halved(torch.optim.SGD):
    """A class of the script."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(groups(params), lr=lr * RATE)


def closed(rate: float) -> Any:
    def inside(params: Any) -> Optimizer:
        return AdamW(params, lr=rate)

    return inside


def warm(optimizer: Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) * RATE))


CASES = {
    "function": (made, warm),
    "partial": (functools.partial(made, rate=0.5), None),
    "lambda": (lambda params: AdamW(params, lr=RATE), None),
    "closure": (closed(0.75), None),
    "class": (functools.partial(Halved, lr=1.0), None),
    "shadowed": (shadowed, None),
    "of torch": (functools.partial(AdamW, lr=0.5), functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3)),
    "tensor": (holds, None),
    "decorated": (decorated, None),
    "two": (made, lambda made: torch.optim.lr_scheduler.StepLR(made, closed.__code__.co_argcount)),
    "positional": (functools.partial(made, []), None),
}


def told(optimizer: Any, scheduler: Any) -> dict[str, Any]:
    rule = UpdateRule(optimizer, scheduler)
    try:
        named = named_rule(rule)
        assert named is not None
        return {
            "text": factories_source({"": rule}),
            "named": [[one.module, one.name, one.kwargs] for one in named.factories],
        }
    except EmitError as error:
        return {"error": str(error)}


def told_of_all() -> dict[str, Any]:
    return {name: told(*case) for name, case in CASES.items()}
