"""All that a call of a module may read of its arguments and modules, such that two calls can be compared."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

TABLES = ("_parameters", "_buffers", "_modules")
PLAIN = (int, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
SEQUENCES = (list, tuple, collections.deque)
DEEPEST = 8
"""Containers in containers are looked into so far."""


class Unlike(Exception):
    """A call is like no other one."""


class Description:
    """All that a call may read of its arguments (given) and modules, such that equal descriptions mean equal reads.

    tensors: its roles, those of its arguments and of its modules' tables, each once; places: their numbers by id. fixed: what
    must be equal; attributes: what must be equal where it is read, by the number of the module and name. Raises Unlike where
    a tensor is none that a trace computes with. To be made outside function modes."""

    def __init__(self, root: nn.Module, args: Any, kwargs: Any, is_followed: Callable[[Tensor], bool]) -> None:
        self.tensors: list[Tensor] = []
        self.places: dict[int, int] = {}
        self.modules: list[nn.Module] = []
        self.attributes: dict[tuple[int, str], Any] = {}
        self.given = args, kwargs
        self._numbers: dict[int, int] = {}
        self._memory: dict[int, int] = {}
        self._is_followed = is_followed
        self.fixed: list[Any] = [settings(), self._value(args, 0, True), self._value(kwargs, 0, True)]
        self._module(root)
        for i, module in enumerate(self.modules):
            for name, value in vars(module).items():
                if name not in TABLES:
                    hooks = name.endswith("hooks") and isinstance(value, dict)
                    self.attributes[i, name] = self._value(list(value.values()) if hooks else value, 0, False)

    def _module(self, module: nn.Module) -> None:
        if (number := self._numbers.get(id(module))) is not None:
            self.fixed.append(number)
            return
        self._numbers[id(module)] = len(self.modules)
        self.modules.append(module)
        self.fixed.append(type(module))
        for table in TABLES[:2]:
            for name, tensor in vars(module)[table].items():
                self.fixed.append((name, None if tensor is None else self._role(tensor)))
        for name, child in vars(module)["_modules"].items():
            self.fixed.append(name)
            if child is not None:
                self._module(child)

    def _role(self, tensor: Tensor) -> Any:
        if (number := self.places.get(id(tensor))) is not None:
            return number
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            raise Unlike
        number = self.places[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        memory = self._memory.setdefault(tensor.untyped_storage()._cdata, number)
        kind = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device
        grad = tensor.requires_grad, tensor.is_leaf, tensor.is_conj(), tensor.is_neg()
        return number, type(tensor), memory, kind, grad, id(tensor) if self._is_followed(tensor) else None

    def _value(self, value: Any, depth: int, is_argument: bool) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return kind, value
        if kind in (float, complex):
            return kind, repr(value)
        if isinstance(value, Tensor):
            if is_argument:
                return self._role(value)
            return "tensor", self.places.get(id(value), id(value))
        if depth < DEEPEST:
            if kind in SEQUENCES:
                return kind, tuple(self._value(one, depth + 1, is_argument) for one in value)
            if kind in (dict, collections.OrderedDict):
                return kind, tuple(
                    (self._value(k, depth + 1, is_argument), self._value(v, depth + 1, is_argument))
                    for k, v in value.items()
                )
            if kind is types.MethodType:
                return kind, id(value.__func__), self._value(value.__self__, depth + 1, False)
            if kind is types.FunctionType and all(map(_is_filled, value.__closure__ or ())):
                inside = value.__defaults__, value.__kwdefaults__, [c.cell_contents for c in value.__closure__ or ()]
                return kind, id(value.__code__), id(value.__globals__), self._value(inside, depth + 1, False)
            if kind is functools.partial:
                inside = value.func, value.args, value.keywords
                return kind, self._value(inside, depth + 1, is_argument)
        if isinstance(value, nn.Module):
            return "module", self._numbers.get(id(value), id(value))
        return "object", id(value)


def settings() -> tuple[Any, ...]:
    """The modes of torch that its ops depend on."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
    )


def is_given(owner: object, given: Any, depth: int = 0) -> bool:
    """Whether a container is among arguments, whose tensors are roles."""
    if owner is given:
        return True
    inside = given.values() if type(given) in (dict, collections.OrderedDict) else given
    if depth < DEEPEST and type(given) in (*SEQUENCES, dict, collections.OrderedDict):
        return any(is_given(owner, one, depth + 1) for one in inside)
    return False


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
