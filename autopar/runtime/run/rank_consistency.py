"""Checks between the ranks of a long run now and then: whether they hold the same parameters, and which of them are slow.

A rank is *busy* while it waits for nobody; where one is busy for longer than the others, they wait for it in every step.
Batches are compared in every program (same_data.py).
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from ..comm.process import TorchComm
from ..data.fields import form_of, to_data
from ..data.schema import integer, number
from ..errors import RankError
from ..health.message_order import odd_ones
from ..step.same_data import checksum, odd_ranks
from ..step.session import Session
from .excluded_nodes import SlowMachines
from .loaded import LoadedProgram
from .train_loop import Listener, Loop, tell

SLOW = 1.15
"""Times the median's busy seconds."""
TELL_EVERY = 50
"""Steps, at most, from one telling to the next."""
TELL_S = 30.0
"""Seconds that these may take, where they are more than one step."""


AnySeconds = Annotated[float, number(-1e9, 1e9)]


@dataclass(frozen=True)
class Told:
    """A report of one rank: seconds of steps since it last told, and of them those that it waited in; what it runs (plan and
    seed); checksums of parameters, by where their shards are (empty: not asked for); stood: whether its process stood still
    meanwhile, stopped or suspended, so that its seconds say nothing of its machine."""

    seconds: AnySeconds
    waited_s: AnySeconds
    host: str = ""
    program: str = ""
    copies: Mapping[str, Annotated[int, integer(0, 1 << 32)]] = field(default_factory=dict)
    stood: bool = False

    @property
    def busy_s(self) -> float:
        return self.seconds - self.waited_s


class Comparing(Listener):
    """Ranks tell each other now and then what they run, and how busy they were."""

    def __init__(self, host: str, recheck: int, slow: SlowMachines) -> None:
        """recheck: steps after which copies of parameters are compared, besides at the first (0: never)."""
        self._host, self._recheck, self._slow = host, recheck, slow
        self._tellings, self._steps, self._steps_to_next = 0, 0, 0
        self._told_at, self._waited_s, self._seen_s = time.perf_counter(), 0.0, 0.0

    def before_step(self, loop: Loop, batch: Any) -> None:
        """Compare where it is time to. Raises RankError."""
        step = loop.step + 1
        recheck = self._recheck > 0 and step % self._recheck == 0
        if self._steps >= self._steps_to_next or recheck:
            self._compare(loop.program, step, recheck or not self._tellings)
        self._steps += 1

    def _compare(self, program: LoadedProgram, step: int, copies: bool) -> None:
        """See that all ranks run the same; say which of them are slow. copies: that their copies of parameters are equal, too.
        Raises RankError."""
        session, comm = program.session, program.session.comm
        flight = comm.flight if isinstance(comm, TorchComm) else None
        now, waited_s, steps = time.perf_counter(), comm.waited_s, self._steps
        own = Told(
            now - self._told_at,
            waited_s - self._waited_s,
            self._host,
            f"{program.manifest.plan_hash} {session.rt.seed}",
            copies_of(session) if copies else {},
            flight is not None and flight.seen.stood_since(self._seen_s),
        )
        everyone = comm.share(to_data(own), form_of(Told).read)
        odd, problem = odd_text(step, everyone)
        if odd:
            raise RankError(problem, odd)
        text = slow_text(everyone, steps) if self._tellings > 1 and steps else ""  # the first step warms up
        if text:
            tell(comm, f"step {step}  {text}")
        told = not any(one.stood for one in everyone)
        if comm.rank == 0 and self._tellings > 1 and told:
            self._slow.count(step, {everyone[rank].host for rank in slow_ranks(everyone)}, text)
        self._tellings, self._steps_to_next = self._tellings + 1, steps_to_next(step, steps, everyone)
        self._steps, self._told_at, self._waited_s = 0, time.perf_counter(), comm.waited_s
        self._seen_s = flight.seen.seconds if flight else 0.0


def steps_to_next(step: int, steps: int, told: Sequence[Told]) -> int:
    """Until ranks tell each other again, the same on all of them: up to the next step after a multiple of TELL_EVERY, sooner
    where steps are long. step: the one that is about to begin; steps: made since they told last (none: they never did)."""
    if not steps:
        return 1
    step_s = max(one.seconds for one in told) / steps
    return min(max(int(TELL_S / max(step_s, 1e-9)), 1), TELL_EVERY - (step - 1) % TELL_EVERY)


def copies_of(session: Session) -> dict[str, int]:
    """Checksums of this rank's parameters. Under one key are all that are cut by the same axes: ranks that have the key have
    copies of them. What rests in a memory tier is left out."""
    found: dict[str, int] = {}
    for index, stage in session.stages.items():
        for name, value in stage.rt.params.items():
            if name not in stage.rt.in_tier:
                axes = sorted({axis for dim in stage.tables.parameters[name].spec for axis in dim})
                place = ", ".join(f"{axis}={stage.comm.position[axis]}" for axis in axes)
                key = f"stage {index}" + (f" at {place}" if place else "")
                found[key] = zlib.crc32(f"{name} {checksum([value])}".encode(), found.get(key, 0))
    return found


def not_finite(session: Session) -> list[str]:
    """This rank's parameters with entries that are no numbers."""
    own = ((name, value) for stage in session.stages.values() for name, value in stage.rt.params.items())
    return [name for name, value in own if value.is_floating_point() and not bool(value.isfinite().all())]


def odd_copies(told: Sequence[Told]) -> list[int]:
    """Ranks with other copies than most of those who have them (of two, both, unless other parameters say more)."""
    keys = sorted({key for one in told for key in one.copies})
    odd = [odd_ones({rank: one.copies[key] for rank, one in enumerate(told) if key in one.copies}) for key in keys]
    sets = [set(ranks) for ranks in odd if ranks]
    return sorted(set.intersection(*sets) or set.union(*sets)) if sets else []


def odd_text(step: int, told: Sequence[Told]) -> tuple[list[int], str]:
    """Ranks that are not as the others, and what is to be said of them; nobody where all are alike."""
    for odd, text in (
        (
            odd_ranks([one.program for one in told]),
            "run another plan, or with another seed, than the others: copy the directory of the program to every machine whole",
        ),
        (
            odd_copies(told),
            "hold other values than the ranks that have copies of the same parameters: they were loaded from other files, or one "
            "of these ranks computed or stored something wrong. Go back to a saved step, without these machines",
        ),
    ):
        if odd:
            ranks = ", ".join(f"{rank} ({told[rank].host})" for rank in odd[:8])
            return odd, f"step {step}: rank{'s' if len(odd) > 1 else ''} {ranks} {text}"
    return [], ""


def slow_ranks(told: Sequence[Told]) -> list[int]:
    """Ranks that are busy for much longer than the others, the slowest first; none where that cannot be told."""
    if any(one.stood for one in told):
        return []
    usual_s = statistics.median(one.busy_s for one in told)
    slow = [rank for rank, one in enumerate(told) if one.busy_s > SLOW * usual_s]
    return sorted(slow, key=lambda rank: -told[rank].busy_s)


def slow_text(told: Sequence[Told], steps: int) -> str:
    """A message about slow ranks; empty where there are none."""
    slow = slow_ranks(told)
    if not slow:
        return ""
    usual_s = statistics.median(one.busy_s for one in told) / steps
    shown = ", ".join(
        f"rank {rank} ({told[rank].host}): busy for {told[rank].busy_s / steps * 1e3:.1f} ms a step"
        for rank in slow[:4]
    )
    return f"slow: {shown}; the median is {usual_s * 1e3:.1f} ms, and everybody waits for the slowest"
