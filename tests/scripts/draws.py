"""Random numbers of a program for eager: noted where one rank draws them, given out where the model would draw its own.

What a program draws is a hash of key and place in the tensor, the same on any number of ranks. Eager with these numbers is what
programs with dropout and noise are held to.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.runtime.kernels import ops


class Draws:
    """The numbers of every draw of a run, in order; of a dropout what it multiplies by."""

    def __init__(self) -> None:
        self.numbers: deque[tuple[str, Tensor]] = deque()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """A context in which a program on one rank, a thread, notes what it draws; a key that comes again draws the same."""
        keys: set[Any] = set()

        def noting(kind: str) -> Any:
            draw = getattr(ops, kind)

            def run(first: Any, second: Any, key: Any, *rest: Any, **named: Any) -> Tensor:
                if threading.current_thread() is not threading.main_thread() and key not in keys:
                    keys.add(key)
                    of = torch.ones_like(first) if isinstance(first, Tensor) else first
                    self.numbers.append((kind, draw(of, second, key, *rest, **named)))
                return draw(first, second, key, *rest, **named)

            return mock.patch.object(ops, kind, run)

        with noting("dropout"), noting("random_normal"), noting("random_uniform"):
            yield

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """A context in which modules draw what was noted. Raises AssertionError where they draw otherwise, or less."""
        inside: list[None] = []
        call, randint = nn.Module.__call__, torch.randint

        def module(self: nn.Module, *args: Any, **named: Any) -> Any:
            inside.append(None)
            try:
                return call(self, *args, **named)
            finally:
                inside.pop()

        def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            return x * self._next("dropout", x.shape) if training and p else x

        def normal(x: Tensor, **named: Any) -> Tensor:
            return self._next("random_normal", x.shape) if inside else torch.randn(x.shape)

        def integers(*bounds: Any, **named: Any) -> Tensor:
            if not inside:
                return randint(*bounds, **named)
            low, high, size = bounds
            return (self._next("random_uniform", torch.Size(size)) * (high - low)).floor().long() + low

        with (
            mock.patch.object(nn.Module, "__call__", module),
            mock.patch.object(F, "dropout", dropout),
            mock.patch.object(torch, "randn_like", normal),
            mock.patch.object(torch, "randint", integers),
        ):
            yield
        assert not self.numbers

    def _next(self, kind: str, shape: torch.Size) -> Tensor:
        noted, numbers = self.numbers.popleft()
        assert (noted, numbers.shape) == (kind, shape)
        return numbers
