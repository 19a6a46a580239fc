"""Modes of a model while it is captured: eval mode, or gradients for some of its parameters alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards every module of it is in the mode that it was in."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def training_alone(model: nn.Module, trains: frozenset[int] | None) -> Iterator[None]:
    """The model with gradients for these of its parameters alone; afterwards they are asked for as before."""
    others = [p for p in model.parameters() if trains is not None and p.requires_grad != (id(p) in trains)]
    for parameter in others:
        parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(not parameter.requires_grad)
