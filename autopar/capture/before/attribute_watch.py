"""Attributes of modules watched while forward runs: which are read, and which are bound or deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

See = Callable[[nn.Module, str], None]
"""Called with a module and the name of an attribute."""


@contextmanager
def watched_attributes(read: See, bound: See, deleted: See) -> Iterator[None]:
    """Within the context each is called before a module's attribute is read, bound or deleted."""
    get, put, delete = nn.Module.__getattribute__, nn.Module.__setattr__, nn.Module.__delattr__

    def watching_get(self: nn.Module, name: str) -> object:
        read(self, name)
        return get(self, name)

    def watching_put(self: nn.Module, name: str, value: object) -> None:
        bound(self, name)
        put(self, name, value)  # type: ignore[arg-type]

    def watching_delete(self: nn.Module, name: str) -> None:
        deleted(self, name)
        delete(self, name)

    nn.Module.__getattribute__ = watching_get  # type: ignore[method-assign,assignment]
    nn.Module.__setattr__ = watching_put  # type: ignore[method-assign]
    nn.Module.__delattr__ = watching_delete  # type: ignore[method-assign]
    try:
        yield
    finally:
        del nn.Module.__getattribute__
        nn.Module.__setattr__ = put  # type: ignore[method-assign]
        nn.Module.__delattr__ = delete  # type: ignore[method-assign]
