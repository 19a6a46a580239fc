"""Beats of a rank, and who is named where one keeps the others waiting.

A thread *beats*: it writes into the job's store where the rank is. A rank that has waited for one message for longer than the
limit, and than twice the usual step, reads what all ranks say, twice. If it waits for that very message to the end, and for
nobody who stood still and runs again, it writes its conclusion into the store, if nobody did. Every rank that still beats finds
it there, writes its buffer (flight.py) to a file and ends. So a hang is named, with the line, a few seconds after the limit and
not when a collective times out. A stall that is over ends nothing; it is said, where it was longer than the limit. Seconds are
those that the rank saw pass (observed_time.py).

With every beat a rank also looks at the beat of one of those that it sends to: if they have not sent the same messages
(message_order.py), it asks at once. Where the store itself does not answer, because its machine or the link to it is gone, a
rank that waits ends by itself.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from .diagnosis import Beat, diagnose, standstill_s
from .flight import Flight, say
from .message_order import differing_group
from .observed_time import GRACE_S, TICK_S

APART_S = 2.5
"""Between two readings of the others' beats, at least."""
RANKS_A_SECOND = 100
"""Beats that the store is given, and asked for, in a second."""
STOPPING_S = 5.0
"""An answer of the store takes less, unless the machine that holds it is gone."""
STRAYS, HANGS = "strays", "hangs"


@dataclass
class Question:
    """The question of a rank while it waits for one thing. entry: that; first: what all said, at_s: when; named: who
    would be named as the limit was over; awaited_s: so far."""

    entry: object
    first: list[Beat | None]
    at_s: float
    named: str = ""
    awaited_s: float = 0.0


