"""What a rank did last, kept at all times, and told when a run hangs.

The last messages of a rank stay in a ring buffer, with step, action and times. A thread *beats*: it writes into the job's
store where the rank is (`diagnosis.Beat`). Whoever has waited longer than the limit, or than twice the longest step so far,
asks all ranks for their last messages, and whoever is first writes the diagnosis into the store; every rank that still beats
finds it there, writes its buffer to a file and ends. So a hang is named, with the line, in about the limit, and not when a
collective times out. With every beat a rank also looks at the beat of one of those that it sends to: if they have not sent the
same messages (message_order.py), it asks at once. A rank that fails writes its buffer too, with its error. Where the store
itself does not answer, because its machine or the link to it is gone, a rank that waits ends by itself after the limit.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from .diagnosis import Beat, diagnose
from .errors import RankError
from .message_order import MessageOrder, Row, differing_group, stable_hash

KEPT = 256
"""Messages."""
APART_S = 2.5
"""Between two readings of the others' beats, in beats' intervals at least."""
RANKS_A_SECOND = 100
"""Beats that the store is given, and asked for, in a second."""
COLUMNS = "started", "step", "action", "number", "group", "members", "what", "waited", "ended", "turn", "place", "hash"
STOPPING_S = 5.0
"""An answer of the store takes less, unless the machine that holds it is gone."""
FLIGHT = "flight"
"""The folder of a run for what its ranks write when they end."""
STRAYS, HANGS = "strays", "hangs"
WAITED, ENDED = COLUMNS.index("waited"), COLUMNS.index("ended")


class Flight:
    """One rank's buffer and beats. machines: names by rank, once ranks have told each other."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.step = 0
        self.action = ""
        self.longest_step_s = 0.0
        self.waited_s = 0.0
        self.machines: Sequence[str] = ()
        self.started: dict[str, int] = {}
        self.recent: deque[list[Any]] = deque(maxlen=KEPT)
        self.order = MessageOrder()
        self._known: dict[tuple[Any, ...], tuple[str, int]] = {}
        self._partners: set[int] = set()
        self._halted = False
        self._waiting: list[Any] | None = None
        self.working = ""
        self._excuse, self._excused_at, self._said = "", 0.0, ""
        self._beats = 0
        self._main = threading.get_ident()
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._heard_at = 0.0
        self._step_began = time.monotonic()

    # ---- what the rank does

    def begin_step(self, step: int) -> None:
        """A step begins."""
        now = time.monotonic()
        if self.step:
            self.longest_step_s = max(self.longest_step_s, now - self._step_began)
        self.step, self._step_began = step, now

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
        if self._halted:
            self._ended.wait()  # for the end of this process: the last messages of all ranks are to be compared
        known = self._known.get((signature, own))
        if known is None:
            known = self._known[signature, own] = describe(), stable_hash(signature)
            self._partners.update(members)
        what, own_hash = known
        turn, place = self.order.turn, self.order.note(group, own_hash)
        entry = [time.time(), self.step, self.action, number, group, members, what, None, None, turn, place, own_hash]
        self.started[group] = number
        self.recent.append(entry)
        return entry

    def wait(self, entry: list[Any]) -> None:
        """The rank begins to wait for it."""
        entry[WAITED] = time.time()
        self._waiting = entry

    def end(self, entry: list[Any]) -> None:
        """It is there."""
        entry[ENDED] = time.time()
        self.waited_s += entry[ENDED] - (entry[WAITED] or entry[ENDED])
        self._waiting = None

    @property
    def awaited(self) -> object | None:
        """The message that the rank waits for."""
        return self._waiting

    def fail(self) -> None:
        """The last message failed, while it was started or waited for."""
        if self._waiting is None and self.recent:
            self._waiting = self.recent[-1]

    @contextmanager
    def excused(self, why: str) -> Iterator[None]:
        """Inside, this rank is known to take its time: nobody is to end because of it, for as long as a collective may take."""
        self._excuse, self._excused_at = why, time.monotonic()
        try:
            yield
        finally:
            self._excuse = ""

    # ---- what it says

    def beat(self, asked: bool = False) -> Beat:
        """Where it is now. asked: with its last messages."""
        self._beats += 1
        waiting = self._waiting
        at: dict[str, Any] = {}
        if waiting is not None:
            message = dict(zip(COLUMNS, waiting, strict=True))
            at = {"waits": message["what"], "since_s": time.time() - (message["waited"] or message["started"])}
            at |= {"group": message["group"], "place": message["number"], "members": message["members"]}
        return Beat(
            self.rank,
            self._beats,
            self.step,
            self.action,
            started=dict(self.started),
            line=self._line(),
            excuse=self._excuse,
            excused_s=time.monotonic() - self._excused_at if self._excuse else 0.0,
            working=self.working,
            turn=self.order.turn,
            marks=self.order.marks(),
            last=tuple(row_of(dict(zip(COLUMNS, entry, strict=True))) for entry in list(self.recent)) if asked else (),
            **at,
        )

    def failed(self, error: BaseException) -> Beat:
        """Where it was when an error ended it; in a message, it ended because of another rank."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if _is_users(frame)]
        line = _place(frames[-1]) if frames else ""
        blamed = error.ranks if isinstance(error, RankError) else ()
        return replace(self.beat(), line=line, error=f"{type(error).__name__}: {error}", blamed=blamed)

    def _line(self) -> str:
        """The innermost line of Python that is not the runtime's or torch's, of the thread that trains."""
        frame: FrameType | None = sys._current_frames().get(self._main)
        while frame is not None and not _is_users(frame):
            frame = frame.f_back
        return "" if frame is None else _place(frame)

    def as_data(self, beat: Beat) -> dict[str, Any]:
        """What its file holds."""
        rows = [dict(zip(COLUMNS, entry, strict=True)) for entry in list(self.recent)]
        own = {"beat": asdict(replace(beat, last=())), "recent": rows}
        return {"autopar_flight": 3, "ranks": self.world_size, "machines": list(self.machines), **own}

    def write(self, folder: Path, beat: Beat) -> None:
        """Its file, for autopar-doctor."""
        path = folder / f"rank_{self.rank}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.as_data(beat)), encoding="utf-8")
        except OSError as error:
            with suppress(OSError):
                path.unlink()
            print(f"rank {self.rank}: {folder} cannot be written ({error.strerror})", file=sys.stderr, flush=True)

    # ---- the thread

    def watch(
        self, store: dist.Store, folder: Path, limit_s: float, first_limit_s: float, end: Callable[[str], None]
    ) -> None:
        """Beat, and look for whoever keeps this rank for more than so many seconds. first_limit_s: in the first step, which warms
        up; folder: for the buffers; end: ends the process with a text."""
        interval_s = max(min(1.0, limit_s / 10), self.world_size / RANKS_A_SECOND)
        own: dist.Store = store.clone()  # type: ignore[attr-defined]  # of this thread alone: the rank's may be waiting
        limits_s, self._heard_at = (limit_s, first_limit_s), time.monotonic()
        for body, of in ((self._watch, (own,)), (self._guard, ())):
            arguments = (*of, folder, limits_s, interval_s, end)
            self._threads.append(threading.Thread(target=body, args=arguments, name="autopar beat", daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """The run is over: no more beats. A thread that asks the store while the interpreter ends would abort the process."""
        self._ended.set()
        for thread in self._threads:
            thread.join(STOPPING_S)

    def _watch(
        self,
        store: dist.Store,
        folder: Path,
        limits_s: tuple[float, float],
        interval_s: float,
        end: Callable[[str], None],
    ) -> None:
        apart_s = max(APART_S, 3 * interval_s)
        while True:
            try:
                asked = store.get("ask").decode() if store.check(["ask"]) else ""
                self._halted = asked == STRAYS
                beat = self._say(store, bool(asked))
                limit_s = self._limit_s(limits_s, 4 * apart_s / 3 + 2 * interval_s)
                other = self._other(store, beat.number)
                strays = other is not None and bool(differing_group(beat.marks, other.marks))
                if strays or (beat.waits and beat.since_s > limit_s):
                    self._ask(store, apart_s, limits_s[1], strays)
                if self.rank == 0 and beat.excused_s > limit_s and self._said != beat.excuse:
                    self._say_who_works(store, beat)
                if store.check(["diagnosis"]):
                    text = store.get("diagnosis").decode()
                    self.write(folder, beat)
                    end(text)
                    return
            except RuntimeError:  # the store is gone, and with it the job
                return
            if self._ended.wait(interval_s):
                return

    def _limit_s(self, limits_s: tuple[float, float], takes_s: float) -> float:
        """Seconds of waiting after which something is wrong. takes_s: to find out what, and for all to hear of it."""
        limit_s = max(limits_s[0] - takes_s, limits_s[0] / 4)
        return max(limit_s, 2 * self.longest_step_s) if self.longest_step_s else limits_s[1]

    def _guard(
        self, folder: Path, limits_s: tuple[float, float], interval_s: float, end: Callable[[str], None]
    ) -> None:
        """See that the store answers; a call that it does not answer would not come back."""
        while not self._ended.wait(interval_s):
            silent_s, limit_s = time.monotonic() - self._heard_at, self._limit_s(limits_s, 2 * interval_s)
            if silent_s > limit_s and (beat := self.beat()).waits and beat.since_s > limit_s:
                self.write(folder, beat)
                end(
                    f"this run hangs, and the job's store has not answered for {silent_s:.0f} s: its machine (that of "
                    "rank 0, or of torchrun's rendezvous) is gone, or the link to it is; "
                    f"rank {self.rank} waits for {beat.waits}, {beat.where}"
                )

    def _other(self, store: dist.Store, turn: int) -> Beat | None:
        """What one of those that this rank sends to said last: another one every time."""
        partners = sorted(self._partners - {self.rank})
        key = f"beat/{partners[turn % len(partners)]}" if partners else ""
        return Beat.of(json.loads(store.get(key))) if key and store.check([key]) else None

    def _say_who_works(self, store: dist.Store, own: Beat) -> None:
        """Once, that what all ranks wait for takes long, and on which of them."""
        self._said = own.excuse
        working = [f"rank {beat.rank} ({beat.working})" for beat in self._read(store) if beat and beat.working]
        if working:
            said = f"{own.excuse} takes {own.excused_s:.0f} s so far: all wait for {', '.join(working[:8])}"
            print(said, file=sys.stderr, flush=True)

    def _ask(self, store: dist.Store, apart_s: float, excused_s: float, strays: bool) -> None:
        """Read what all ranks say, twice, and write down what follows from it, if nobody did. excused_s: after so long an excuse
        is none; strays: messages differ."""
        store.set("ask", STRAYS if strays else HANGS)
        self._halted = strays
        first = self._read(store)
        end = time.monotonic() + apart_s
        while time.monotonic() < end:
            time.sleep(apart_s / 3)
            self._say(store, asked=True)  # others may ask at the same time, and take who is still for dead
        if self._waiting is None and not strays:
            store.delete_key("ask")
            return
        second = self._read(store)
        if strays or not any(beat is not None and 0 < beat.excused_s < excused_s for beat in second):
            what = "ranks have gone different ways" if strays else "this run hangs"
            found = diagnose(first, second)
            on = "".join(f"; rank {rank} is on {self.machines[rank]}" for rank in found.culprits[:8] if self.machines)
            store.compare_set("diagnosis", "", f"{what}: {found.text}{on}")

    def _say(self, store: dist.Store, asked: bool) -> Beat:
        beat = self.beat(asked)
        store.set(f"beat/{self.rank}", json.dumps(asdict(beat)))
        self._heard_at = time.monotonic()
        return beat

    def _read(self, store: dist.Store) -> list[Beat | None]:
        keys = [f"beat/{rank}" for rank in range(self.world_size)]
        if store.check(keys):
            return [Beat.of(json.loads(text)) for text in store.multi_get(keys)]
        return [Beat.of(json.loads(store.get(key))) if store.check([key]) else None for key in keys]


def _is_users(frame: FrameType) -> bool:
    """Whether a frame is neither the runtime's nor torch's."""
    path = Path(frame.f_code.co_filename)
    return (
        Path(__file__).parent not in path.parents and "torch" not in path.parts and not path.name.startswith("<frozen")
    )


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def row_of(message: Mapping[str, Any]) -> Row:
    """What others compare of a message of the buffer."""
    return Row(message["group"], message["turn"], message["place"], message["hash"], message["what"])


def set_aside(folder: Path) -> None:
    """Give what ranks of a run before wrote another name."""
    if not folder.exists():
        return
    before = folder.with_name(f"{folder.name}-before")
    shutil.rmtree(before, ignore_errors=True)
    with suppress(OSError):
        folder.rename(before)


def end_process(rank: int) -> Callable[[str], None]:
    """Ends this process with the diagnosis, at once: its main thread is waiting."""

    def end(text: str) -> None:
        print(f"error on rank {rank}: {text}", file=sys.stderr, flush=True)
        os._exit(1)

    return end
