"""Batches that are read while the step before theirs runs, where kernels queue behind the host or a rank reads its own rows; else
each in its turn, as a thread would take processors, and Python's lock, from the step.

One thread calls the data function and copies what the rank needs of a batch (ready.py). It goes on to the next batch once the
step has begun and looks at the data function's memory no more, and never further than it is told. So no batch is taken that no
step is for, and a data function may fill the same memory every time. What it raises is raised in the step that its batch is for,
with its own lines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from ..comm.backends import backend_of
from ..comm.comm import Comm
from ..comm.process import TorchComm
from ..step.ready import Ready


class InTurn:
    """Batches of an iterator, each read when its step begins."""

    def __init__(self, batches: Callable[[], Iterator[Any]]) -> None:
        self._batches = batches()

    def take(self, more: bool) -> tuple[Any, Ready | None]:
        """The next batch."""
        return next(self._batches), None

    def close(self) -> None:
        """Nothing is under way."""


class ReadAhead:
    """Batches of an iterator that lives in a thread. waits: batches that were not there when their step began, though they could
    have been read behind the one before."""

    def __init__(
        self, batches: Callable[[], Iterator[Any]], prepare: Callable[[Any], Ready | None], comm: Comm
    ) -> None:
        """prepare: makes a batch ready for its step, or gives nothing, and then the next one is read in its turn."""
        self._batches, self._prepare, self._comm = batches, prepare, comm
        self._asked = SimpleQueue[bool]()
        self._outcomes = SimpleQueue[tuple[Any, Ready | None, BaseException | None]]()
        self._under_way, self.waits = False, 0
        self._thread = threading.Thread(target=self._run, name="autopar batches", daemon=True)
        self._thread.start()

    def take(self, more: bool) -> tuple[Any, Ready | None]:
        """The next batch. more: a step follows, whose batch is read as soon as nobody looks at the memory of this one."""
        if not self._under_way:
            self._ask()
        elif self._outcomes.empty():
            self.waits += 1
        with self._awaited():
            batch, ready, error = self._outcomes.get()
        self._under_way = False
        if error is not None:
            raise error
        return batch, ready if ready is None or not more else replace(ready, go_on=self._ask)

    def close(self) -> None:
        """Wait until the thread is done with the data function."""
        self._asked.put(False)
        with self._awaited():
            self._thread.join()

    def _ask(self) -> None:
        self._under_way = True
        self._asked.put(True)

    @contextmanager
    def _awaited(self) -> Iterator[None]:
        """Inside, the rank is where the thread is."""
        flight = self._comm.flight if isinstance(self._comm, TorchComm) else None
        if flight is not None:
            flight.thread = self._thread.ident
        try:
            yield
        finally:
            if flight is not None:
                flight.thread = threading.get_ident()

    def _run(self) -> None:
        device, batches = self._comm.device, None
        backend_of(device).module.set_device(device)
        while self._asked.get():
            try:
                batches = self._batches() if batches is None else batches
                batch = next(batches)
                self._outcomes.put((batch, self._prepare(batch), None))
            except BaseException as error:
                self._outcomes.put((None, None, error))
            batch = None
        close: Callable[[], None] = getattr(batches, "close", lambda: None)
        close()