class Watch:
    """The watch of one rank, by two threads: one that counts time and never waits for the store, and one that beats and asks."""

    def __init__(
        self, flight: Flight, folder: Path, limit_s: float, first_limit_s: float, end: Callable[[str], None]
    ) -> None:
        """Look for whoever keeps this rank for more than limit_s. first_limit_s: in the first step, which warms up; folder: for
        the buffers; end: ends the process with a text."""
        self.flight, self.seen = flight, flight.seen
        self.folder, self.limit_s, self.first_limit_s, self.end = folder, limit_s, first_limit_s, end
        self.interval_s = max(min(1.0, limit_s / 10), flight.world_size / RANKS_A_SECOND)
        self.apart_s = max(APART_S, 3 * self.interval_s)
        self._question: Question | None = None
        self._said = ""
        self._heard_s = 0.0
        self._known: dict[int, tuple[int, float]] = {}
        self._threads: list[threading.Thread] = []

    def start(self, store: dist.Store) -> None:
        """Begin. store: of the job."""
        own: dist.Store = store.clone()  # type: ignore[attr-defined]  # of this thread alone: the rank's may be waiting
        for body, arguments in ((self._count, ()), (self._beat, (own,))):
            self._threads.append(threading.Thread(target=body, args=arguments, name="autopar beat", daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """The run is over: no more beats. A thread that asks the store while the interpreter ends would abort the process."""
        self.flight.ended.set()
        for thread in self._threads:
            thread.join(STOPPING_S)

    @property
    def usual_limit_s(self) -> float:
        """Seconds of waiting after which something is wrong."""
        usual_s = self.flight.usual_step_s
        return max(self.limit_s, 2 * usual_s) if usual_s else self.first_limit_s

    # ---- the thread that counts

    def _count(self) -> None:
        while not self.flight.ended.wait(TICK_S):
            self.tick()

    def tick(self) -> None:
        """Count a sleep of TICK_S, and see that the store answers: a call that it does not answer would not come back."""
        flight, seen = self.flight, self.seen
        flight.poll()
        seen.tick(TICK_S, self._awaited)
        entry, awaited_s = seen.awaited
        silent_s = seen.seconds - self._heard_s
        if entry is None or min(awaited_s, silent_s) <= self.usual_limit_s + GRACE_S:
            return
        beat = flight.beat()
        what = beat.waits or (flight.asking or ["an answer"])[0]
        if entry is self._awaited:
            flight.write(self.folder, beat)
            self.end(
                f"this run hangs, and the job's store has not answered for {silent_s:.0f} s: its machine (that of "
                "rank 0, or of torchrun's rendezvous) is gone, or the link to it is; "
                f"rank {flight.rank} waits for {what}, {beat.where}"
            )

    @property
    def _awaited(self) -> object | None:
        return self.flight.waiting if self.flight.waiting is not None else self.flight.asking

    # ---- the thread that beats

    def _beat(self, store: dist.Store) -> None:
        pause_s: float | None = 0.0
        while pause_s is not None and not self.flight.ended.wait(pause_s):
            try:
                pause_s = self.turn(store)
            except RuntimeError:  # the store is gone; the other thread goes on counting
                return

    def turn(self, store: dist.Store) -> float | None:
        """Say where this rank is, and look at what others say; seconds until the next turn, None where the run is over. Raises
        RuntimeError where there is no store any more."""
        flight = self.flight
        asked = store.get("ask").decode() if store.check(["ask"]) else ""
        flight.halted = asked == STRAYS
        beat = self._say(store, bool(asked))
        other = self._other(store, beat.number)
        if other is not None and differing_group(beat.marks, other.marks):
            self._name_strays(store)
        pause_s = self._look(store)
        if flight.rank == 0 and beat.excused_s > self.usual_limit_s and self._said != beat.excuse:
            self._say_who_works(store, beat)
        if not store.check(["diagnosis"]):
            return pause_s
        text = store.get("diagnosis").decode()
        flight.write(self.folder, beat)
        if flight.stream is not None:
            flight.ended.wait(self.apart_s + self.interval_s)  # NCCL ends who finds another gone, before it could write
        self.end(text)
        return None

    def _look(self, store: dist.Store) -> float:
        """Ask, go on asking, or conclude; seconds until the next turn."""
        entry, awaited_s = self.seen.awaited
        if self._question is not None and self._question.entry is not entry:
            self._is_over(store, self._question)
            self._question = None
        if entry is None or entry is not self.flight.waiting:
            return self.interval_s
        limit_s = self.usual_limit_s
        asks_s = max(limit_s - self.apart_s - self.interval_s / 2, limit_s / 4)
        if awaited_s > asks_s:
            store.compare_set("ask", "", self._own_question)
            if self._question is None:
                self._question = Question(entry, self._read(store), self.seen.seconds)
            self._question.awaited_s = awaited_s
            if self.seen.seconds - self._question.at_s >= self.apart_s:
                self._conclude(store, self._question, limit_s)
        next_s = next((s for s in (asks_s, limit_s, limit_s + GRACE_S) if s > awaited_s), awaited_s)
        return max(TICK_S, min(self.interval_s, next_s - awaited_s))

    def _conclude(self, store: dist.Store, question: Question, limit_s: float) -> None:
        """Find out who is to be named, and write it down once that is late, if nobody did. Nobody is while a rank is excused,
        nor for what a rank stood still that runs again: both for as long as a collective may take."""
        awaited_s = question.awaited_s
        late = awaited_s > limit_s + GRACE_S
        if not late and (awaited_s <= limit_s or question.named):
            return
        second = self._read(store)
        excused = any(beat is not None and 0 < beat.excused_s < self.first_limit_s for beat in second)
        stood_s = 0.0
        if awaited_s < self.first_limit_s:
            ages_s = {rank: self.seen.seconds - known_s for rank, (_, known_s) in self._known.items()}
            stood_s = standstill_s(self.flight.rank, second, awaited_s, ages_s)
        if excused or awaited_s - stood_s <= limit_s + GRACE_S * late:
            question.first, question.at_s = second, self.seen.seconds
            return
        question.named = self._named(question.first, second)
        if late and self.flight.waiting is question.entry:
            store.compare_set("diagnosis", "", f"this run hangs: {question.named}")

    def _named(self, first: list[Beat | None], second: list[Beat | None]) -> str:
        """The conclusion from two readings, with machines."""
        found, machines = diagnose(first, second), self.flight.machines
        return found.text + "".join(f"; rank {rank} is on {machines[rank]}" for rank in found.culprits[:8] if machines)

    def _is_over(self, store: dist.Store, question: Question) -> None:
        """End the question: what was waited for is there, and nobody needs to say more than usual. Where it took too
        long that is said, once."""
        if not store.check(["ask"]) or store.get("ask").decode() != self._own_question:
            return
        store.delete_key("ask")
        if question.named:
            say(
                f"rank {self.flight.rank} waited for {question.awaited_s:.0f} s, longer than --hang {self.limit_s:g}: "
                f"{question.named}. That is over, and the run goes on"
            )

    @property
    def _own_question(self) -> str:
        return f"{HANGS} {self.flight.rank}"

    def _name_strays(self, store: dist.Store) -> None:
        """Ranks have not sent the same messages: write down who sent others than the rest, if nobody did."""
        store.set("ask", STRAYS)
        self.flight.halted = True
        first = self._read(store)
        end = time.monotonic() + self.apart_s
        while time.monotonic() < end:
            time.sleep(self.apart_s / 3)
            self._say(store, asked=True)  # others may ask at the same time, and take who is still for dead
        named = self._named(first, self._read(store))
        store.compare_set("diagnosis", "", f"ranks have gone different ways: {named}")

    def _other(self, store: dist.Store, turn: int) -> Beat | None:
        """The last beat of one of the ranks that this one sends to: of another one every time."""
        partners = self.flight.partners
        key = f"beat/{partners[turn % len(partners)]}" if partners else ""
        return self._parsed(store.get(key)) if key and store.check([key]) else None

    def _say_who_works(self, store: dist.Store, own: Beat) -> None:
        """Say once that what all ranks wait for takes long, and on which of them."""
        self._said = own.excuse
        working = [f"rank {beat.rank} ({beat.working})" for beat in self._read(store) if beat and beat.working]
        if working:
            said = f"{own.excuse} takes {own.excused_s:.0f} s so far: all wait for {', '.join(working[:8])}"
            print(said, file=sys.stderr, flush=True)

    def _say(self, store: dist.Store, asked: bool) -> Beat:
        beat = self.flight.beat(asked)
        store.set(f"beat/{self.flight.rank}", json.dumps(asdict(beat)))
        self._heard_s = self.seen.seconds
        return beat

    def _read(self, store: dist.Store) -> list[Beat | None]:
        keys = [f"beat/{rank}" for rank in range(self.flight.world_size)]
        if store.check(keys):
            return [self._parsed(text) for text in store.multi_get(keys)]
        return [self._parsed(store.get(key)) if store.check([key]) else None for key in keys]

    def _parsed(self, text: bytes) -> Beat:
        """A beat, of which it is kept when it was first seen."""
        beat = Beat.of(json.loads(text))
        if self._known.get(beat.rank, (0, 0.0))[0] != beat.number:
            self._known[beat.rank] = beat.number, self.seen.seconds
        return beat
