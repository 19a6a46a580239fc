"""Rows beyond the room of a message, or of a rank, where the host does not know how many there are: the device counts them.

Sizes are then those of the plan (experts/padded.py), and rows that have no room are not computed. So no step may end with
them: what every mixture found is noted as a tensor, one message tells all ranks the most, and the host reads that once, before
the update. Where all ranks are at the same place it goes out behind the last forward, so that the device has backward to do
while the host waits. Every rank raises the same ExpertOverflow, and nothing is applied.

Conditions of the data, under which a program is the model's step (guards.py), travel with that message: every rank raises the
same GuardError, whichever rank's rows break one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.backends import Arriving
from ..comm.comm import Comm
from ..comm.devices import runs_ahead
from ..errors import ExpertOverflow, GuardError, RuntimeProgramError
from ..guards import Broken, Guards

Say = Callable[[list[int], str], str]
"""The message for the loads of a note, with the words that say which of the step's calls they are of."""
_OF_THREAD = threading.local()
_KINDS: tuple[type[RuntimeProgramError], ...] = (GuardError, ExpertOverflow)
"""The errors that ranks tell each other of, those that are raised first first."""


@dataclass(frozen=True)
class _Note:
    """loads: rows by where they go; excess: how many of the largest are beyond the room; site: the user's line."""

    loads: Tensor
    excess: Tensor
    site: str
    say: Say


def note(loads: Tensor, room: int, site: str, say: Say) -> None:
    """Note how many rows go where, of which at most `room` have room each; what nobody will read later is read at once, and
    raises ExpertOverflow."""
    if loads.is_meta:
        return
    notes: list[_Note] | None = getattr(_OF_THREAD, "notes", None)
    if notes is not None:
        notes.append(_Note(loads, loads.amax() - room, site, say))
    elif int(loads.amax()) > room:
        raise ExpertOverflow(say(loads.tolist(), ""))


class Overflows:
    """The notes of the mixtures of a step on one rank, and the conditions of its data. tells_all: mixtures of any rank have room
    for so many rows, or a stage has conditions; else, and on a device that the host does not run ahead of, there are none."""

    def __init__(self, comm: Comm, tells_all: bool, guards: Guards | None = None) -> None:
        self._comm, self._guards, self._asked = comm, guards, tells_all and runs_ahead(comm.device)
        self._tells_all = self._asked
        self._notes: list[_Note] = []
        self._conditions: list[Broken] = []
        self._most: Arriving | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, notes of this thread are kept, and conditions; not those of a step that is captured, which are read when it is
        played."""
        self._notes, self._conditions, self._most = [], [], None
        self._tells_all = self._asked and not (self._guards is not None and self._guards.captured)
        _OF_THREAD.notes = self._notes if self._tells_all else None
        try:
            if self._guards is None or not self._tells_all:
                yield
                return
            with self._guards.conditions() as self._conditions:
                yield
        finally:
            _OF_THREAD.notes = None

    def tell(self) -> None:
        """Tell all ranks the most rows that any rank has beyond its room, once. All call it, after the step's last forward."""
        if not self._tells_all or self._most is not None:
            return
        self._notes = list(self._notes)  # without those of forwards that backward makes again
        self._conditions = list(self._conditions)
        own = [one.excess for one in self._notes] + [broken for broken, _ in self._conditions] or [
            torch.zeros((), dtype=torch.long, device=self._comm.device)
        ]
        most = torch.stack(own).amax().reshape(1)
        most = self._comm.all_reduce(most, tuple(self._comm.mesh), "max", "rows with no room")
        self._most = Arriving([most])

    def end(self) -> None:
        """Wait for what was told. Raises, on every rank alike, GuardError where a condition is broken, ExpertOverflow where a row
        had no room."""
        notes, self._notes = self._notes, []
        conditions, self._conditions = self._conditions, []
        most, self._most = self._most, None
        if most is None or int(most.wait()[0]) <= 0:
            return
        broken = next((text for bad, text in conditions if int(bad) > 0), "")
        told = [(guard, overflow) for guard, overflow in self._comm.share([broken, self._text(notes)])]
        raise next(
            (kind(text) for kind, texts in zip(_KINDS, zip(*told, strict=True), strict=True) for text in texts if text)
        )

    def _text(self, notes: list[_Note]) -> str:
        """The message for the worst of these, "" where all rows had room."""
        excess = [int(one.excess) for one in notes]
        place = max(range(len(notes)), key=excess.__getitem__, default=-1)
        if place < 0 or excess[place] <= 0:
            return ""
        worst = notes[place]
        alike = [at for at, one in enumerate(notes) if (one.site, one.loads.shape) == (worst.site, worst.loads.shape)]
        which = f" (rank {self._comm.rank}, call {alike.index(place) + 1} of {len(alike)} of this line in the step)"
        return worst.say(worst.loads.tolist(), which)
