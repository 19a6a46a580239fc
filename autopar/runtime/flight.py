"""What a rank did last, kept at all times, and told when a run hangs.

The last messages of a rank stay in a ring buffer, with step, action and times. A thread *beats*: it writes into the job's
store where the rank is (`diagnosis.Beat`). Whoever has waited longer than the limit, or than twice the longest step so far,
reads what all ranks say, and whoever is first writes the diagnosis into the store; every rank that still beats finds it there,
writes its buffer to a file and ends. So a hang is named, with the line, in about the limit, and not when a collective times out.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from .diagnosis import Beat, diagnose

KEPT = 256
"""Messages."""
APART_S = 2.5
"""Between two readings of the others' beats, in beats' intervals at least."""
RANKS_A_SECOND = 200
"""Beats that the store is given in a second."""


class Flight:
    """One rank's buffer and beats. say: told of the diagnosis before the process ends."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.step = 0
        self.action = ""
        self.longest_step_s = 0.0
        self.waited_s = 0.0
        self.started: dict[str, int] = {}
        self.recent: deque[list[Any]] = deque(maxlen=KEPT)
        self._waiting: list[Any] | None = None
        self._excuse = ""
        self._beats = 0
        self._main = threading.get_ident()
        self._ended = threading.Event()
        self._step_began = time.monotonic()

    # ---- what the rank does

    def begin_step(self, step: int) -> None:
        """A step begins."""
        now = time.monotonic()
        if self.step:
            self.longest_step_s = max(self.longest_step_s, now - self._step_began)
        self.step, self._step_began = step, now

    def start(
        self, number: int, group: str, members: tuple[int, ...], what: str, signature: tuple[Any, ...] = ()
    ) -> list[Any]:
        """A message starts, the number-th of its group; the entry that `wait` and `end` take."""
        entry = [time.time(), self.step, self.action, number, group, members, what, signature, None, None]
        self.started[group] = number
        self.recent.append(entry)
        return entry

    def wait(self, entry: list[Any]) -> None:
        """The rank begins to wait for it."""
        entry[8] = time.time()
        self._waiting = entry

    def end(self, entry: list[Any]) -> None:
        """It is there."""
        entry[9] = time.time()
        self.waited_s += entry[9] - (entry[8] or entry[9])
        self._waiting = None

    @contextmanager
    def excused(self, why: str) -> Iterator[None]:
        """Inside, this rank is known to take its time: nobody is to end because of it."""
        self._excuse = why
        try:
            yield
        finally:
            self._excuse = ""

    # ---- what it says

    def beat(self) -> Beat:
        """Where it is now."""
        self._beats += 1
        waiting = self._waiting
        at = (
            {}
            if waiting is None
            else {
                "waits": waiting[6],
                "since_s": time.time() - waiting[8],
                "group": waiting[4],
                "place": waiting[3],
                "signature": str(waiting[7]),
                "members": waiting[5],
            }
        )
        return Beat(
            self.rank,
            self._beats,
            self.step,
            self.action,
            started=dict(self.started),
            line=self._line(),
            excuse=self._excuse,
            **at,
        )

    def _line(self) -> str:
        """The innermost line of Python that is not the runtime's or torch's, of the thread that trains."""
        frame: FrameType | None = sys._current_frames().get(self._main)
        own = Path(__file__).parent
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if own not in path.parents and "torch" not in path.parts and not path.name.startswith("<frozen"):
                return f"{path}:{frame.f_lineno} ({frame.f_code.co_name})"
            frame = frame.f_back
        return ""

    def as_data(self, beat: Beat) -> dict[str, Any]:
        """What its file holds."""
        keys = ("started", "step", "action", "number", "group", "members", "what", "signature", "waited", "ended")
        rows = [dict(zip(keys, entry, strict=True)) | {"signature": str(entry[7])} for entry in list(self.recent)]
        return {"autopar_flight": 1, "ranks": self.world_size, "beat": asdict(beat), "recent": rows}

    # ---- the thread

    def watch(
        self, store: dist.Store, folder: Path, limit_s: float, first_limit_s: float, end: Callable[[str], None]
    ) -> None:
        """Beat, and look for whoever keeps this rank for more than so many seconds. first_limit_s: in the first step, which warms
        up; folder: for the buffers; end: ends the process with a text."""
        interval_s = max(min(1.0, limit_s / 10), self.world_size / RANKS_A_SECOND)
        own: dist.Store = store.clone()  # type: ignore[attr-defined]  # of this thread alone: the rank's may be waiting
        arguments = (own, folder, (limit_s, first_limit_s), interval_s, end)
        thread = threading.Thread(target=self._watch, args=arguments, name="autopar beat", daemon=True)
        thread.start()

    def stop(self) -> None:
        """The run is over: no more beats."""
        self._ended.set()

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
                beat = self.beat()
                store.set(f"beat/{self.rank}", json.dumps(asdict(beat)))
                limit_s = max(limits_s[0] - apart_s, 2 * self.longest_step_s) if self.longest_step_s else limits_s[1]
                if beat.waits and beat.since_s > limit_s:
                    self._ask(store, apart_s)
                if store.check(["diagnosis"]):
                    text = store.get("diagnosis").decode()
                    self._write(folder, beat)
                    end(text)
                    return
            except RuntimeError:  # the store is gone, and with it the job
                return
            if self._ended.wait(interval_s):
                return

    def _ask(self, store: dist.Store, apart_s: float) -> None:
        """Read what all ranks say, twice, and write down what follows from it, if nobody did."""
        first = self._read(store)
        time.sleep(apart_s)
        if self._waiting is None:
            return
        store.set(f"beat/{self.rank}", json.dumps(asdict(self.beat())))
        second = self._read(store)
        if not any(beat is not None and beat.excuse for beat in second):
            store.compare_set("diagnosis", "", diagnose(first, second).text)

    def _read(self, store: dist.Store) -> list[Beat | None]:
        keys = [f"beat/{rank}" for rank in range(self.world_size)]
        if store.check(keys):
            return [Beat.of(json.loads(text)) for text in store.multi_get(keys)]
        return [Beat.of(json.loads(store.get(key))) if store.check([key]) else None for key in keys]

    def _write(self, folder: Path, beat: Beat) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank_{self.rank}.json"
            path.write_text(json.dumps(self.as_data(beat)), encoding="utf-8")
        except OSError as error:
            print(f"rank {self.rank}: {folder} cannot be written ({error.strerror})", file=sys.stderr, flush=True)


def end_process(rank: int) -> Callable[[str], None]:
    """Ends this process with the diagnosis, at once: its main thread is waiting."""

    def end(text: str) -> None:
        print(f"error on rank {rank}: this run hangs: {text}", file=sys.stderr, flush=True)
        os._exit(1)

    return end
