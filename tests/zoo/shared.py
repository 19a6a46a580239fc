"""Captures that tests share: a zoo model is traced once per process for every shape of its batch.

A zoo model is the same whenever it is made, and what is captured depends on the model, its loss, the shapes of the inputs
and three options, not on ranks, mesh, plan or optimizer. So `capture_program` is asked once for each of these and its answer
kept for all tests; a model that a test changed after it was made (dropout off, other parameters frozen) has a key of its
own, and a model from elsewhere is captured anew each time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.zoo.models import ORIGIN

MOST_KEPT = 40
"""Captures; the one that was asked for longest ago goes first."""


def shared(capture_program: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which answers questions about zoo models that it was asked before."""
    answers: OrderedDict[Hashable, Any] = OrderedDict()

    def ask(model: nn.Module, inputs: Any, *rest: Any) -> Any:
        if model not in ORIGIN:
            return capture_program(model, inputs, *rest)
        key = (ORIGIN[model], described(model), described_inputs(inputs), *map(hashable, rest))
        if key not in answers:
            answers[key] = capture_program(model, inputs, *rest)
        answers.move_to_end(key)
        if len(answers) > MOST_KEPT:
            answers.popitem(last=False)
        return answers[key]

    return ask


def described(model: nn.Module) -> Hashable:
    """The properties of a model that a test may have changed and that count for its capture."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return (
        repr(model),
        tuple(module.training for module in model.modules()),
        tuple((name, tuple(t.shape), t.dtype, t.device.type, t.requires_grad) for name, t in tensors),
    )


def described_inputs(inputs: Any) -> Hashable:
    """The structure, shapes and dtypes of inputs."""
    leaves, structure = pytree.tree_flatten(inputs)
    return str(structure), tuple((tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves)


def hashable(value: Any) -> Hashable:
    """Options and losses as part of a key."""
    return value if isinstance(value, Hashable) and not isinstance(value, nn.Module) else repr(value)
