"""Which attributes of modules forward reads before it writes them: those carry something from one step to the next.

`self.aux = …` that a parent module reads in the same step is part of the step; `self.count += 1` is not. The difference
shows when attributes are watched while forward runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager

from torch import nn

Attribute = tuple[int, str]
"""id of a module, name of an attribute."""


@contextmanager
def reads_before_writes(attributes: Set[Attribute]) -> Iterator[set[Attribute]]:
    """Yields the set that attributes enter when they are read, or deleted, before they were written."""
    written: set[Attribute] = set()
    read_first: set[Attribute] = set()
    get, put, delete = nn.Module.__getattribute__, nn.Module.__setattr__, nn.Module.__delattr__

    def watching_get(self: nn.Module, name: str) -> object:
        key = (id(self), name)
        if key in attributes and key not in written:
            read_first.add(key)
        return get(self, name)

    def watching_put(self: nn.Module, name: str, value: object) -> None:
        written.add((id(self), name))
        put(self, name, value)  # type: ignore[arg-type]

    def watching_delete(self: nn.Module, name: str) -> None:
        key = (id(self), name)
        if key in attributes and key not in written:
            read_first.add(key)
        delete(self, name)

    nn.Module.__getattribute__ = watching_get  # type: ignore[method-assign,assignment]
    nn.Module.__setattr__ = watching_put  # type: ignore[method-assign]
    nn.Module.__delattr__ = watching_delete  # type: ignore[method-assign]
    try:
        yield read_first
    finally:
        del nn.Module.__getattribute__
        nn.Module.__setattr__ = put  # type: ignore[method-assign]
        nn.Module.__delattr__ = delete  # type: ignore[method-assign]
