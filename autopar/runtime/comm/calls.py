"""Messages between ranks as values: a collective, a message between two ranks, and the state of either while it is under way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from .mesh import Group

T = TypeVar("T")
U = TypeVar("U")


class Handle(Generic[T]):
    """A started collective. `wait()` gives its result, the same one every time."""

    __slots__ = ("_result", "_wait")

    def __init__(self, wait: Callable[[], T] | None, result: T | None = None) -> None:
        self._wait = wait
        self._result = result

    @property
    def waits(self) -> bool:
        """Whether it was not waited for yet."""
        return self._wait is not None

    def wait(self) -> T:
        if self._wait is not None:
            wait, self._wait = self._wait, None
            self._result = wait()
        return self._result  # type: ignore[return-value]

    def then(self, finish: Callable[[T], U]) -> Handle[U]:
        return Handle(lambda: finish(self.wait()))


@dataclass(slots=True)
class Call:
    """One collective on contiguous buffers, of a kind of collectives.py; n is the group size, op the reduction ("": none).

    all_reduce: inp, out alike (may be the same); all_gather: out (n, *inp); reduce_scatter: inp (n, *out);
    all_to_all: inp and out (n, *chunk); broadcast: inp of member `root` to every out; reduce: inp, out alike, the out of member
    `root` counts; barrier: empty tensors.
    shift: inp goes to the out of the member `root` places further, round and round. exchange: of inp `sent[m]` rows go
    to member m, of out `received[m]` come from there.
    """

    kind: str
    group: Group
    out: Tensor
    inp: Tensor
    op: str = ""
    root: int = 0
    site: str = ""
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()

    def signature(self) -> tuple[Any, ...]:
        """The facts in which all members of the group must agree."""
        shape = tuple(self.inp.shape)
        return (self.kind, self.op, self.root, shape[1:] if self.sent else shape, self.inp.dtype)

    def describe(self) -> str:
        """In words, which are those of all calls with this signature and site."""
        rows = ["…", *self.inp.shape[1:]] if self.sent else self.inp.shape
        shape = ", ".join(map(str, rows))
        what = f"{self.kind}[{self.op}]" if self.op else self.kind
        return f"{what} of {str(self.inp.dtype).removeprefix('torch.')}[{shape}]" + (
            f" at {self.site}" if self.site else ""
        )


@dataclass(slots=True)
class Message:
    """A contiguous buffer to send to a rank, or to fill from one. The tag tells messages of one pair apart."""

    kind: str
    buffer: Tensor
    peer: int
    tag: int
    site: str = ""

    def signature(self) -> tuple[Any, ...]:
        """The facts in which both ends must agree."""
        return (self.tag, tuple(self.buffer.shape), self.buffer.dtype)

    def __str__(self) -> str:
        return f"{self.kind} {'to' if self.kind == 'send' else 'from'} rank {self.peer}, tag {self.tag}" + (
            f" at {self.site}" if self.site else ""
        )


class Posted(ABC):
    """A started message. Its buffer is the backend's until the wait."""

    @abstractmethod
    def wait(self) -> None: ...

    @abstractmethod
    def done(self) -> bool:
        """Whether wait would return at once, where the backend can tell; else False."""


class Watcher(Protocol):
    """Is told of what is started, and gives a wait that it may note."""

    def collective(self, call: Call, wait: Callable[[], None]) -> Callable[[], None]: ...

    def posted(self, messages: Sequence[Message], posted: Sequence[Posted]) -> list[Posted]: ...
