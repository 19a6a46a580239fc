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

from ..comm.backends import backend_of
from ..comm.comm import Comm
from ..comm.mesh import Shares, mesh_index
from ..data.schema import number
from ..program.tables import Pipeline
from .apportion import apportioned
from .shape_variants import Form

EVERY = 10
"""Steps from one telling to the next."""
BETTER = 1.05
IN_A_ROW = 2


def show(units: Sequence[int]) -> str:
    """`10:10:4`."""
    shown = ":".join(map(str, units[:16]))
    return shown if len(units) <= 16 else f"{shown}:…"


class RebalanceWarning(UserWarning):
    """Rows stay where they are."""


@dataclass(frozen=True)
class Move:
    """Rows that moved after a step. before, after: units by place along the axis; busy_s: seconds of a step that these were busy
    for before (0: no step was made); expected_s: those of the slowest afterwards."""

    step: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    busy_s: tuple[float, ...]
    expected_s: float

    def text(self, axis: str, ranks_at: Sequence[Sequence[int]]) -> str:
        """The move in words. ranks_at: ranks by place along the axis."""
        slowest, fastest = max(self.busy_s), min(self.busy_s)
        place = self.busy_s.index(slowest)
        ranks = ranks_at[place]
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:4]))}{', …' if len(ranks) > 4 else ''}"
        return (
            f"step {self.step}: rows move along {axis}, {show(self.before)} becomes {show(self.after)}: {who} "
            f"{'are' if len(ranks) > 1 else 'is'} busy for {slowest * 1e3:.1f} ms a step, the fastest for {fastest * 1e3:.1f} ms; "
            f"expected are {self.expected_s * 1e3:.1f} ms"
        )


class Rebalancer:
    """The shares of one axis, on one rank. axis: that moves; unit_s: seconds of a unit by place along it, as ranks told last;
    moves: so far. All ranks call the methods alike."""

    def __init__(self, comm: Comm, forms: Sequence[Form], axis: str, most: int) -> None:
        """most: units that a rank has room for."""
        self.axis, self.unit_s, self.moves = axis, tuple[float, ...](), list[Move]()
        self._comm, self._forms, self._most = comm, forms, most
        self._own_clock = backend_of(comm.device).is_host
        """Seconds outside of steps do not count; elsewhere the host runs ahead, and its device computes there too."""
        self._steps, self._in_a_row = -1, 0  # the first step warms up
        self._busy_s, self._began_s = 0.0, self._clock_s()
        places = [mesh_index(comm.mesh, rank)[axis] for rank in range(comm.world_size)]
        self.ranks_at = [[rank for rank, own in enumerate(places) if own == place] for place in range(len(self.units))]

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
        return self.consider(step, [max(told[rank] for rank in ranks) for ranks in self.ranks_at])

    def consider(self, step: int, busy_s: Sequence[float], least: int = IN_A_ROW) -> str:
        """Move where other shares would have been better so many times in a row. busy_s: of a step, by place."""
        units = self.units
        if min(busy_s) <= 0.0:
            return ""
        self.unit_s = tuple(seconds / n for seconds, n in zip(busy_s, units, strict=True))
        better = apportioned(sum(units), self.unit_s, self._most)
        expected_s = max(n * seconds for n, seconds in zip(better, self.unit_s, strict=True))
        self._in_a_row = self._in_a_row + 1 if max(busy_s) > BETTER * expected_s else 0
        if self._in_a_row < least:
            return ""
        move = Move(step, units, better, tuple(busy_s), expected_s)
        self.moves.append(move)
        self.set_units(better)
        return move.text(self.axis, self.ranks_at)

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
        return Rebalancer(comm, forms, axis, pipeline.most_units or sum(comm.mesh[axis].units[0]))  # type: ignore[attr-defined]
    if comm.rank == 0:
        warnings.warn(f"rows do not move between ranks: {why}", RebalanceWarning, stacklevel=2)
    return None


def _axis(comm: Comm, pipeline: Pipeline, forms: Sequence[Form]) -> tuple[str, str]:
    """The axis along which rows move, or why there is none."""
    if len(pipeline.meshes) > 1:
        return "", "the program is a pipeline, whose stages have parameters of their own"
    if pipeline.compiler != "none":
        return "", f"what the compiler {pipeline.compiler!r} makes is for the rows that ranks have at first"
    by_shares = [axis for axis, size in comm.mesh.items() if isinstance(size, Shares) and len(size.units) == 1]
    for axis in by_shares:
        if not any(_rests_by_shares(form, axis) for form in forms):
            return axis, ""
    if by_shares:
        return "", f"what rests is cut by shares along {', '.join(by_shares)}"
    return "", "no axis of its mesh is cut by shares; compile it with Options(rebalance=True), for more rows than ranks"


def _rests_by_shares(form: Form, axis: str) -> bool:
    """Whether a part of a parameter, of its optimizer's state or of a buffer is cut by the shares of an axis."""
    return any(
        axis in axes and any(isinstance(one := stage.comm.mesh[a], Shares) and one.of(size) for a in axes)
        for stage in form.stages.values()
        for info, _ in stage.stored()
        for spec in (info.spec, info.opt_spec)
        for size, axes in zip(info.shape, spec, strict=False)
    )
