"""Rows of a batch move to the ranks that are faster, between two steps.

Ranks along the axis that the batch takes hold rows by the shares of that axis (`comm/mesh.py`). What is emitted asks for lengths
and places of blocks, so the same lines compute under any shares, and where nothing rests by shares along the axis, rows are all
that moves. So a rank measures for how long it is *busy* in a step, the seconds in which it waits for no message. Every so many
steps all ranks tell each other, and all come to the same shares (`apportion.py`):

    seconds of a unit  =  busy seconds of a step / units      of an axis's place, the slowest of its ranks
    moved where        max units · seconds  >  BETTER · the same under the new shares,  IN_A_ROW times

Ranks are then busy for equally long, also where a part of their step does not depend on rows, as the next shares follow from what
these take. Losses are those of any other shares: sums are over the whole batch, random numbers belong to places in it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ..comm.backends import backend_of
from ..comm.comm import Comm
from ..comm.mesh import Shares, mesh_index
from ..data.fields import Seconds
from ..data.schema import integer, number
from ..program.tables import Pipeline
from .apportion import apportioned
from .shape_variants import Form

EVERY = 10
"""Steps from one telling to the next."""
BETTER = 1.05
IN_A_ROW = 2
Count = Annotated[int, integer(0)]


def show(units: Sequence[int]) -> str:
    """`10:10:4`."""
    shown = ":".join(map(str, units[:16]))
    return shown if len(units) <= 16 else f"{shown}:…"


class RebalanceWarning(UserWarning):
    """Rows stay where they are."""


@dataclass(frozen=True)
class Move:
    """Rows that moved after a step. before, after: units by place along the axis; ranks: those of the slowest place; busy_s,
    least_s: seconds of a step for which these, and those of the fastest, were busy before; expected_s: of the slowest after."""

    step: Count
    axis: str
    before: tuple[Count, ...]
    after: tuple[Count, ...]
    ranks: tuple[Count, ...]
    busy_s: Seconds
    least_s: Seconds
    expected_s: Seconds

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.ranks[:4])) + (", …" if len(self.ranks) > 4 else "")
        who = f"ranks {shown} are" if len(self.ranks) > 1 else f"rank {shown} is"
        return (
            f"step {self.step}: rows move along {self.axis}, {show(self.before)} becomes {show(self.after)}: {who} busy for "
            f"{self.busy_s * 1e3:.1f} ms a step, the fastest for {self.least_s * 1e3:.1f} ms; expected are "
            f"{self.expected_s * 1e3:.1f} ms"
        )


class Rebalancer:
    """The shares of one axis, on one rank. axis: that moves; alone_s: seconds that each rank would take for all units of a step,
    as they told last; moves: so far. All ranks call the methods alike."""

    def __init__(self, comm: Comm, forms: Sequence[Form], axis: str, most: int) -> None:
        """most: units that a rank has room for."""
        self.axis, self.alone_s, self.moves = axis, tuple[float, ...](), list[Move]()
        self._comm, self._forms, self._most = comm, forms, most
        self._own_clock = backend_of(comm.device).is_host
        """Seconds outside of steps do not count; elsewhere the host runs ahead, and its device computes there too."""
        self._steps, self._in_a_row = -1, 0  # the first step warms up
        self._busy_s, self._began_s = 0.0, self._clock_s()
        self._place_of = [mesh_index(comm.mesh, rank)[axis] for rank in range(comm.world_size)]

    @property
    def units(self) -> tuple[int, ...]:
        """Units by place along the axis."""
        shares = self._comm.mesh[self.axis]
        assert isinstance(shares, Shares)
        return shares.units[0]

    def begin_step(self) -> None:
        """A step begins."""
        if self._own_clock:
            self._began_s = self._clock_s()

    def end_step(self, step: int) -> str:
        """A step is over; move where it is time to, and what is to be said of that."""
        now_s = self._clock_s()
        self._busy_s, self._began_s = self._busy_s + now_s - self._began_s, now_s
        self._steps += 1
        if self._steps == 0:
            self._busy_s = 0.0
        if self._steps < EVERY:
            return ""
        told = self._comm.share(max(self._busy_s, 0.0) / self._steps, number(0, 1e9))
        self._steps, self._busy_s, self._began_s = 0, 0.0, self._clock_s()
        units = self.units
        return self.consider(
            step, [t * sum(units) / units[place] for t, place in zip(told, self._place_of, strict=True)]
        )

    def consider(self, step: int, alone_s: Sequence[float], in_a_row: int = IN_A_ROW) -> str:
        """Move where other shares would have been better so many times in a row; what is to be said of that. alone_s: by rank."""
        if min(alone_s) <= 0.0:
            return ""
        units, self.alone_s = self.units, tuple(alone_s)
        unit_s = [0.0] * len(units)
        for place, seconds in zip(self._place_of, alone_s, strict=True):
            unit_s[place] = max(unit_s[place], seconds / sum(units))
        better = apportioned(sum(units), unit_s, self._most)
        expected_s = max(n * seconds for n, seconds in zip(better, unit_s, strict=True))
        busy_s = [n * seconds for n, seconds in zip(units, unit_s, strict=True)]
        self._in_a_row = self._in_a_row + 1 if max(busy_s) > BETTER * expected_s else 0
        if self._in_a_row < in_a_row:
            return ""
        slowest = busy_s.index(max(busy_s))
        ranks = tuple(rank for rank, place in enumerate(self._place_of) if place == slowest)
        self.moves.append(Move(step, self.axis, units, better, ranks, max(busy_s), min(busy_s), expected_s))
        self.set_units(better)
        return str(self.moves[-1])

    def set_units(self, units: Sequence[int]) -> None:
        """From the next step on places along the axis hold so many units each."""
        self._in_a_row = 0
        self._comm.mesh[self.axis] = Shares(units)
        for form in self._forms:
            for stage in form.stages.values():
                stage.cut_inputs()

    def _clock_s(self) -> float:
        """A clock that stands while this rank waits for messages."""
        return time.perf_counter() - self._comm.waited_s


def rebalancer(comm: Comm, pipeline: Pipeline, forms: Sequence[Form]) -> Rebalancer | None:
    """The rebalancer of a program; None, with a warning, where its rows cannot move."""
    axis, why = _axis(comm, pipeline, forms)
    if not why:
        shares = comm.mesh[axis]
        assert isinstance(shares, Shares)
        return Rebalancer(comm, forms, axis, pipeline.most_units or sum(shares.units[0]))
    if comm.rank == 0:
        warnings.warn(f"rows do not move between ranks: {why}", RebalanceWarning, stacklevel=2)
    return None


def _axis(comm: Comm, pipeline: Pipeline, forms: Sequence[Form]) -> tuple[str, str]:
    """The axis along which rows move, or why there is none."""
    if len(pipeline.meshes) > 1:
        return "", "the program is a pipeline, whose stages have parameters of their own"
    if any(stage.comm.mesh != comm.mesh for form in forms for stage in form.stages.values()):
        return "", "batches of several shapes are shared in several ways"
    if pipeline.compiler != "none":
        return "", f"what the compiler {pipeline.compiler!r} makes is for the rows that ranks have at first"
    by_shares = [axis for axis, size in comm.mesh.items() if isinstance(size, Shares) and len(size.units) == 1]
    for axis in by_shares:
        if not any(rests_by_shares(form, axis) for form in forms):
            return axis, ""
    if by_shares:
        return "", f"what rests is cut by shares along {', '.join(by_shares)}"
    return "", "no axis of its mesh is cut by shares; compile it with Options(rebalance=True), for more rows than ranks"


def rests_by_shares(form: Form, axis: str) -> bool:
    """Whether a part of a parameter, of its optimizer's state or of a buffer is cut by the shares of an axis."""
    return any(
        axis in axes and any(isinstance(one := stage.comm.mesh[a], Shares) and one.of(size) for a in axes)
        for stage in form.stages.values()
        for info, _ in stage.stored()
        for spec in (info.spec, info.opt_spec)
        for size, axes in zip(info.shape, spec, strict=False)
    )
