"""A flight recorder: the last messages of a rank, kept at all times, and told when a run hangs or fails.

The last messages of a rank stay in a ring buffer, with step, action and times. Threads of watch.py say from it where the rank is
(`diagnosis.Beat`); a rank that ends because the run hangs, or fails, writes it to a file, with its error.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import median_low
from types import FrameType
from typing import Annotated, Any

from ..data.fields import Paragraph, kept, to_data
from ..data.schema import MOST_RANKS, integer, number
from ..errors import RankError
from .diagnosis import Beat, Count, Rank
from .message_order import MessageOrder, Row, stable_hash
from .observed_time import KEPT_STANDSTILLS, STOOD_S, SeenTime
from .stream_waits import StreamWaits

KEPT = 256
"""The number of messages that are kept."""
KEPT_STEPS = 9
"""The number of steps whose median is the usual step."""
FLIGHT = "flight"
"""The folder of a run for what its ranks write when they end."""
Moment = Annotated[float, number(0, 1e12)]


@dataclass(frozen=True)
class Message:
    """A message of the buffer. started, waited, ended: when; hash: of the message alone."""

    started: Moment
    step: Count
    action: str
    number: Count
    group: str
    members: tuple[Rank, ...]
    what: Paragraph
    waited: Moment | None
    ended: Moment | None
    turn: Count
    place: Count
    hash: Count

    @property
    def row(self) -> Row:
        """The part of the message that other ranks compare."""
        return Row(self.group, self.turn, self.place, self.hash, self.what)


STARTED, STEP, ACTION, WAITED, ENDED = (
    [one.name for one in fields(Message)].index(name) for name in ("started", "step", "action", "waited", "ended")
)


@dataclass(frozen=True)
class Left:
    """The file that a rank left. machines: of all ranks, by rank; empty where ranks did not tell each other."""

    ranks: Annotated[int, integer(1, MOST_RANKS)]
    machines: Sequence[str]
    beat: Beat
    recent: tuple[Message, ...]
    version: Annotated[int, integer(3, 3)] = field(default=3, metadata=kept(key="autopar_flight", required=True))


class Flight:
    """One rank's buffer and beats. machines: names by rank, once ranks have told each other; stream: the waits of its device,
    where messages order streams."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.step = 0
        self.action = ""
        self.usual_step_s = 0.0
        self.stream: StreamWaits | None = None
        self.machines: Sequence[str] = ()
        self.started: dict[str, int] = {}
        self.recent: deque[list[Any]] = deque(maxlen=KEPT)
        self.order = MessageOrder()
        self._known: dict[tuple[Any, ...], tuple[str, int]] = {}
        self._partners: set[int] = set()
        self.seen = SeenTime()
        self.halted = False
        self.ended = threading.Event()
        self._waiting: list[Any] | None = None
        self._waited_s = 0.0
        self.asking: list[str] | None = None
        self.working = ""
        self._excuse = ("", 0.0)
        self._excuses: deque[tuple[float, float]] = deque(maxlen=KEPT_STANDSTILLS)
        self._beats = 0
        self.thread: int | None = threading.get_ident()
        """The thread whose lines are told: the one that trains, or the one whose batch it waits for."""
        self._steps_s: deque[float] = deque(maxlen=KEPT_STEPS)
        self._step_began = time.monotonic()

    # ---- what the rank does

    def begin_step(self, step: int) -> None:
        """Note that a step begins."""
        now = time.monotonic()
        if self.step:
            self._steps_s.append(now - self._step_began)
            self.usual_step_s = median_low(self._steps_s)  # neither the first step nor one that stalled makes it longer
        self.step, self._step_began = step, now
        self.poll()

    def end_step(self) -> None:
        """All messages of a step, or of a forward, have been started."""
        self.order.end_turn()

    def start(
        self,
        number: int,
        group: str,
        members: tuple[int, ...],
        signature: tuple[Any, ...],
        describe: Callable[[], str],
        own: tuple[Any, ...] = (),
    ) -> list[Any]:
        """A message starts, the number-th of its group; the entry that `wait` and `end` take.

        signature: what all members have alike; describe, own: the message in words, and what these depend on beside it.
        """
        if self.halted:
            self.ended.wait()  # for the end of this process: the last messages of all ranks are to be compared
        known = self._known.get((signature, own))
        if known is None:
            known = self._known[signature, own] = describe(), stable_hash(signature)
            self._partners.update(members)
        what, own_hash = known
        turn, place = self.order.turn, self.order.note(group, own_hash)
        entry = [
            time.monotonic(),
            self.step,
            self.action,
            number,
            group,
            members,
            what,
            None,
            None,
            turn,
            place,
            own_hash,
        ]
        self.started[group] = number
        self.recent.append(entry)
        return entry

    @contextmanager
    def connects(self, entry: list[Any]) -> Iterator[None]:
        """Inside, a message starts; the host waits for the others where these first have to connect, before streams do."""
        if self.stream is None:
            yield
            return
        self._waiting = entry
        yield
        self._waiting = None

    def wait(self, entry: list[Any]) -> None:
        """The rank begins to wait for it, or tells its device to."""
        if self.stream is not None:
            self.stream.begin(entry, self.started)
            return
        entry[WAITED] = time.monotonic()
        self._waiting = entry

    def end(self, entry: list[Any]) -> None:
        """The rank has what it waited for, or will where its device goes on."""
        if self.stream is not None:
            self.stream.end()
            return
        entry[ENDED] = time.monotonic()
        self._waited_s += entry[ENDED] - (entry[WAITED] or entry[ENDED])
        self._waiting = None

    def poll(self) -> None:
        """See how far the device is in its stream. Any thread may."""
        for entry, waited_s in self.stream.poll() if self.stream is not None else ():
            entry[ENDED] = time.monotonic()
            entry[WAITED] = entry[ENDED] - waited_s

    @property
    def waiting(self) -> list[Any] | None:
        """The message that the rank waits for, or that its device was seen to stand at."""
        standing = self.stream.standing if self.stream is not None else None
        return self._waiting if standing is None else standing.entry

    @property
    def waited_s(self) -> float:
        """Seconds that the rank waited for messages so far, or that its device did."""
        self.poll()
        return self._waited_s + (self.stream.waited_s if self.stream is not None else 0.0)

    def fail(self) -> None:
        """The last message failed, while it was started or waited for."""
        if self._waiting is None and self.recent:
            self._waiting = self.recent[-1] if self.waiting is None else self.waiting

    @contextmanager
    def asks(self, what: str) -> Iterator[None]:
        """Inside, this rank waits for an answer that is no message of a group."""
        self.asking = [what]
        try:
            yield
        finally:
            self.asking = None

    @property
    def partners(self) -> list[int]:
        """Ranks that it shares messages with."""
        return sorted(self._partners - {self.rank})

    @contextmanager
    def excused(self, why: str) -> Iterator[None]:
        """Inside, this rank is known to take its time: nobody is to end because of it, for as long as a collective may take. What
        it took counts as a standstill afterwards."""
        before, began = self._excuse, time.monotonic()
        self._excuse = (why, began)
        try:
            yield
        finally:
            if (took_s := time.monotonic() - began) > STOOD_S:
                self._excuses.append((self.seen.seconds, took_s))
            self._excuse = before  # a beat finds the excuse, or that it is over: they are told by another thread

    # ---- what it says

    def beat(self, asked: bool = False, of_device: bool = True) -> Beat:
        """The place in the step where the rank is now. asked: with its last messages; of_device: that where its device is, which
        the host runs ahead of."""
        self._beats += 1
        waiting, (excuse, excused_at) = self.waiting if of_device else self._waiting, self._excuse
        step, action, started = self.step, self.action, self.started
        if of_device and self.stream is not None and (behind := self.stream.next) is not None:
            step, action, started = behind.entry[STEP], behind.entry[ACTION], behind.started
        over = tuple((self.seen.seconds - ended_s, took_s) for ended_s, took_s in list(self._excuses))
        at: dict[str, Any] = {}
        if waiting is not None:
            message = Message(*waiting)
            at = {"waits": message.what, "since_s": self._since_s(waiting)}
            at |= {"group": message.group, "place": message.number, "members": message.members}
        return Beat(
            self.rank,
            self._beats,
            step,
            action,
            started=dict(started),
            line=self._line(),
            excuse=excuse,
            excused_s=time.monotonic() - excused_at if excuse else 0.0,
            working=self.working,
            turn=self.order.turn,
            marks=self.order.marks(),
            stood=self.seen.stood() + over,
            last=tuple(Message(*entry).row for entry in list(self.recent)) if asked else (),
            **at,
        )

    def _since_s(self, entry: list[Any]) -> float:
        """Seconds of waiting for it: those that this process saw, where a thread counts them."""
        if self.seen.seconds:
            awaited, awaited_s = self.seen.awaited
            return awaited_s if awaited is entry else 0.0
        return time.monotonic() - (entry[WAITED] or entry[STARTED])

    def failed(self, error: BaseException) -> Beat:
        """The place where the rank was when an error ended it; in a message, it ended because of another rank. An error of the
        host outside of messages has nothing to do with the one that its device stands at."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if _is_users(frame)]
        line = _place(frames[-1]) if frames else ""
        blamed = error.ranks if isinstance(error, RankError) else ()
        beat = self.beat(of_device=self._waiting is not None)
        return replace(beat, line=line, error=f"{type(error).__name__}: {error}", blamed=blamed)

    def _line(self) -> str:
        """The innermost line of Python that is not the runtime's or torch's."""
        frame: FrameType | None = sys._current_frames().get(self.thread or 0)
        while frame is not None and not _is_users(frame):
            frame = frame.f_back
        return "" if frame is None else _place(frame)

    def as_data(self, beat: Beat) -> dict[str, Any]:
        """The content of the rank's file."""
        since_epoch_s = time.time() - time.monotonic()
        recent = [
            [
                at + since_epoch_s if k in (STARTED, WAITED, ENDED) and at is not None else at
                for k, at in enumerate(entry)
            ]
            for entry in list(self.recent)
        ]
        left = Left(self.world_size, self.machines, beat, tuple(Message(*entry) for entry in recent))
        data: dict[str, Any] = to_data(left)
        return data

    def write(self, folder: Path, beat: Beat) -> None:
        """Write the file of the rank, for autopar-doctor."""
        path = folder / f"rank_{self.rank}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.as_data(beat)), encoding="utf-8")
        except OSError as error:
            with suppress(OSError):
                path.unlink()
            print(f"rank {self.rank}: {folder} cannot be written ({error.strerror})", file=sys.stderr, flush=True)


def _is_users(frame: FrameType) -> bool:
    """Whether a frame is neither the runtime's nor torch's."""
    path = Path(frame.f_code.co_filename)
    return (
        Path(__file__).parents[1] not in path.parents
        and "torch" not in path.parts
        and not path.name.startswith("<frozen")
    )


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def set_aside(folder: Path) -> None:
    """Give what ranks of a run before wrote another name."""
    if not folder.exists():
        return
    before = folder.with_name(f"{folder.name}-before")
    shutil.rmtree(before, ignore_errors=True)
    with suppress(OSError):
        folder.rename(before)


def say(text: str) -> None:
    """A line on stderr. Where that is gone, as with a launcher or a terminal, nobody is left to read it, and the rank that was
    to end ends all the same."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def end_process(rank: int) -> Callable[[str], None]:
    """Ends this process with the diagnosis, at once: its main thread is waiting."""

    def end(text: str) -> None:
        say(f"error on rank {rank}: {text}")
        os._exit(1)

    return end
