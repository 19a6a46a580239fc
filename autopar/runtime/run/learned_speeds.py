"""The speeds of machines that a run measured, kept in its directory: `learned.json`.

Ranks whose rows move (`step/rebalance.py`) tell each other how fast they are. Rank 0 writes that down by machine, with the shares
that followed and every move. Speeds are told by what was predicted of a rank's stages, so that they hold for any others. The next
start of the run takes its shares from there before its first step, on whatever machines it finds: of those that it does not know,
ranks are taken to be as fast as the median.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ..data.datafile import read_json
from ..data.fields import Length, Seconds, form_of, from_data, to_data
from ..data.schema import MOST_RANKS, SchemaError, optional
from ..data.whole_files import replace_file
from ..program.manifest import slower_folder
from ..step.rebalance import Count, Move, Rebalancer, show, show_stages
from .train_loop import Listener, Loop, tell

LEARNED = "learned.json"
KEPT_MOVES = 100
LITTLE = 0.25
"""The share of the most work that a rank has, with less than which it shows what a step costs beside it, and not its speed."""
BySpeed = Mapping[str, Annotated[tuple[Seconds, ...], Length(most=MOST_RANKS)]]


@dataclass(frozen=True)
class SharedRows:
    """axis, shares: along which rows move, and the units by place; stages: whose rows they are, where there are several."""

    axis: str
    shares: tuple[Count, ...]
    stages: tuple[Count, ...] = ()

    def __str__(self) -> str:
        return f"rows{show_stages(self.stages)} are shared {show(self.shares)} along {self.axis}"


@dataclass(frozen=True)
class PlanChange:
    """A save after which a run goes on under another plan. before, after: places of the plans, 0 for the program's own; before_s,
    after_s: expected seconds of a step under each at the measured speeds, those of the fastest rank as described; step_s:
    measured of one before; saved_s: that the rest of the run takes less; cost_s: that starting again takes."""

    step: Count
    before: Count
    after: Count
    before_s: Seconds
    after_s: Seconds
    step_s: Seconds
    saved_s: Seconds
    cost_s: Seconds

    def __str__(self) -> str:
        where = slower_folder(self.after) if self.after else "the program's own folder"
        return (
            f"step {self.step}: the run goes on under the plan in {where}, as a step is expected to take "
            f"{self.after_s / self.before_s:.2f} of what it takes now ({self.step_s * 1e3:.1f} ms); that saves "
            f"{self.saved_s:.0f} s, and a start costs {self.cost_s:.0f} s"
        )


@dataclass(frozen=True)
class Learned:
    """rows: by group of ranks; machines: by name, how many times as long as predicted each of its ranks takes; moves: the
    last ones. plan: place of the plan under which the run goes on; changes: the last ones of it."""

    rows: tuple[SharedRows, ...]
    machines: BySpeed
    moves: tuple[Move, ...] = ()
    plan: Count = 0
    changes: tuple[PlanChange, ...] = ()

    def text(self) -> str:
        """The file in the words of `autopar-doctor`."""
        fastest = min((s for own in self.machines.values() for s in own if s), default=1.0)
        lines = list(map(str, self.rows))
        for name, own in self.machines.items():
            speeds = ", ".join(f"{fastest / s:.2f}" if s else "-" for s in own[:16])
            lines.append(f"  {name}: {speeds}{', …' if len(own) > 16 else ''} of the fastest rank's speed")
        return "\n".join((*lines, *(f"  {one}" for one in (*self.moves[-8:], *self.changes[-8:]))))


def read_learned(root: Path) -> Learned | None:
    """The file of a run's directory, None where there is none. Raises SchemaError, OSError."""
    try:
        return from_data(Learned, read_json(root / LEARNED))
    except FileNotFoundError:
        return None


