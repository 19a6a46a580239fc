"""Places that hold Python values: how each kind is read, written and compared with what it held before.

A place is a shallow copy of some values by key, with functions to read and write them now: attributes of an object, items
of a container, the cell of a closure, names of a file, the state of a random generator.
"""

from __future__ import annotations

import collections
import operator
import random
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from autopar.capture.before.stand_ins import StandIn

Values = Mapping[Any, object]
PLAIN = (bool, int, float, complex, str, bytes, type(None))
MOST_ITEMS = 4096
"""Containers with more items are remembered by their size alone."""


@dataclass(eq=False, slots=True)
class Place:
    """Values by key as they were, and how to read and write them now. owner: what has them; name: the place in words."""

    name: str
    owner: object
    before: Values
    read: Callable[[], Values]
    write: Callable[[Values], None]

    def changes(self) -> list[object]:
        """Keys whose value is another one now."""
        now, before = self.read(), self.before
        if len(now) == len(before) and (
            not now or (all(map(operator.is_, now, before)) and all(map(operator.is_, now.values(), before.values())))
        ):
            return []
        keys = dict.fromkeys((*before, *now))
        return [k for k in keys if not _same(self.before.get(k, _ABSENT), now.get(k, _ABSENT))]

    def named(self, key: object) -> str:
        """One of its values in words."""
        if self.owner is None or not self.name:
            return str(key)
        if isinstance(self.owner, (list, collections.deque, set)) or key == "":
            return self.name
        is_item = isinstance(self.owner, dict) and not (isinstance(key, str) and key.isidentifier())
        return f"{self.name}[{key!r}]" if is_item else f"{self.name}.{key}"


def place(name: str, owner: object, read: Callable[[], Values], write: Callable[[Values], None]) -> Place:
    """A place as it is now."""
    return Place(name, owner, dict(read()), read, write)


def attributes(name: str, owner: object, table: dict[str, object]) -> Place:
    """The attributes of an object; of a module also one of its tables."""

    def write(old: Values) -> None:
        table.clear()
        table.update({str(key): value for key, value in old.items()})

    return place(name, owner, lambda: table, write)


def is_container(value: object) -> bool:
    return isinstance(value, (dict, list, set, collections.deque))


def items(value: Any) -> Values:
    """The items of a container by key, or the container itself; its size where there are too many."""
    if len(value) > MOST_ITEMS:
        return {"": len(value)}
    if type(value) in (dict, collections.OrderedDict):
        return value
    if isinstance(value, dict):
        return dict(dict.items(value))  # a class of the user's may have methods of its own under these names
    return {item: item for item in value} if isinstance(value, set) else dict(enumerate(value))


def container(name: str, value: object) -> Place:
    """The items of a dict, list, deque or set."""

    def write(old: Values) -> None:
        if old.keys() == {""}:
            return
        if isinstance(value, dict):
            value.clear()
            value.update(old)
        elif isinstance(value, set):
            value.clear()
            value.update(old.values())
        elif isinstance(value, (list, collections.deque)):
            value.clear()
            value.extend(old.values())

    return place(name, value, lambda: items(value), write)


def class_values(cls: type) -> Place:
    """The values that instances of a class share, functions aside."""

    def read() -> Values:
        return {k: v for k, v in vars(cls).items() if not k.startswith("__") and not callable(v)}

    def write(old: Values) -> None:
        for added in [str(k) for k in read() if k not in old]:
            delattr(cls, added)
        for key, value in old.items():
            setattr(cls, str(key), value)

    return place(cls.__qualname__, cls, read, write)


def names_in(name: str, scope: dict[str, object], names: Collection[str]) -> Place:
    """Some of the names of a file."""

    def write(old: Values) -> None:
        scope.update({str(key): value for key, value in old.items()})

    return place(name, scope, lambda: {n: scope[n] for n in names if n in scope}, write)


def cell_value(name: str, cell: types.CellType) -> Place:
    """The cell of a closure; it may be empty."""

    def read() -> Values:
        try:
            return {name: cell.cell_contents}
        except ValueError:
            return {}

    def write(old: Values) -> None:
        cell.cell_contents = old.get(name)

    return place("", cell, read, write)


def single(name: str, read: Callable[[], object], write: Callable[..., object]) -> Place:
    """One value that is read and written by functions."""

    def put(old: Values) -> None:
        write(old[name])

    return place("", None, lambda: {name: read()}, put)


def generator(name: str, value: object) -> Place | None:
    """The state of a generator of random numbers; None where `value` is none."""
    if isinstance(value, random.Random):
        return single(name, value.getstate, value.setstate)
    if isinstance(value, np.random.RandomState):
        return single(name, value.get_state, value.set_state)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return single(name, lambda: bits.state, lambda state: setattr(bits, "state", state))
    return _torch_generator(name, value) if isinstance(value, torch.Generator) else None


def _torch_generator(name: str, source: torch.Generator) -> Place:
    """The state as bytes, which no mode of torch changes into something else."""

    def read() -> bytes:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return bytes(source.get_state().numpy())

    def write(state: bytes) -> None:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            source.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return single(name, read, write)


def remembered(name: str, value: Any) -> Place:
    """How many results a function of `functools.cache` or `lru_cache` has made; it is put back by forgetting all of them."""

    def read() -> Values:
        return {"": value.cache_info().misses}

    return place(name, value, read, lambda old: value.cache_clear())


def position(name: str, value: Iterator[object]) -> Place:
    """Where an iterator stands, as far as it shows; it cannot be put back."""

    def read() -> Values:
        frame = getattr(value, "gi_frame", None)
        inner = {k: v for k, v in frame.f_locals.items() if isinstance(v, PLAIN)} if frame is not None else {}
        return {
            "": (repr(value), operator.length_hint(value, -1), getattr(frame, "f_lasti", None), tuple(inner.items()))
        }

    return place(name, value, read, lambda old: None)


class _Absent:
    """Stands for a value that is not there."""


_ABSENT = _Absent()


def _same(before: object, now: object) -> bool:
    if before is now:
        return True
    if type(before) is not type(now) or isinstance(before, (torch.Tensor, nn.Module, StandIn)):
        return False
    if isinstance(before, (*PLAIN, torch.dtype, torch.device, types.MethodType)):
        return before == now
    if isinstance(before, np.ndarray) and isinstance(now, np.ndarray):
        return bool(np.array_equal(before, now))
    if isinstance(before, (tuple, list)) and isinstance(now, (tuple, list)):
        types_before, types_now = [*map(type, before)], [*map(type, now)]
        if types_before == types_now and all(map(PLAIN.__contains__, types_before)):
            return before == now
        return len(before) == len(now) and all(map(_same, before, now))
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_same(before[k], now[k]) for k in before)
    return False
