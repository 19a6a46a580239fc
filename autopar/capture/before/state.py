"""The Python state that `forward` can reach: what it held before, what changed, and how to put it back.

A trace runs Python once, eager runs it every step: `self.n += 1`, `self.cache.append(h)`, `random.random()` are gone from a
program. The state is a list of places (`state_slots.py`), found from the modules, their hooks and the loss: through containers,
objects of the user's classes, and functions of the same package.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from autopar.capture.before import state_slots
from autopar.capture.before.stand_ins import StandIn
from autopar.capture.before.state_slots import Place
from autopar.runtime.data.origin import package_of

_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "autopar", "passes", "costmodel", "codegen"}
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_NOTHING_INSIDE = (StandIn, *state_slots.PLAIN, torch.Tensor, type)
_KEPT_BY_RNNS = ("_flat_weights", "_flat_weight_refs")


@dataclass(frozen=True)
class Change:
    """A value that is not what it was. owner: the module whose attribute `key` it is, if it is one."""

    name: str
    owner: object
    key: object

    @property
    def is_attribute(self) -> bool:
        """Whether it is an attribute of a module that was bound anew."""
        return isinstance(self.owner, nn.Module)


@dataclass
class State:
    """All places that were found, and functions on the way (what they name tells which clocks they read). fixed: ids of what
    nothing else can be put into (tables of modules), or in place of (what tuples and defaults of functions hold)."""

    places: list[Place] = field(default_factory=list)
    functions: list[types.FunctionType] = field(default_factory=list)
    fixed: set[int] = field(default_factory=set)

    def changes(self) -> list[Change]:
        """The changes since the state was taken; what layers of torch keep for themselves aside."""
        found = [Change(p.named(key), p.owner, key) for p in self.places for key in p.changes()]
        return [c for c in found if not (isinstance(c.owner, nn.RNNBase) and c.key in _KEPT_BY_RNNS)]

    def restore(self) -> None:
        """Every place as it was."""
        for one in self.places:
            if one.changes():
                one.write(one.before)


def state_of(model: nn.Module, loss_fn: object) -> State:
    """The Python state that a step of model and loss can reach now."""
    finder = _Finder()
    for name, module in model.named_modules():
        finder.visit_module(name, module)
    finder.visit("loss_fn", loss_fn)
    torch_generator = state_slots.generator("the state of torch's generator", torch.default_generator)
    assert torch_generator is not None
    finder.state.places += [
        state_slots.single("Python's random numbers (random)", random.getstate, random.setstate),
        state_slots.single("NumPy's random numbers (np.random)", np.random.get_state, np.random.set_state),
        torch_generator,
        state_slots.single("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
        state_slots.single("torch's grad mode", torch.is_grad_enabled, torch._C._set_grad_enabled),
    ]
    return finder.state


class _Finder:
    """Walks from the roots; every object is visited once."""

    def __init__(self) -> None:
        self.state = State()
        self.seen: dict[int, object] = {}  # keeps what was seen alive, so that no id is given twice

    def visit_module(self, path: str, module: nn.Module) -> None:
        """Attributes and tables of one module, its class, and what they hold."""
        if id(module) in self.seen:
            return
        self.seen[id(module)] = module
        self.state.places.append(state_slots.attributes(path, module, vars(module)))
        for table in _MODULE_TABLES:
            values = vars(module)[table]
            self.seen[id(values)] = values
            self.state.fixed.add(id(values))
            self.state.places.append(state_slots.attributes(path, values, values))
        self._class(type(module))
        self._function(type(module).forward)
        for name, value in list(vars(module).items()):
            if type(value) not in state_slots.PLAIN:
                self.visit(f"{path}.{name}" if path else name, value)

    def visit(self, name: str, value: object) -> None:
        """Remember what can change inside `value`."""
        if type(value) in state_slots.PLAIN or id(value) in self.seen:
            return
        if isinstance(value, _NOTHING_INSIDE):
            return
        if isinstance(value, nn.Module):
            for path, module in value.named_modules(prefix=name):
                self.visit_module(path, module)
            return
        if isinstance(value, (types.FunctionType, types.MethodType, staticmethod, classmethod)):
            self._function(value)
            return
        self.seen[id(value)] = value
        if state_slots.is_container(value):
            self.state.places.append(state_slots.container(name, value))
            for key, item in list(state_slots.items(value).items()):
                self.visit(f"{name}[{key!r}]", item)
        elif (generator := state_slots.generator(name, value)) is not None:
            self.state.places.append(generator)
        elif isinstance(value, (tuple, frozenset)):
            self.state.fixed |= set(map(id, value))
            for i, item in enumerate(value):
                self.visit(f"{name}[{i}]", item)
        elif hasattr(value, "cache_info") and hasattr(value, "__wrapped__"):
            self.state.places.append(state_slots.remembered(name, value))
            self._function(value.__wrapped__)
        elif isinstance(value, Iterator):
            self.state.places.append(state_slots.position(name, value))
        elif isinstance(value, functools.partial):
            self.visit(name, value.func)
            self.visit(name, (*value.args, *value.keywords.values()))
        elif package_of(type(value)) not in _FOREIGN and hasattr(value, "__dict__"):
            self.state.places.append(state_slots.attributes(name, value, vars(value)))
            self._class(type(value))
            for key, item in list(vars(value).items()):
                self.visit(f"{name}.{key}", item)

    def _class(self, cls: type) -> None:
        """Values that instances of the user's classes share, and what their methods name."""
        for base in cls.__mro__:
            if id(base) in self.seen:
                continue
            self.seen[id(base)] = base
            if package_of(base) in _FOREIGN:
                continue
            self.state.places.append(state_slots.class_values(base))
            for key, value in list(vars(base).items()):
                if isinstance(value, types.FunctionType):
                    self._function(value)
                elif not key.startswith("__"):
                    self.visit(f"{base.__qualname__}.{key}", value)

    def _function(self, value: object) -> None:
        """Closure cells and globals that a function names, and functions of its package that it names."""
        if isinstance(value, types.MethodType):
            self.visit(type(value.__self__).__name__, value.__self__)
        function = getattr(value, "__func__", value)
        if not isinstance(function, types.FunctionType) or id(function) in self.seen:
            return
        self.seen[id(function)] = function
        package = package_of(function)
        if package in _FOREIGN:
            return
        self.state.functions.append(function)
        self.visit(function.__name__, vars(function))
        self.visit(function.__name__, (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._cell(name, cell)
        named, scope = names_of(function.__code__), function.__globals__
        self.state.places.append(state_slots.names_in(function.__module__ or "", scope, named))
        for name in named:
            item = scope.get(name)
            if isinstance(item, types.FunctionType) and package_of(item) != package:
                continue
            if isinstance(item, types.ModuleType):
                self._file(item, named, package)
            else:
                self.visit(name, item)

    def _file(self, file: types.ModuleType, named: list[str], package: str) -> None:
        """Take the state that a function names in another file of its package."""
        held = [n for n in named if n in vars(file) and not callable(vars(file)[n])]
        if held and file.__name__.partition(".")[0] == package:
            self.state.places.append(state_slots.names_in(file.__name__, vars(file), held))
            for name in held:
                self.visit(name, vars(file)[name])

    def _cell(self, name: str, cell: types.CellType) -> None:
        if id(cell) in self.seen:
            return
        self.seen[id(cell)] = cell
        at = state_slots.cell_value(name, cell)
        self.state.places.append(at)
        for value in at.before.values():
            self.visit(name, value)


def names_of(code: types.CodeType) -> list[str]:
    """Names of globals and attributes in a function's code and in functions that it defines."""
    nested = [n for c in code.co_consts if isinstance(c, types.CodeType) for n in names_of(c)]
    return list(dict.fromkeys((*code.co_names, *nested)))
