"""Does a rank compute what another one computes from the same data? What a faulty device gets wrong, without an error, shows so.

Every rank does forward and backward of its part of the batch's first microbatch, and then takes the place of its neighbour
along an axis (rank_substitution.py): it has the neighbour's part of the batch, as every rank is given the whole batch (or else is
sent the neighbour's rows), the parameters that both hold, and is sent those shards that it does not hold. Checksums of all
contributions to gradients, before they are summed over ranks, must be equal to the last bit. Where they are not, the
neighbour's other neighbour decides, if there is one. Nothing of this reaches the step: buffers are copies, and no gradient is
kept.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..comm.backends import backend_of
from ..comm.calls import Handle
from ..comm.comm import Comm
from ..comm.mesh import Shares
from ..comm.rank_substitution import ONE_STAGE, Turned
from ..data.schema import integer, listed, table, text
from ..errors import RankError, RuntimeProgramError
from ..guards import Guards
from ..step.own_rows import OwnRows
from ..step.pipeline import Executor
from ..step.rebalance import rests_by_shares
from ..step.same_data import checksum
from ..step.session import Session
from ..step.shape_variants import Form
from ..step.stage import Inputs, Stage, inputs_of
from .train_loop import Listener, Loop

Sums = Mapping[str, int]
"""Checksums of what was added to gradients, by name, in the order in which they were first added to."""


class Recomputing(Listener):
    """Every so many steps, before the step, ranks recompute what another one does."""

    def __init__(self, session: Session, every: int, machines: Sequence[str]) -> None:
        """machines: names by rank. Raises RuntimeProgramError where ranks cannot take each other's places."""
        if problem := why_not(session):
            raise RuntimeProgramError(f"--recompute: {problem}; leave it out (--recheck compares copies of parameters)")
        self._session, self._every, self._machines = session, every, machines

    def before_step(self, loop: Loop, batch: Any) -> None:
        """Recompute where it is time to. Raises RankError."""
        step = loop.step + 1
        if step % self._every:
            return
        leaves, own = loop.program.leaves(batch), loop.program.own_rows
        if self._session.same_data is not None:
            self._session.same_data.ahead(leaves, step, self._session.taking(own).readers)
        recompute(self._session, leaves, step, self._machines, own)


class _Noted:
    """In place of a store of gradients: it keeps checksums of what is added, and sends nothing."""

    def __init__(self) -> None:
        self.sums: dict[str, int] = {}

    def add(self, name: str, grad: Tensor, owned: bool = False) -> None:
        """Note the checksum of a contribution."""
        self.sums[name] = zlib.crc32(str(checksum([grad])).encode(), self.sums.get(name, 0))

    def start_sum(self, value: Tensor, axes: Any) -> Handle[Tensor]:
        """A loss: this rank's term of it."""
        self.add("the loss", value)
        return Handle(None, value)

    def flush(self) -> None:
        """Do nothing, as no bucket is open."""


def why_not(session: Session) -> str:
    """Why ranks of a program cannot take each other's places; empty where they can."""
    if len(session.pipeline.meshes) > 1:
        return ONE_STAGE
    if session.comm.world_size == 1:
        return "there is one rank alone"
    if any(rt.in_tier for rt in session.rts):
        return "parameters rest in a memory tier"
    if not _equal_axes(session):
        return "parameters rest in blocks of unequal size along every axis"
    return ""


def recompute(
    session: Session, batch: Sequence[Tensor], step: int, machines: Sequence[str], own_rows: bool = False
) -> None:
    """Compare what ranks compute of a batch. step: about to begin; machines: names by rank; own_rows: the batch has this
    rank's rows alone. Raises RankError."""
    comm, axis = session.comm, cheapest_axis(session, own_rows)
    first, second = (sums_of(session, batch, axis, by, own_rows) for by in (0, 1))
    if not any(differing(comm, axis, [first, second])):
        return
    runs = [first, second, *([sums_of(session, batch, axis, 2, own_rows)] if comm.mesh[axis] > 2 else [])]
    odd, names = set[int](), set[str]()
    for ranks, name in differing(comm, axis, runs):
        odd.update(ranks)
        names.add(name)
    shown = ", ".join(f"{rank} ({machines[rank]})" for rank in sorted(odd)[:8])
    than, without = (
        ("others", "these machines")
        if comm.mesh[axis] > 2
        else ("the other", "that machine (which of two it is, a third rank could tell)")
    )
    raise RankError(
        f"step {step}: {'one of ' if than == 'the other' else ''}ranks {shown} computed other gradients "
        f"({', '.join(sorted(names)[:3])}) than {than} from the same data and parameters, so a device or its memory is faulty. "
        f"Go back to a saved step, without {without}",
        sorted(odd),
    )


