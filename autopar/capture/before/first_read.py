"""Which attributes of modules forward reads before it writes them: those carry something from one step to the next.

`self.aux = …` that a parent module reads in the same step is part of the step; `self.count += 1` is not. The difference
shows when attributes are watched while forward runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager

from torch import nn

from autopar.capture.before.attribute_watch import watched_attributes

Attribute = tuple[int, str]
"""id of a module, name of an attribute."""


@contextmanager
def reads_before_writes(attributes: Set[Attribute]) -> Iterator[set[Attribute]]:
    """Yields the set that attributes enter when they are read, or deleted, before they were written."""
    written: set[Attribute] = set()
    read_first: set[Attribute] = set()

    def read(module: nn.Module, name: str) -> None:
        key = (id(module), name)
        if key in attributes and key not in written:
            read_first.add(key)

    def bound(module: nn.Module, name: str) -> None:
        written.add((id(module), name))

    with watched_attributes(read, bound, deleted=read):
        yield read_first
