"""Rows of a batch move to the ranks that are faster, between two steps.

Ranks along the axis that the batch takes hold rows by the shares of that axis (`comm/mesh.py`). What is emitted asks for lengths
and places of blocks, so the same lines compute under any shares, and where nothing rests by shares along the axis, rows are all
that moves. So a rank measures for how long it is *busy* in a step, the seconds in which it waits for no message. Every so many
steps all ranks tell each other, and all come to the same shares (`apportion.py`), the ranks of each group of stages among
themselves:

    seconds of a unit  =  busy seconds of a step / units      of an axis's place, the slowest of its ranks
    moved where        max units · seconds  >  BETTER · the same under the new shares,  IN_A_ROW times

Ranks are then busy for equally long, also where a part of their step does not depend on rows, as the next shares follow from what
these take. Losses are those of any other shares: sums are over the whole batch, random numbers belong to places in it. What goes
from stage to stage goes from whoever has a row on one side to whoever has it on the other.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ..comm.backends import backend_of
from ..comm.comm import Comm
from ..comm.mesh import Shares, mesh_index, mesh_size
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


def show_stages(stages: Sequence[int]) -> str:
    """` of stage 1`, ` of stages 0, 2`; nothing of none."""
    return f" of stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}" if stages else ""


class RebalanceWarning(UserWarning):
    """Rows stay where they are."""


@dataclass(frozen=True)
class Move:
    """Rows that moved after a step. before, after: units by place along the axis; ranks: those of the slowest place; busy_s,
    least_s: seconds of a step for which these, and those of the fastest, were busy before; expected_s: of the slowest after;
    stages: whose rows moved, where there are several."""

    step: Count
    axis: str
    before: tuple[Count, ...]
    after: tuple[Count, ...]
    ranks: tuple[Count, ...]
    busy_s: Seconds
    least_s: Seconds
    expected_s: Seconds
    stages: tuple[Count, ...] = ()

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.ranks[:4])) + (", …" if len(self.ranks) > 4 else "")
        who = f"ranks {shown} are" if len(self.ranks) > 1 else f"rank {shown} is"
        return (
            f"step {self.step}: rows{show_stages(self.stages)} move along {self.axis}, {show(self.before)} becomes "
            f"{show(self.after)}: {who} busy for {self.busy_s * 1e3:.1f} ms a step, the fastest for {self.least_s * 1e3:.1f} ms; "
            f"expected are {self.expected_s * 1e3:.1f} ms"
        )


class Rows:
    """The rows of one group of ranks. stages: those of the group, where the program has others; axis: along which rows move, ""
    where they stay; ranks: of the group. All ranks of the program call the methods alike."""

    def __init__(self, forms: Sequence[Form], group: int, axis: str) -> None:
        pipeline = forms[0].pipeline
        self._group, self._forms = pipeline.groups[group], forms
        self._mesh, first = pipeline.meshes[self._group[0]]
        self.axis, self.stages = axis, self._group if len(pipeline.groups) > 1 else ()
        self.ranks = range(first, first + mesh_size(self._mesh))
        self._place_of = [mesh_index(self._mesh, n)[axis] if axis else 0 for n in range(len(self.ranks))]
        self._most = pipeline.most_units[group] if pipeline.most_units else sum(self.units)
        """Units that a rank has room for."""
        predicted_s = (pipeline.busy_s[group] if pipeline.busy_s else 0.0) or 1.0
        self.predicted_s = predicted_s * sum(self.units) / max(self.units)
        """Seconds that a rank would take for all units of a step, as they were predicted."""
        self._in_a_row = 0

    @property
    def units(self) -> tuple[int, ...]:
        """Units by place along the axis; one, which all ranks have, where rows stay."""
        shares = self._mesh[self.axis] if self.axis else 0
        return shares.units[0] if isinstance(shares, Shares) else (1,)

    def units_of(self, rank: int) -> int:
        """Units of a rank."""
        return self.units[self._place_of[rank - self.ranks.start]]

    def consider(self, step: int, alone_s: Sequence[float], in_a_row: int = IN_A_ROW) -> Move | None:
        """Move where other shares would have been better so many times in a row. alone_s: seconds that each rank of the group
        would take for all units of a step."""
        units = self.units
        unit_s = [0.0] * len(units)
        for place, seconds in zip(self._place_of, alone_s, strict=True):
            unit_s[place] = max(unit_s[place], seconds / sum(units))
        better = apportioned(sum(units), unit_s, self._most) if self.axis else units
        expected_s = max(n * seconds for n, seconds in zip(better, unit_s, strict=True))
        busy_s = [n * seconds for n, seconds in zip(units, unit_s, strict=True)]
        self._in_a_row = self._in_a_row + 1 if max(busy_s) > BETTER * expected_s else 0
        if self._in_a_row < in_a_row:
            return None
        slowest = busy_s.index(max(busy_s))
        ranks = tuple(rank for rank, place in zip(self.ranks, self._place_of, strict=True) if place == slowest)
        self.set_units(better)
        return Move(step, self.axis, units, better, ranks, max(busy_s), min(busy_s), expected_s, self.stages)

    def set_units(self, units: Sequence[int]) -> None:
        """From the next step on places along the axis hold so many units each."""
        self._in_a_row = 0
        for form in self._forms:
            form.share_rows(self._group, self.axis, units)


class Rebalancer:
    """The measured speeds of all ranks, and the rows that follow them, on one rank. rows: of every group of ranks; alone_s:
    seconds that each rank would take for all units of a step, as they told last; moves: so far. All ranks call the methods
    alike."""

    def __init__(self, comm: Comm, rows: Sequence[Rows]) -> None:
        self.rows, self.alone_s, self.moves = tuple(rows), tuple[float, ...](), list[Move]()
        self._comm = comm
        self._own_clock = backend_of(comm.device).is_host
        """Seconds outside of steps do not count; elsewhere the host runs ahead, and its device computes there too."""
        self._steps = -1  # the first step warms up
        self._busy_s, self._began_s = 0.0, self._clock_s()

    @property
    def slowness(self) -> tuple[float, ...]:
        """How many times as long as predicted each rank takes, as they told last."""
        predicted_s = [rows.predicted_s for rows in self.rows for _ in rows.ranks]
        return tuple(s / predicted for s, predicted in zip(self.alone_s, predicted_s, strict=True) if self.alone_s)

    @property
    def work_s(self) -> tuple[float, ...]:
        """Predicted seconds of a step for which each rank is busy."""
        return tuple(
            rows.predicted_s * rows.units_of(rank) / sum(rows.units) for rows in self.rows for rank in rows.ranks
        )

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
        return self.consider(
            step, [told[rank] * sum(rows.units) / rows.units_of(rank) for rows in self.rows for rank in rows.ranks]
        )

    def consider(self, step: int, alone_s: Sequence[float], in_a_row: int = IN_A_ROW) -> str:
        """Move where other shares would have been better so many times in a row; what is to be said of that. alone_s: by rank."""
        if min(alone_s) <= 0.0:
            return ""
        self.alone_s = tuple(alone_s)
        moves = [rows.consider(step, alone_s[rows.ranks.start : rows.ranks.stop], in_a_row) for rows in self.rows]
        found = [move for move in moves if move is not None]
        self.moves += found
        return "\n".join(map(str, found))

    def _clock_s(self) -> float:
        """A clock that stands while this rank waits for messages."""
        return time.perf_counter() - self._comm.waited_s


def rebalancer(comm: Comm, forms: Sequence[Form]) -> Rebalancer | None:
    """The rebalancer of a program; None where neither rows can move nor stages. A warning says whose rows cannot, and why."""
    pipeline = forms[0].pipeline
    axes = [_axis(forms, group) for group in range(len(pipeline.groups))]
    moves = any(axis for axis, _ in axes)
    whys = dict.fromkeys(why for _, why in axes if why)
    if moves or len(whys) > 1:
        whys.pop(ALONE, None)
    for why in whys if comm.rank == 0 else ():
        one_by_one = len(pipeline.groups) > 1 and why != ALONE
        whose = show_stages([s for group, (_, w) in zip(pipeline.groups, axes, strict=True) for s in group if w == why])
        warnings.warn(
            f"rows{whose if one_by_one else ''} do not move between ranks: {why}", RebalanceWarning, stacklevel=3
        )
    rows = [Rows(forms, group, axis) for group, (axis, _) in enumerate(axes)]
    rows.sort(key=lambda one: one.ranks.start)
    return Rebalancer(comm, rows) if moves or (pipeline.busy_s and comm.world_size > 1) else None


ALONE = "no stage has several"
"""The reason of groups of one rank, which alone is no reason to warn of."""


def _axis(forms: Sequence[Form], group: int) -> tuple[str, str]:
    """The axis along which rows of a group of ranks move, or why there is none."""
    pipeline = forms[0].pipeline
    stages = pipeline.groups[group]
    mesh = pipeline.meshes[stages[0]][0]
    if len(pipeline.groups) > 1 and mesh_size(mesh) == 1:
        return "", ALONE
    if any(pipeline.meshes[stage][0] != mesh for stage in stages):
        return "", "stages of one group lie on meshes of several shapes"
    if any(form.pipeline.meshes != pipeline.meshes for form in forms):
        return "", "batches of several shapes are shared in several ways"
    if pipeline.compiler != "none":
        return "", f"what the compiler {pipeline.compiler!r} makes is for the rows that ranks have at first"
    by_shares = [axis for axis, size in mesh.items() if isinstance(size, Shares) and len(size.units) == 1]
    for axis in by_shares:
        if not any(rests_by_shares(form.pipeline, stage, axis) for form in forms for stage in stages):
            return axis, ""
    if by_shares:
        return "", f"what rests is cut by shares along {', '.join(by_shares)}"
    return "", "no axis of its mesh is cut by shares; compile it with Options(rebalance=True), for more rows than ranks"


def rests_by_shares(pipeline: Pipeline, stage: int, axis: str) -> bool:
    """Whether a part of a parameter, of its optimizer's state or of a buffer of a stage is cut by the shares of an axis."""
    mesh, tables = pipeline.meshes[stage][0], pipeline.tables(stage)
    return any(
        axis in axes and any(isinstance(one := mesh[a], Shares) and one.of(size) for a in axes)
        for info in (*tables.parameters.values(), *tables.buffers.values())
        for spec in (info.spec, info.opt_spec)
        for size, axes in zip(info.shape, spec, strict=False)
    )