def differing(comm: Comm, axis: str, runs: Sequence[Sums]) -> list[tuple[list[int], str]]:
    """Ranks of which most others that did the same say that they are wrong, or all of these, and the first gradient that differs.
    runs: this rank's sums in its own place, in the place before it, and so on."""
    told = comm.share([dict(sums) for sums in runs], listed(table(text(), integer(0, 1 << 32)), most=3))
    doers = [Turned(comm, axis, by).doers for by in range(len(runs))]
    found = []
    for place in range(comm.first_rank, comm.first_rank + comm.world_size):
        who = [of[place] for of in doers]
        sums: list[dict[str, int]] = [told[rank - comm.first_rank][by] for by, rank in enumerate(who)]
        if any(one != sums[0] for one in sums):
            usual = next((one for one in sums if sums.count(one) > 1), None)
            odd = [rank for rank, one in zip(who, sums, strict=True) if one != usual]
            names = [name for name in sums[0] if any(one.get(name) != sums[0][name] for one in sums)]
            found.append((odd, next(iter(names), "another number of them")))
    return found


def cheapest_axis(session: Session, own_rows: bool = False) -> str:
    """The axis along which the fewest bytes of parameters and buffers are shards, which a neighbour does not hold; blocks of
    unequal size are none that it could take over, nor are unequal rows, where ranks have their own. Raises RuntimeProgramError
    where there is no such axis."""
    (stage,) = session.stages.values()
    axes = [axis for axis in _equal_axes(session) if not (own_rows and isinstance(session.comm.mesh[axis], Shares))]
    if not axes:
        raise RuntimeProgramError(
            "--recompute: ranks read unequal rows, and none could compute with those of another; give all ranks global batches, "
            "or leave it out"
        )

    def nbytes(axis: str) -> int:
        return sum(value.nbytes for info, value in stage.stored() if any(axis in axes for axes in info.spec))

    return min(axes, key=nbytes)


def _equal_axes(session: Session) -> list[str]:
    """The axes of several ranks along which nothing rests in blocks of unequal size."""
    several = (axis for axis, size in session.comm.mesh.items() if size > 1)
    return [axis for axis in several if not any(rests_by_shares(form.pipeline, 0, axis) for form in session.forms)]


def sums_of(session: Session, batch: Sequence[Tensor], axis: str, by: int, own_rows: bool = False) -> Sums:
    """Checksums of what a rank adds to gradients, in the first microbatch, in the place `by` before its own."""
    taking = session.taking(own_rows)
    place, leaves = taking.of(batch)
    form = session.forms[place]
    ((index, own),) = form.stages.items()
    pipeline = copy.copy(form.pipeline)
    pipeline.microbatches = 1
    pipeline.rows = tuple(tuple(one for one in row if one.microbatch == 0) for row in pipeline.rows)
    turned = Turned(session.comm, axis, by)
    held = {}
    for info, value in own.stored():
        if by and any(axis in axes for axes in info.spec):
            value = session.comm.start_shift(value, axis, by, site=f"{info.name} to recompute with").wait()
        held[info.name] = value.clone() if info.name in own.tables.buffers else value
    stage = Stage(pipeline, own.tables, turned, own.rt.seed, 1, held, tiers=own.tiers, guards=Guards(), owner=own)
    stage.rt.step, stage.rt.loss_scale = session.rt.step, session.updater.loss_scale
    stage.rt.grads = noted = _Noted()  # type: ignore[assignment]
    with backend_of(turned.device).repeatable():
        executor = Executor(pipeline, turned, {index: stage}, turned.in_order)
        inputs = inputs_of(leaves) if not own_rows else _rows_in_place(session, form, stage, leaves, axis, by)
        for outputs in executor.run(inputs)[index]:
            for value in outputs:
                if isinstance(value, Handle):
                    value.wait()
        executor.finish()
    return noted.sums


def _rows_in_place(session: Session, form: Form, stage: Stage, leaves: Sequence[Tensor], axis: str, by: int) -> Inputs:
    """The inputs of a stage in another's place, of the rows that are read there."""
    if by and any(axis in info.row_axes for info in stage.tables.inputs):
        comm, site = session.comm, "rows to recompute with"
        leaves = [comm.start_shift(leaf.to(comm.device), axis, by, site=site).wait() for leaf in leaves]
    return OwnRows(form.pipeline, {stage.index: stage}, stage.comm.rank).inputs_of(leaves)
