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
from ..step.rebalance import Count, Move, Rebalancer, show, show_stages
from .train_loop import Listener, Loop, tell

LEARNED = "learned.json"
KEPT_MOVES = 100
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
class Learned:
    """rows: by group of ranks; machines: by name, how many times as long as predicted each of its ranks takes (0: its rows do not
    move); moves: the last ones."""

    rows: tuple[SharedRows, ...]
    machines: BySpeed
    moves: tuple[Move, ...] = ()

    def text(self) -> str:
        """The file in the words of `autopar-doctor`."""
        fastest = min((s for own in self.machines.values() for s in own if s), default=1.0)
        lines = list(map(str, self.rows))
        for name, own in self.machines.items():
            speeds = ", ".join(f"{fastest / s:.2f}" if s else "-" for s in own[:16])
            lines.append(f"  {name}: {speeds}{', …' if len(own) > 16 else ''} of the fastest rank's speed")
        return "\n".join((*lines, *(f"  {move}" for move in self.moves[-8:])))


def read_learned(root: Path) -> Learned | None:
    """The file of a run's directory, None where there is none. Raises SchemaError, OSError."""
    try:
        return from_data(Learned, read_json(root / LEARNED))
    except FileNotFoundError:
        return None


def slowness_of(learned: BySpeed, machines: Sequence[str]) -> list[float]:
    """How many times as long as predicted every rank takes, by what is known of its machine. machines: by rank."""
    known = {name: own for name, own in learned.items() if any(own)}
    usual = statistics.median(s for own in known.values() for s in own if s)
    slowness, met = [], dict.fromkeys(machines, 0)
    for name in machines:
        own = known.get(name, (usual,))
        slowness.append((own[met[name]] if met[name] < len(own) else max(own)) or usual)
        met[name] += 1
    return slowness


class LearnedSpeeds(Listener):
    """Writes the file when ranks have told each other something; takes the shares of the first step from it."""

    def __init__(self, root: Path, own: Rebalancer, machines: Sequence[str], loop: Loop) -> None:
        """machines: of all ranks, by rank."""
        self._root, self._own, self._machines = root, own, machines
        comm = loop.program.session.comm
        (data, *_) = comm.share(self._read() if comm.rank == 0 else None, optional(form_of(Learned).read))
        self._before = data.moves if data is not None else ()
        self._known = dict(data.machines) if data is not None else {}
        if any(any(known) for known in self._known.values()):
            slowness, alone_s = slowness_of(self._known, machines), [0.0] * len(machines)
            for rows in own.rows:
                for rank in rows.ranks:
                    alone_s[rank] = slowness[rank] * rows.predicted_s
            said = own.consider(loop.step, alone_s, 1) or "\n".join(map(str, _shared(own)))
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

    def _read(self) -> Any:
        try:
            found = read_learned(self._root)
        except (SchemaError, OSError) as error:
            print(f"{self._root / LEARNED} is left out: {error}", file=sys.stderr, flush=True)
            return None
        return None if found is None else to_data(found)

    def _write(self) -> None:
        own, now = self._own, dict[str, list[float]]()
        predicted_s = {rank: rows.predicted_s for rows in own.rows for rank in rows.ranks}
        for rank, (name, seconds) in enumerate(zip(self._machines, own.alone_s, strict=True)):
            now.setdefault(name, []).append(seconds / predicted_s[rank] if seconds else 0.0)
        machines = {**self._known, **{name: tuple(seconds) for name, seconds in now.items()}}
        data = Learned(_shared(own), machines, (*self._before, *own.moves)[-KEPT_MOVES:])
        try:
            replace_file(self._root / LEARNED, (json.dumps(to_data(data), indent=1) + "\n").encode())
        except OSError as error:
            print(f"{self._root / LEARNED}: {error.strerror or error}", file=sys.stderr, flush=True)


def _shared(own: Rebalancer) -> tuple[SharedRows, ...]:
    """How rows are shared now."""
    return tuple(SharedRows(rows.axis, rows.units, rows.stages) for rows in own.rows)
