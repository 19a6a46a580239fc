"""A record of a step on one rank, with times: its actions, what comes once after them, and every message.

A message has three times: when it was started, when somebody began to wait for it, and when it was there. Between the first
two the rank did something else; what lies between the last two is *exposed*. Times are marks: on a CPU seconds of
`time.perf_counter`, on a GPU events in its stream, which are read when the step is over, so that recording makes neither
wait.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeVar

import torch

from ..data.fields import Length, Paragraph, Seconds, kept, to_data
from ..data.schema import MOST_RANKS, MOST_SIZE, integer
from .backends import Mark, backend_of
from .calls import Call, Message, Posted
from .collectives import COLLECTIVES

T = TypeVar("T")
KEPT = 32
"""The number of steps that are kept."""


class Span(NamedTuple):
    """An action, or what comes once a step ("gradients", "update", …), in seconds from the start of the step."""

    name: str
    start_s: Seconds
    end_s: Seconds


class Sent(NamedTuple):
    """A message as this rank saw it, in seconds from the start of the step. axes: of the mesh (for a message between two
    ranks the other rank); nbytes: of the full array, as the price counts them; during: the span that it was started in."""

    kind: str
    axes: str
    nbytes: Annotated[int, integer(0, MOST_SIZE)]
    site: Paragraph
    during: str
    start_s: Seconds
    wait_s: Seconds
    end_s: Seconds

    @property
    def non_overlapped_s(self) -> float:
        """Seconds that the rank waited."""
        return self.end_s - self.wait_s


@dataclass(frozen=True)
class StepRecord:
    """One step of one rank. input_s: that it waited for its batch, before its seconds begin (None: nobody noted it); host_s: in
    which the host had started all of the step, where a device works behind it (None: the host is the device)."""

    seconds: Seconds
    spans: tuple[Span, ...]
    messages: tuple[Sent, ...]
    input_s: Seconds | None = field(default=None, metadata=kept(sparse=True))
    host_s: Seconds | None = field(default=None, metadata=kept(sparse=True))


@dataclass(frozen=True)
class RankRecord:
    """The file of a rank: its last steps."""

    rank: Annotated[int, integer(0, MOST_RANKS)]
    steps: Annotated[tuple[StepRecord, ...], Length(1, KEPT)]
    version: Annotated[int, integer(1, 1)] = field(default=1, metadata=kept(key="autopar_profile", required=True))


class Recorder:
    """Records steps, the last KEPT of which it has. A Comm tells it of messages, the session and its executor of spans, and who
    takes batches how long the next step waited for its own (input_s)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._backend = backend_of(device)
        self.mark: Callable[[], Mark] = self._backend.mark
        self.steps: deque[StepRecord] = deque(maxlen=KEPT)
        self.input_s: float | None = None
        self._start: Mark = None
        self._during = ""
        self._spans: list[tuple[str, Mark, Mark]] = []
        self._messages: list[_Open] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step; `steps` has its record when it has ended without an error."""
        self._spans, self._messages, self._during = [], [], ""
        self._start, began_s = self.mark(), time.perf_counter()
        yield
        end, host_s = self.mark(), None if self._backend.is_host else time.perf_counter() - began_s
        self._backend.module.synchronize(self.device)
        at = self._seconds
        spans = tuple(Span(name, at(start), at(stop)) for name, start, stop in self._spans)
        messages = tuple(one.closed(at) for one in self._messages if one.end is not None)
        self.steps.append(StepRecord(at(end), spans, messages, self.input_s, host_s))
        self.input_s = None
        self._spans, self._messages = [], []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record a span of time under a name; messages that start inside belong to it."""
        outer, self._during = self._during, name
        start = self.mark()
        yield
        self._spans.append((name, start, self.mark()))
        self._during = outer

    def as_data(self, rank: int) -> dict[str, Any]:
        """The content of a rank's file."""
        data: dict[str, Any] = to_data(RankRecord(rank, tuple(self.steps)))
        return data

    def collective(self, call: Call, wait: Callable[[], None]) -> Callable[[], None]:
        """How to wait for a call that was just started, noting when."""
        whole = COLLECTIVES[call.kind].whole(call)
        message = self._opened(call.kind, ",".join(call.group.axes), whole, call.site)

        def finish() -> None:
            message.wait = self.mark()
            wait()
            message.end = self.mark()

        return finish

    def posted(self, messages: Sequence[Message], posted: Sequence[Posted]) -> list[Posted]:
        """Messages between two ranks that were just started, which note when they are waited for."""
        return [
            _Noted(one, self._opened(message.kind, f"rank {message.peer}", message.buffer, message.site), self.mark)
            for message, one in zip(messages, posted, strict=True)
        ]

    def _opened(self, kind: str, axes: str, buffer: torch.Tensor, site: str) -> _Open:
        nbytes = buffer.numel() * buffer.element_size()
        message = _Open(kind, axes, nbytes, site, self._during, self.mark())
        self._messages.append(message)
        return message

    def _seconds(self, mark: Mark) -> float:
        """The seconds of a mark from the start of the step."""
        return self._backend.seconds(self._start, mark)


def spanned(recorder: Recorder | None, name: str) -> AbstractContextManager[None]:
    """A span of a step, where steps are recorded."""
    return nullcontext() if recorder is None else recorder.span(name)


def recorded(method: Callable[..., T]) -> Callable[..., T]:
    """A method that is a step of an object with a `recorder`, which may be None."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> T:
        if self.recorder is None:
            return method(self, *args, **kwargs)
        with self.recorder.step():
            return method(self, *args, **kwargs)

    return run


@dataclass(slots=True)
class _Open:
    """A recorded message under way."""

    kind: str
    axes: str
    nbytes: int
    site: str
    during: str
    start: Mark
    wait: Mark = None
    end: Mark = None

    def closed(self, at: Callable[[Mark], float]) -> Sent:
        return Sent(
            self.kind, self.axes, self.nbytes, self.site, self.during, at(self.start), at(self.wait), at(self.end)
        )


class _Noted(Posted):
    """A posted message that notes when it is waited for."""

    def __init__(self, posted: Posted, message: _Open, mark: Callable[[], Mark]) -> None:
        self._posted = posted
        self._message = message
        self._mark = mark

    def wait(self) -> None:
        self._message.wait = self._mark()
        self._posted.wait()
        self._message.end = self._mark()

    def done(self) -> bool:
        return self._posted.done()
