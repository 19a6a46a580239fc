"""The Python state that `forward` can reach: what it held before, what changed, and how to put it back.

A trace runs Python once, eager runs it every step: `self.n += 1`, `self.cache.append(h)`, `random.random()` are gone from a
program. The state is a list of *places* (the attributes of an object, the items of a container, the cells of a closure, the
globals that a function names), each remembered by a shallow copy. Places are found from the modules, their hooks and the
loss, through containers, through objects of the user's classes, and through functions of the same package.
"""

from __future__ import annotations

import collections
import operator
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

PLAIN = (bool, int, float, complex, str, bytes, type(None))
MOST_ITEMS = 4096
"""Containers with more items are remembered by their size alone."""
_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "autopar", "passes", "costmodel", "codegen"}
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, eq=False)
class Place:
    """Values by key as they were, and how to read and write them now. owner: what has them; name: the place in words."""

    name: str
    owner: object
    before: Mapping[object, object]
    read: Callable[[], Mapping[object, object]]
    write: Callable[[Mapping[object, object]], None]

    def changes(self) -> list[object]:
        """Keys whose value is another one now."""
        now = self.read()
        keys = dict.fromkeys((*self.before, *now))
        return [k for k in keys if not _same(self.before.get(k, _ABSENT), now.get(k, _ABSENT))]


@dataclass(frozen=True)
class Change:
    """A value that is not what it was. owner: the module whose attribute `key` it is, if it is one."""

    name: str
    owner: object
    key: object

    @property
    def is_by_torch(self) -> bool:
        """Whether a layer of torch keeps it for itself: the flat list of its weights."""
        return isinstance(self.owner, nn.RNNBase) and self.key in ("_flat_weights", "_flat_weight_refs")

    @property
    def is_attribute(self) -> bool:
        """Whether it is an attribute of a module that was bound anew."""
        return isinstance(self.owner, nn.Module)


@dataclass
class State:
    """All places that were found, and functions on the way (what they name tells which clocks they read)."""

    places: list[Place] = field(default_factory=list)
    functions: list[types.FunctionType] = field(default_factory=list)

    def changes(self) -> list[Change]:
        """What changed since the state was taken."""
        found = [
            Change(_joined(place.name, key, place.owner), place.owner, key)
            for place in self.places
            for key in place.changes()
        ]
        return [change for change in found if not change.is_by_torch]

    def restore(self) -> None:
        """Every place as it was."""
        for place in self.places:
            if place.changes():
                place.write(place.before)


