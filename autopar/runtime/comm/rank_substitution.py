"""A rank in the place of another: it computes, and sends, what the rank so many places before it along an axis would.

All ranks turn together, so every group stays the set of ranks that it is, with its members in another order. Emitted code sees
only its place in the mesh, so it does all the other rank would do: that rank's part of the batch, its dropout, its blocks.
Sums are taken in the members' order, whatever order a backend prefers, so that they are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..errors import RuntimeProgramError
from .calls import Call, Message, Posted
from .collectives import COLLECTIVES
from .comm import Comm
from .mesh import Group, mesh_index
from .reductions import reduce_in_order

ONE_STAGE = "a rank cannot take the place of another in a pipeline: stages have other weights on other ranks"


class Turned(Comm):
    """`comm`, seen from the place `by` before its own along an axis. doers: who does what a rank does, by rank."""

    def __init__(self, comm: Comm, axis: str, by: int) -> None:
        ranks = range(comm.first_rank, comm.first_rank + comm.world_size)
        places = [mesh_index(comm.mesh, rank - comm.first_rank) for rank in ranks]
        rank_at = {tuple(place.values()): rank for place, rank in zip(places, ranks, strict=True)}
        size = comm.mesh[axis]
        self.doers = {
            rank_at[tuple((place | {axis: (place[axis] - by) % size}).values())]: rank
            for place, rank in zip(places, ranks, strict=True)
        }
        own = next(place for place, rank in self.doers.items() if rank == comm.rank)
        super().__init__(own, comm.mesh, comm.device, comm.first_rank)
        self.in_order = comm.in_order
        self._comm = comm

    def _start(self, call: Call) -> Callable[[], None]:
        group = Group(call.group.axes, tuple(self.doers[rank] for rank in call.group.ranks), call.group.index)
        row = COLLECTIVES[call.kind]
        if not row.reduces:
            return self._comm._start(replace(call, group=group))
        whole = not row.rows_in
        rows = call.inp.new_empty((group.size, *call.inp.shape)) if whole else call.inp.new_empty(call.inp.shape)
        kind = "all_gather" if whole else "all_to_all"
        wait = self._comm._start(Call(kind, group, rows, call.inp, site=call.site))

        def reduced() -> None:
            wait()
            reduce_in_order(list(rows.unbind()), call.op, call.out)

        return reduced

    def _post(self, messages: Sequence[Message]) -> list[Posted]:
        if messages:
            raise RuntimeProgramError(ONE_STAGE)
        return []

    def _part(self, mesh: Mapping[str, int], first_rank: int, inside: bool) -> Comm | None:
        raise RuntimeProgramError(ONE_STAGE)

    def at(self, step: int, action: str) -> None:
        self._comm.at(step, action)

    def _tell(self, text: str) -> list[str]:
        return self._comm._tell(text)
