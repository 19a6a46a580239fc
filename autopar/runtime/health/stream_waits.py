"""Waits for messages in a device's stream, where they order streams and do not stop the host.

NCCL's `Work.wait()` tells a stream to wait and returns at once. The host runs ahead, and is stopped later, wherever it reads a
number of the device: in which line says nothing of the message that is missing. So a rank waits for what its *device* stands
at, which two marks around each wait tell:

    host      w3  w4  w5  .item()        has told the stream of three waits
    device    |w3|  |w4                  has passed the mark before w4 and not the one behind it: it stands there

Seconds between the two are those that the device waited. Marks are asked, and nobody waits for them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Marks(Protocol):
    """Marks in the current stream of a device: a kind of `comm/backends.py`."""

    def mark(self) -> Any: ...

    def passed(self, mark: Any) -> bool: ...

    def seconds(self, start: Any, end: Any) -> float: ...


@dataclass(slots=True)
class StreamWait:
    """A wait that a stream was told of. entry: the message; started: messages by group that the host had started by then; begun,
    over: marks (None: the host itself is still in that wait)."""

    entry: list[Any]
    started: dict[str, int]
    begun: Any
    over: Any = None


class StreamWaits:
    """The waits of one device. next: the oldest that is not over; standing: the same, where the device has come to it."""

    def __init__(self, marks: Marks, enter: Callable[[], None]) -> None:
        """enter: makes the device that of the calling thread."""
        self.next: StreamWait | None = None
        self.standing: StreamWait | None = None
        self.waited_s = 0.0
        self._marks, self._enter = marks, enter
        self._under_way: deque[StreamWait] = deque()
        self._last: StreamWait | None = None
        self._lock = threading.Lock()

    def begin(self, entry: list[Any], started: dict[str, int]) -> None:
        """The stream is about to be told to wait for a message."""
        self._last = StreamWait(entry, dict(started), self._marks.mark())
        self._under_way.append(self._last)

    def end(self) -> None:
        """The stream has been told so."""
        assert self._last is not None
        self._last.over = self._marks.mark()

    def poll(self) -> list[tuple[list[Any], float]]:
        """See how far the device is; the messages that it has waited for since the last time, and for how many seconds. Any
        thread may ask."""
        ended = []
        with self._lock:
            if self._under_way:
                self._enter()
            while self._under_way:
                oldest = self._under_way[0]
                if oldest.over is None or not self._marks.passed(oldest.over):
                    break
                self._under_way.popleft()
                ended.append((oldest.entry, self._marks.seconds(oldest.begun, oldest.over)))
                self.waited_s += ended[-1][1]
            self.next = self._under_way[0] if self._under_way else None
            self.standing = self.next if self.next is not None and self._marks.passed(self.next.begun) else None
        return ended
