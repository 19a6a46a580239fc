"""Small programs for simulated GPUs, each right, and wrong in one way that the simulation has to find.

A line with a number behind it is one that the finding must name.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

Body = Callable[[int, bool], object]
"""Runs as a rank, right or (True) wrong."""


@dataclass(frozen=True)
class Planted:
    """A program with a fault. kind: of the finding; lines: numbers of the marked lines."""

    body: Body
    kind: str
    ranks: int

    @property
    def lines(self) -> set[int]:
        text, first = inspect.getsourcelines(self.body)
        return {first + at for at, line in enumerate(text) if re.search(r"# [123]$", line.rstrip())}

    def __str__(self) -> str:
        return self.body.__name__.replace("_", " ")


PLANTED: list[Planted] = []


def planted(kind: str, ranks: int = 1) -> Callable[[Body], Body]:
    """Add a program to the table."""

    def add(body: Body) -> Body:
        PLANTED.append(Planted(body, kind, ranks))
        return body

    return add


on_gpu = functools.partial(torch.zeros, device="cuda")
on_host = functools.partial(torch.empty, pin_memory=True)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