def state_of(model: nn.Module, loss_fn: object) -> State:
    """The Python state that a step of model and loss can reach now."""
    finder = _Finder()
    for name, module in model.named_modules():
        finder.visit_module(name, module)
    finder.visit("loss_fn", loss_fn)
    finder.state.places += [_generator("Python's random numbers (random)", random.getstate, random.setstate)]
    finder.state.places += [_generator("NumPy's random numbers (np.random)", np.random.get_state, np.random.set_state)]
    finder.state.places += [_torch_generator("the state of torch's generator", torch.default_generator)]
    finder.state.places += [_generator("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype)]
    finder.state.places += [_generator("torch's grad mode", torch.is_grad_enabled, torch._C._set_grad_enabled)]
    return finder.state


class _Finder:
    """Walks from the roots; every object is visited once."""

    def __init__(self) -> None:
        self.state = State()
        self.seen: dict[int, object] = {}  # keeps what was seen alive, so that no id is given twice

    def visit_module(self, path: str, module: nn.Module) -> None:
        if id(module) in self.seen:
            return
        self.seen[id(module)] = module
        self._items(path, module, vars(module), vars(module))
        self._class(type(module))
        for table in _MODULE_TABLES:
            self._items(path, vars(module)[table], vars(module)[table], vars(module)[table])
            self.seen[id(vars(module)[table])] = module
        self._function(getattr(type(module), "forward", None))
        for name, value in list(vars(module).items()):
            if name not in _MODULE_TABLES:
                self.visit(f"{path}.{name}" if path else name, value)

    def visit(self, name: str, value: object) -> None:
        """Remember what can change inside `value`."""
        if isinstance(value, (*PLAIN, torch.Tensor, type)) or id(value) in self.seen:
            return
        if isinstance(value, nn.Module):
            for path, module in value.named_modules():
                self.visit_module(f"{name}.{path}" if path else name, module)
            return
        if isinstance(value, (types.FunctionType, types.MethodType, staticmethod, classmethod)):
            self._function(value)
            return
        self.seen[id(value)] = value
        if isinstance(value, random.Random):
            self._add(_generator(name, value.getstate, value.setstate))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._add(_generator(name, lambda: bits.state, lambda s: setattr(bits, "state", s)))
        elif isinstance(value, np.random.RandomState):
            self._add(_generator(name, value.get_state, value.set_state))
        elif isinstance(value, torch.Generator):
            self._add(_torch_generator(name, value))
        elif isinstance(value, dict):
            self._container(name, value, value, lambda old: (value.clear(), value.update(old)))
        elif isinstance(value, (list, collections.deque)):
            self._container(name, value, value, lambda old: (value.clear(), value.extend(old.values())))
        elif isinstance(value, set):
            self._container(name, value, value, lambda old: (value.clear(), value.update(old.values())))
        elif isinstance(value, (tuple, frozenset)):
            for i, item in enumerate(value):
                self.visit(f"{name}[{i}]", item)
        elif isinstance(value, Iterator):
            self._add(Place(name, value, _position(value), lambda: _position(value), lambda old: None))
        elif hasattr(value, "func") and hasattr(value, "keywords"):  # functools.partial
            self.visit(name, value.func)
            self.visit(name, (*value.args, *value.keywords.values()))  # type: ignore[attr-defined]
        elif _package(type(value).__module__) not in _FOREIGN and hasattr(value, "__dict__"):
            self._items(name, value, vars(value), vars(value))
            self._class(type(value))
            for key, item in list(vars(value).items()):
                self.visit(f"{name}.{key}", item)
            self._function(getattr(type(value), "__call__", None))

    def _add(self, place: Place) -> None:
        self.state.places.append(place)

    def _items(self, name: str, owner: object, table: object, values: object) -> None:
        """Attributes of an object, or one of the tables of a module."""
        assert isinstance(table, dict)
        self._add(Place(name, owner, dict(table), lambda: table, lambda old: (table.clear(), table.update(old))))  # type: ignore[func-returns-value,arg-type]

    def _container(self, name: str, owner: object, value: object, write: Callable[..., object]) -> None:
        def read() -> Mapping[object, object]:
            if len(value) > MOST_ITEMS:  # type: ignore[arg-type]
                return {"": len(value)}  # type: ignore[arg-type]
            if isinstance(value, dict):
                return value
            return dict(enumerate(value)) if not isinstance(value, set) else {item: item for item in value}  # type: ignore[arg-type]

        def put(old: Mapping[object, object]) -> None:
            if len(value) <= MOST_ITEMS:  # type: ignore[arg-type]
                write(old)

        self._add(Place(name, owner, dict(read()), read, put))
        if len(value) <= MOST_ITEMS:  # type: ignore[arg-type]
            for key, item in list(read().items()):
                self.visit(f"{name}[{key!r}]", item)

    def _class(self, cls: type) -> None:
        """Values that instances of the user's classes share."""
        for base in cls.__mro__:
            if _package(base.__module__) in _FOREIGN or id(base) in self.seen:
                continue
            self.seen[id(base)] = base

            def read(base: type = base) -> Mapping[object, object]:
                return {k: v for k, v in vars(base).items() if not k.startswith("__") and not callable(v)}

            def write(old: Mapping[object, object], base: type = base) -> None:
                for key, value in old.items():
                    setattr(base, str(key), value)

            self._add(Place(base.__qualname__, base, dict(read()), read, write))
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
        package = _package(function.__module__ or "")
        if package in _FOREIGN:
            return
        self.seen[id(function)] = function
        self.state.functions.append(function)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._cell(name, cell)
        self.visit(function.__name__, vars(function))
        scope = function.__globals__
        names = [n for n in names_of(function.__code__) if n in scope]

        def read() -> Mapping[object, object]:
            return {n: scope[n] for n in names if n in scope}

        self._add(Place(function.__module__ or "", function, dict(read()), read, scope.update))  # type: ignore[arg-type]
        for name in names:
            item = scope[name]
            if isinstance(item, types.FunctionType) and _package(item.__module__ or "") != package:
                continue
            if isinstance(item, nn.Module) or not isinstance(item, (type, types.ModuleType)):
                self.visit(name, item)
            elif isinstance(item, types.ModuleType) and _package(item.__name__) == package:
                self._global_names(item, names_of(function.__code__))

    def _global_names(self, module: types.ModuleType, names: list[str]) -> None:
        """What a function may change in another file of its package."""
        held = [n for n in names if n in vars(module) and not callable(vars(module)[n])]
        scope = vars(module)
        self._add(
            Place(
                module.__name__, module, {n: scope[n] for n in held}, lambda: {n: scope[n] for n in held}, scope.update
            )
        )  # type: ignore[arg-type]
        for name in held:
            self.visit(name, scope[name])

    def _cell(self, name: str, cell: types.CellType) -> None:
        if id(cell) in self.seen:
            return
        self.seen[id(cell)] = cell
        try:
            value = cell.cell_contents
        except ValueError:
            return
        self._add(
            Place(
                "",
                cell,
                {name: value},
                lambda: {name: cell.cell_contents},
                lambda old: setattr(cell, "cell_contents", old[name]),
            )
        )
        self.visit(name, value)


def names_of(code: types.CodeType) -> list[str]:
    """Names of globals and attributes in a function's code and in functions that it defines."""
    nested = [n for c in code.co_consts if isinstance(c, types.CodeType) for n in names_of(c)]
    return list(dict.fromkeys((*code.co_names, *nested)))


def _generator(name: str, read: Callable[[], object], write: Callable[..., object]) -> Place:
    """One value that is read and written by functions."""
    return Place("", None, {name: read()}, lambda: {name: read()}, lambda old: write(old[name]) and None)  # type: ignore[func-returns-value]


def _torch_generator(name: str, generator: torch.Generator) -> Place:
    """The state of a generator of torch as bytes, which no mode of torch changes into something else."""

    def read() -> bytes:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return bytes(generator.get_state().numpy())

    def write(state: bytes) -> None:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return _generator(name, read, write)


def _position(value: Iterator[object]) -> dict[object, object]:
    """Where an iterator stands, as far as it shows."""
    frame = getattr(value, "gi_frame", None)
    inner = {k: v for k, v in frame.f_locals.items() if isinstance(v, PLAIN)} if frame is not None else {}
    return {"": (repr(value), operator.length_hint(value, -1), getattr(frame, "f_lasti", None), tuple(inner.items()))}


def _package(name: str) -> str:
    return name.partition(".")[0]


def _joined(name: str, key: object, owner: object) -> str:
    if owner is None or not name:
        return str(key)
    if isinstance(owner, (list, collections.deque, set)) or key == "":
        return name
    is_item = isinstance(owner, dict) and not all(isinstance(k, str) and k.isidentifier() for k in owner)
    return f"{name}[{key!r}]" if is_item else f"{name}.{key}"


class _Absent:
    """Stands for a value that is not there."""


_ABSENT = _Absent()


def _same(before: object, now: object) -> bool:
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if isinstance(before, PLAIN) or isinstance(before, (torch.dtype, torch.device)):
        return before == now
    if isinstance(before, np.ndarray):
        return bool(np.array_equal(before, now))  # type: ignore[arg-type]
    if isinstance(before, (tuple, list)) and isinstance(now, (tuple, list)):
        return len(before) == len(now) and all(map(_same, before, now))
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_same(before[k], now[k]) for k in before)
    return type(before) is types.MethodType and before == now
