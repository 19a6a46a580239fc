"""Forms: what a session runs, looked up by entry, a step that the program was compiled for, and then by the shapes of a batch.

A form is a pipeline with this rank's stages of it. All forms of a session store the same parameters on the same ranks in the
same way: the first one owns these tensors, their optimizer's shards and the communicators, and the others compute with
them. So a batch of another bucket (shapes.py), or of another entry, costs no more than to look up its form.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..comm.comm import Comm
from ..comm.mesh import Shares
from ..comm.nodes import use_nodes
from ..errors import RuntimeProgramError
from ..guards import Guards
from ..memory.tiers import Tiers
from ..program.layout import local_slices
from ..program.tables import Pipeline, StageTables
from .absent_gradients import Absent
from .pipeline import Executor
from .shared import Shared, held_alike
from .stage import Stage


class Form:
    """A pipeline on one rank. earlier: forms whose tensors this one uses, the first of which has the parameters and the
    communicators; apart: parameters of which it has tensors of its own, averages. Buffers that hold constants have names that
    say what they hold, so equal ones are one."""

    def __init__(
        self,
        pipeline: Pipeline,
        comm: Comm,
        seed: int,
        bucket_bytes: int,
        compensated: bool,
        tiers: Tiers,
        guards: Guards,
        earlier: Sequence[Form] = (),
        apart: frozenset[str] = frozenset(),
    ) -> None:
        self.pipeline, self.apart = pipeline, apart
        first = earlier[0] if earlier else None
        if first is not None:
            _check_alike(pipeline, first.pipeline)
        if first is not None:
            own = zip(first.comms, pipeline.meshes, strict=True)
            self.comms: Sequence[Comm | None] = [one and one.under(mesh) for one, (mesh, _) in own]
        else:
            self.comms = comm.split(pipeline.meshes)
            use_nodes(comm, self.comms, pipeline.meshes, pipeline.nodes, pipeline.by_node)
        self.stages: dict[int, Stage] = {}
        for index in sorted(pipeline.groups[pipeline.group_of(comm.rank)]):
            own, tables = self.comms[index], pipeline.tables(index)
            assert own is not None
            owner = first.stages[index] if first is not None else None
            if owner is not None:
                _check_stored_alike(tables, owner.tables, own, owner.comm)
            held = {
                info.name: value
                for form in earlier
                for info, value in form.stages[index].stored()
                if (info.name in form.apart) == (info.name in apart)
            }
            own_held = self._held(index)
            held = {n: v for n, v in own_held.items() if n in apart} | held if earlier else own_held
            self.stages[index] = Stage(
                pipeline, tables, own, seed, bucket_bytes, held, compensated, tiers, guards, owner
            )
        self.shared = Shared(pipeline, comm, self.stages)
        self.executor = Executor(pipeline, comm, self.stages, comm.in_order)
        self.absent = Absent(pipeline, comm, self.stages)
        self.loss = pipeline.loss() if pipeline.training else None

    def share_rows(self, stages: Sequence[int], axis: str, units: Sequence[int]) -> None:
        """From the next step on the ranks of these stages hold so many units each along an axis. Every rank calls it alike."""
        for index in stages:
            self.pipeline.meshes[index][0][axis] = Shares(units)
            if index in self.stages:
                self.stages[index].comm.mesh[axis] = Shares(units)
                self.stages[index].cut_inputs()
        self.executor.connect()

    def _held(self, index: int) -> dict[str, Tensor]:
        """Parameters that an earlier stage of this rank stores just as this one does."""
        return {
            name: stage.rt.params[name]
            for other, stage in self.stages.items()
            for name, holders in self.pipeline.shared.items()
            if {index, other} <= set(holders) and held_alike(self.pipeline, index, other, name)
        }


def _check_alike(pipeline: Pipeline, first: Pipeline) -> None:
    """Raises RuntimeProgramError where a form has other stages on other ranks than the first one; their shares may differ."""
    for what, own, other in (("meshes", _sizes(pipeline), _sizes(first)), ("groups", pipeline.groups, first.groups)):
        if own != other:
            raise RuntimeProgramError(
                f"the forms of this program differ in their {what}: {own}, and {other} in the first; were its files mixed? Emit "
                "it again"
            )


def _sizes(pipeline: Pipeline) -> list[tuple[dict[str, int], int]]:
    """The sizes and the first rank of every mesh, without shares."""
    return [({axis: int(size) for axis, size in mesh.items()}, first) for mesh, first in pipeline.meshes]


def _check_stored_alike(tables: StageTables, first: StageTables, comm: Comm, first_comm: Comm) -> None:
    """Raises RuntimeProgramError where a form stores a parameter otherwise than the first one."""
    for name, info in tables.parameters.items():
        known = first.parameters.get(name)
        specs = () if known is None else (info.spec, info.opt_spec)
        apart = any(local_slices(info.shape, s, comm) != local_slices(info.shape, s, first_comm) for s in specs)
        if apart or known is None or known.stored_as != info.stored_as:
            raise RuntimeProgramError(
                f"stage {tables.index}: a form stores {name} as {info.stored_as}, the first one as "
                f"{known and known.stored_as}; were its files mixed? Emit it again"
            )
