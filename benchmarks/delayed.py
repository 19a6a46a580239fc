"""Ranks as threads on a link of given bandwidth and latency, each with a clock of its own.

A rank's clock counts the processor seconds of its thread, which nobody else on the machine lengthens much, and what it waits
for messages: tensors move as the thread backend moves them, which takes no time on the clock, and a `wait` puts the clock
forward to when the message would have arrived. So what a rank computes between call and wait hides a message, as on a network
that needs no core. A rank has one link out, on which its messages queue. A shift from rank to rank takes a + S / B; the others
are rings of such hops, as in textbooks, and begin when all members have called and their links are free. Two ranks, B = 100
bytes/s, a = 0, both call at second 0:

    shift of 100 bytes           arrives at second 1
    all_gather of 200 bytes      begins behind it, one hop of 100 bytes: arrives at second 2
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from autopar.program import ParallelProgram
from autopar.runtime.comm.calls import Call
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.threads import ThreadComm, run_threads

Meeting = tuple[object, ...]


@dataclass(frozen=True)
class Link:
    """Bytes/s that a rank sends, and seconds of a hop."""

    bandwidth_Bps: float
    latency_s: float

    def hop_s(self, nbytes: float) -> float:
        """Seconds until a message has reached the next rank."""
        return self.latency_s + nbytes / self.bandwidth_Bps

    def seconds(self, call: Call) -> float:
        """Seconds of a collective on free links, from when all members have called; of an exchange what this member
        sends. Raises NotImplementedError."""
        n, nbytes = call.group.size, _nbytes(call.inp)
        if call.kind == "all_reduce":
            return 2 * (n - 1) * self.hop_s(nbytes / n)
        if call.kind == "all_gather":
            return (n - 1) * self.hop_s(nbytes)
        if call.kind in ("reduce_scatter", "all_to_all"):
            return (n - 1) * self.hop_s(nbytes / n)
        if call.kind == "shift":
            return self.hop_s(nbytes)
        if call.kind == "exchange":
            row_bytes = nbytes / max(len(call.inp), 1)
            return sum(self.hop_s(row_bytes * rows) for m, rows in enumerate(call.sent) if m != call.group.index)
        raise NotImplementedError(f"no delay is known for {call.describe()}")


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


@dataclass
class Traffic:
    """State that the ranks share: when the link of each is free, and the meetings that some members have still to come to."""

    link: Link
    free_s: dict[int, float] = field(default_factory=dict)
    called_s: dict[Meeting, dict[int, float]] = field(default_factory=dict)
    takes_s: dict[Meeting, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def called(self, meeting: Meeting, call: Call, rank: int, now_s: float) -> dict[int, float]:
        """A rank calls. The seconds that are returned are, once all members have called, those at which each has its result."""
        with self.lock:
            seconds = self.called_s.setdefault(meeting, {})
            seconds[rank] = now_s
            self.takes_s[meeting] = max(self.takes_s.get(meeting, 0.0), self.link.seconds(call))
            if len(seconds) == call.group.size:
                seconds.update(self._arrivals(call, seconds, self.takes_s.pop(meeting)))
                del self.called_s[meeting]
            return seconds

    def _arrivals(self, call: Call, called_s: Mapping[int, float], took_s: float) -> dict[int, float]:
        """took_s: of the member whose part takes longest."""
        ranks = call.group.ranks
        begin_s = {rank: max(called, self.free_s.get(rank, 0.0)) for rank, called in called_s.items()}
        if call.kind != "shift":
            end_s = max(begin_s.values()) + took_s
            self.free_s |= dict.fromkeys(ranks, end_s)
            return dict.fromkeys(ranks, end_s)
        arrivals = {}
        for place, rank in enumerate(ranks):
            source = ranks[(place - call.root) % len(ranks)]
            arrivals[rank] = max(begin_s[source], called_s[rank]) + took_s
            self.free_s[source] = arrivals[rank] - self.link.latency_s
        return arrivals


class DelayedComm(ThreadComm):
    """A rank's Comm whose collectives take their time on its clock. name: tells the Comms of one rank apart. cpu_s: the
    processor seconds of the calling thread. at_once: every message is waited for where it starts."""

    def __init__(
        self,
        comm: Comm,
        traffic: Traffic,
        name: str = "",
        cpu_s: Callable[[], float] = time.thread_time,
        at_once: bool = False,
    ) -> None:
        assert isinstance(comm, ThreadComm)
        super().__init__(comm.rank, comm.mesh, comm._world, comm.first_rank, name)
        self.traffic, self._cpu_s, self._at_once = traffic, cpu_s, at_once
        self._not_computed_s = 0.0

    def clock_s(self) -> float:
        """Seconds computed and waited. Behind a barrier they are the same on all ranks, whose links are free then."""
        return self._cpu_s() + self._not_computed_s

    def _part(self, mesh: Mapping[str, int], first_rank: int, inside: bool) -> Comm | None:
        raise NotImplementedError("delays are for programs without a pipeline")

    def _start(self, call: Call) -> Callable[[], None]:
        ranks = tuple(sorted(call.group.ranks))
        meeting = (self._name, ranks, self._next.get(ranks, 0))
        called_s = self.clock_s()
        arrivals_s = self.traffic.called(meeting, call, self.rank, called_s)
        met = super()._start(call)
        self._not_computed_s -= self.clock_s() - called_s

        def wait() -> None:
            waits_s = self.clock_s()
            met()
            self._not_computed_s += max(arrivals_s[self.rank], waits_s) - self.clock_s()

        if not self._at_once:
            return wait
        wait()
        return lambda: None


@dataclass(frozen=True)
class Turns:
    """Seconds of every step of every program on rank 0, and their losses, the first step left out."""

    seconds: Mapping[str, list[float]]
    losses: Mapping[str, list[float]]


def steps_on_link(
    link: Link,
    mesh: Mapping[str, int],
    programs: Mapping[str, ParallelProgram],
    batch: Sequence[Tensor],
    steps: int,
    at_once: Collection[str] = (),
) -> Turns:
    """Programs of these ranks that take turns step by step on a link, every rank a thread on a clock of its own. at_once: those
    whose messages are waited for where they start."""
    traffic = {name: Traffic(link) for name in programs}

    def rank(comm: Comm) -> Turns:
        sessions = {}
        for name, program in programs.items():
            slow = DelayedComm(comm, traffic[name], name, at_once=name in at_once)
            session = program.in_process.session(slow, program.request.update, program.options.seed)
            session.load_weights(program.weights())
            sessions[name] = session, slow
        turns = Turns({name: [] for name in programs}, {name: [] for name in programs})
        for turn in range(steps + 1):
            for name in sessions if turn % 2 else reversed(sessions):
                session, slow = sessions[name]
                slow.barrier()
                start_s = slow.clock_s()
                loss = float(session.train_step(batch))
                slow.barrier()
                if turn:
                    turns.seconds[name].append(slow.clock_s() - start_s)
                    turns.losses[name].append(loss)
        return turns

    return run_threads(math.prod(mesh.values()), mesh, rank)[0]
