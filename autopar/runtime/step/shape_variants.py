"""Forms: what a session runs, looked up by entry, a step that the program was compiled for, and then by the shapes of a batch.

A form is a pipeline with this rank's stages of it. All forms of a session store the same parameters on the same ranks in the
same way: the first one owns these tensors, their optimizer's shards and the communicators, and the others compute with
them. So a batch of another bucket (shapes.py), or of another entry, costs no more than to look up its form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..comm.comm import Comm
from ..comm.nodes import use_nodes
from ..errors import RuntimeProgramError
from ..guards import Guards
from ..memory.tiers import Tiers
from ..program.layout import local_shape, local_slices
from ..program.shapes import PadValues, Shapes
from ..program.tables import Modules, Pipeline, StageTables
from ..update.averaging import Averages, Averaging
from ..update.clipping import counts
from ..update.update import Updater
from ..update.update_rule import UpdateRule, check_sharded
from .absent_gradients import Absent
from .pipeline import Executor
from .shared import Shared, held_alike
from .stage import Stage


@dataclass(frozen=True)
class EntryModules:
    """The modules of an entry: pipeline.py and stages of every shape of its batches, what inputs are padded with, how
    parameters follow from gradients, and which of them it averages."""

    forms: Sequence[tuple[Any, Modules]]
    pad: PadValues = field(default_factory=dict)
    update: UpdateRule | None = None
    averaging: Averaging | None = None


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

    def _held(self, index: int) -> dict[str, Tensor]:
        """Parameters that an earlier stage of this rank stores just as this one does."""
        return {
            name: stage.rt.params[name]
            for other, stage in self.stages.items()
            for name, holders in self.pipeline.shared.items()
            if {index, other} <= set(holders) and held_alike(self.pipeline, index, other, name)
        }


class EntryForms:
    """The forms of an entry, and what updates the parameters that it trains. Raises RuntimeProgramError where its forms train
    others."""

    def __init__(
        self,
        forms: Sequence[Form],
        pad: PadValues,
        rule: UpdateRule,
        comm: Comm,
        averaging: Averaging | None = None,
        first: Form | None = None,
    ) -> None:
        """averaging, first: of an entry that averages parameters of the session's first form."""
        self.forms = tuple(forms)
        self.shapes = Shapes([form.pipeline.inputs for form in forms], pad)
        self.training = forms[0].pipeline.training
        self.stages = forms[0].stages
        for index, stage in self.stages.items():
            for form in forms[1:]:
                if other := sorted(form.stages[index].tables.gradients.keys() ^ stage.tables.gradients.keys()):
                    raise RuntimeProgramError(
                        f"stage {index}: not every form makes a gradient of {', '.join(other)}; emit it again"
                    )
        self.trained: frozenset[str] = frozenset()
        self.averages: Averages | None = None
        self.averaging = averaging
        if averaging is not None and first is not None:
            pairs = {
                id(stage.rt.params[name]): (stage.rt.params[name], first.stages[index].rt.params[name])
                for index, stage in self.stages.items()
                for name in averaging.names
                if name in stage.rt.params
            }
            self.averages = Averages(averaging.decay, tuple(pairs.values()))
        self.opt_params = {n: p for stage in self.stages.values() for n, p in stage.opt_params.items()}
        self.updater = self._updater(rule, comm)
        for one in self.updater.optimizers:
            self._check_optimizer(one)
        if rule.loss_scaling is not None and any(stage.rt.grads.feeds_back for stage in self.stages.values()):
            raise RuntimeProgramError(
                "int8 gradients keep what they have not sent in units of the loss scale, which moves; train without loss "
                "scaling, or compile with gradient_compression='bf16'"
            )

    def of(self, batch: Sequence[Tensor]) -> tuple[Form, Sequence[Tensor]]:
        """The form of a batch, and the batch padded as that takes it. Raises GuardError."""
        place, shaped = self.shapes.of(batch)
        return self.forms[place], shaped

    def follow(self, names: frozenset[str]) -> None:
        """A step has updated these parameters: they are averaged, if this entry computes with averages of one of them."""
        if self.averages is not None and self.averaging is not None and names & {*self.averaging.names}:
            self.averages.update()

    def _updater(self, rule: UpdateRule, comm: Comm) -> Updater:
        """The updater of this rank's parameters; one of no parameters where the entry does not train."""
        if not self.training:
            return Updater(UpdateRule(), {}, {}, (), comm)
        pipeline = self.forms[0].pipeline
        rows = [row for stage in pipeline.stages for row in pipeline.optimized(stage)]
        every = {row.name: (len(row.shape), row.dtype) for row in rows}
        self.trained = frozenset(every)
        counted = {
            name
            for stage in self.stages.values()
            for name in stage.opt_params
            if counts(stage.tables.parameters[name].opt_spec, stage.comm)
        }
        return Updater(rule, self.opt_params, every, counted, comm)

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        taken, cut = {id(p) for group in optimizer.param_groups for p in group["params"]}, []
        for stage in self.stages.values():
            for name in (name for name, parameter in stage.opt_params.items() if id(parameter) in taken):
                info = stage.tables.parameters[name]
                if local_shape(info.shape, info.opt_spec, stage.comm) != info.shape:
                    cut.append(name)
        check_sharded(optimizer, cut)


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
