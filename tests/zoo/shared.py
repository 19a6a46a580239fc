"""Captures that tests share: a model is traced once per process for every shape of its batch.

What is captured depends on the model, its loss, the shapes of the inputs and some options, not on ranks, mesh, plan or
optimizer. So `capture_program` is asked once for each of these and its answer kept for all tests. A zoo model is the same
whenever it is made; one that a test changed after it was made (dropout off, other parameters frozen) has a key of its own.
A model from elsewhere is known by all that it is made of; one that cannot be told so, as its class stands in a function, is
captured anew each time.
"""

from __future__ import annotations

import hashlib
import io
import marshal
import pickle
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.sharing import SHARING
from tests.zoo.models import ORIGIN

MOST_KEPT = 40
"""Captures; the one that was asked for longest ago goes first."""


def shared(capture_program: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which answers questions about zoo models that it was asked before."""
    answers: OrderedDict[Hashable, Any] = OrderedDict()

    def ask(model: nn.Module, inputs: Any, *rest: Any) -> Any:
        key = key_of(model, inputs, rest)
        if key is None:
            return capture_program(model, inputs, *rest)
        if key not in answers:
            captured = capture_program(model, inputs, *rest)
            if captured.exported.followed:  # numbers decided what was captured
                return captured
            answers[key] = captured
        answers.move_to_end(key)
        if len(answers) > MOST_KEPT:
            answers.popitem(last=False)
        return answers[key]

    return ask


def key_of(model: nn.Module, inputs: Any, rest: tuple[Any, ...]) -> Hashable:
    """The name of a capture among all; None where it has none."""
    if model in ORIGIN:
        return ORIGIN[model], described(model), described_inputs(inputs), *map(hashable, rest)
    if not SHARING.captures:
        return None
    modes = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    text = io.BytesIO()
    try:
        Contents(text).dump((model, described_inputs(inputs), rest, modes))
    except (
        AttributeError,
        RuntimeError,
        TypeError,
        pickle.PicklingError,
    ):  # what has no name, or is not to be written so
        return None
    return hashlib.sha256(text.getvalue()).hexdigest()


class Contents(pickle.Pickler):
    """Writes all that an object is made of; of functions their code, of parameters no values, which no capture sees."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            numbers = None if isinstance(value, nn.Parameter) or value.is_meta else value.detach().flatten().tolist()
            kind = type(value), tuple(value.shape), value.stride(), value.dtype, value.device.type, value.requires_grad
            return tuple, ((*kind, vars(value), numbers),)
        if isinstance(value, types.FunctionType):
            closed = [cell.cell_contents for cell in value.__closure__ or ()]
            code = marshal.dumps(value.__code__)
            return tuple, ((value.__module__, code, value.__defaults__, value.__kwdefaults__, closed),)
        return NotImplemented


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
