"""A process that ends at a given moment of what it does to files, without processes: from then on nothing it tries happens."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir", "link", "fsync")
"""The functions of os by which files are made to be, named and deleted."""


class Killed(BaseException):
    """The end of a process, against which no cleaning up helps: what that tries fails likewise."""


@contextlib.contextmanager
def killed_after(count: int) -> Iterator[list[int]]:
    """Inside, so many calls to the file system work, and none after them; what is there counts all."""
    made = [0]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            made[0] += 1
            if made[0] > count:
                raise Killed
            return call(*args, **more)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, counted(getattr(os, name)))
        with contextlib.suppress(Killed):
            yield made


def moments(save: Callable[[], Any], every: int = 1) -> Iterator[int]:
    """Run `save` so that it is killed at every moment, or every nth, before it is whole; the number of each. The caller looks at
    what is there, and then goes on."""
    for count in itertools.count(0, every):
        with killed_after(count) as made:
            save()
        if made[0] <= count:
            return
        yield count