def slowness_of(learned: BySpeed, machines: Sequence[str]) -> list[float]:
    """How many times as long as predicted every rank takes, by what is known of its machine. machines: by rank."""
    usual = statistics.median(s for own in learned.values() for s in own)
    slowness, met = [], dict.fromkeys(machines, 0)
    for name in machines:
        own = learned.get(name) or (usual,)
        slowness.append(own[met[name]] if met[name] < len(own) else max(own))
        met[name] += 1
    return slowness


class LearnedSpeeds(Listener):
    """Writes the file when ranks have told each other something; takes the shares of the first step from it."""

    def __init__(self, root: Path, own: Rebalancer, machines: Sequence[str], loop: Loop) -> None:
        """machines: of all ranks, by rank."""
        self._root, self._own = root, own
        self._rank_of = loop.program.manifest.placement or tuple(range(len(machines)))
        self._machines = [machines[rank] for rank in self._rank_of]
        comm = self._comm = loop.program.session.comm
        (data, *_) = comm.share(self._read() if comm.rank == 0 else None, optional(form_of(Learned).read))
        self._before = data.moves if data is not None else ()
        self.changes = list(data.changes) if data is not None else []
        self._known = dict(data.machines) if data is not None else {}
        self._slowness = slowness_of(self._known, self._machines) if any(self._known.values()) else []
        if self._slowness:
            by_rank = dict(zip(self._rank_of, self._slowness, strict=True))
            alone_s = [by_rank[rank] * rows.predicted_s for rows in own.rows for rank in rows.ranks]
            if said := own.consider(loop.step, alone_s, 1) or "\n".join(map(str, _shared(own))):
                tell(comm, f"{said} ({LEARNED})")
        self._written = own.alone_s

    def on_loss(self, loop: Loop, done: Any) -> bool:
        """Write what ranks told each other since."""
        comm, own = loop.program.session.comm, self._own
        if own.alone_s is not self._written:
            self._written = own.alone_s
            if comm.rank == 0:
                with comm.excused(f"writing {LEARNED}"):
                    self._write()
        return False

    def slowness(self) -> list[float]:
        """How many times as long as predicted the rank in every place takes: as ranks told last, or as it was known before of
        those that have little to do now."""
        told, work_s = self._own.slowness, self._own.work_s
        found = [told[rank] for rank in self._rank_of]
        if self._slowness:
            little = [work_s[rank] < LITTLE * max(work_s) for rank in self._rank_of]
            found = [was if few else now for now, was, few in zip(found, self._slowness, little, strict=True)]
        return found

    def change_plan(self, change: PlanChange) -> None:
        """Write down that the next start goes on under another plan. All ranks call it alike."""
        self.changes.append(change)
        if self._comm.rank == 0:
            with self._comm.excused(f"writing {LEARNED}"):
                self._write()

    def _read(self) -> Any:
        try:
            found = read_learned(self._root)
        except (SchemaError, OSError) as error:
            print(f"{self._root / LEARNED} is left out: {error}", file=sys.stderr, flush=True)
            return None
        return None if found is None else to_data(found)

    def _write(self) -> None:
        own, now = self._own, dict[str, list[float]]()
        for name, slowness in zip(self._machines, self.slowness(), strict=True):
            now.setdefault(name, []).append(slowness)
        machines = {**self._known, **{name: tuple(slowness) for name, slowness in now.items()}}
        moves, plan = (*self._before, *own.moves)[-KEPT_MOVES:], self.changes[-1].after if self.changes else 0
        data = Learned(_shared(own), machines, moves, plan, tuple(self.changes[-KEPT_MOVES:]))
        try:
            replace_file(self._root / LEARNED, (json.dumps(to_data(data), indent=1) + "\n").encode())
        except OSError as error:
            print(f"{self._root / LEARNED}: {error.strerror or error}", file=sys.stderr, flush=True)


def _shared(own: Rebalancer) -> tuple[SharedRows, ...]:
    """How rows are shared now."""
    return tuple(SharedRows(rows.axis, rows.units, rows.stages) for rows in own.rows if rows.axis)
