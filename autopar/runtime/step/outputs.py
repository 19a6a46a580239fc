"""Outputs of a step on every rank: microbatches' shards, from the stage that makes them, gathered, joined and told to all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.calls import Handle
from ..comm.comm import Comm
from ..program.layout import TensorInfo, gather_full
from ..program.tables import Pipeline
from .pipeline import join_microbatches, joined_shape
from .shape_variants import Form

Outputs = Mapping[int, Sequence[Sequence[Tensor]]]
"""By stage of this rank and microbatch the outputs that its forward gave."""


def arrived(outputs: Mapping[int, Sequence[Sequence[Any]]]) -> Outputs:
    """Outputs of an executor, of which sums may be Handles, once these are there."""
    return {
        stage: [[one.wait() if isinstance(one, Handle) else one for one in row] for row in rows]
        for stage, rows in outputs.items()
    }


def full_outputs(form: Form, comm: Comm, outputs: Outputs, numbers: Sequence[int] | None = None) -> dict[int, Tensor]:
    """Outputs of the whole batch by number, on every rank. numbers: these alone."""
    full: dict[int, Tensor] = {}
    for stage, info in form.pipeline.outputs():
        if numbers is None or info.index in numbers:
            shape = joined_shape(info, form.pipeline.microbatches)
            full[info.index] = start_tell(
                form.pipeline, comm, stage, _joined(form, outputs, stage, info), shape, info
            ).wait()
    return full


def local_outputs(form: Form, outputs: Outputs) -> list[Tensor | None]:
    """This rank's shards of the outputs of the whole batch, None of those of other ranks' stages."""
    return [_joined(form, outputs, stage, info, local=True) for stage, info in form.pipeline.outputs()]


def start_loss(form: Form, comm: Comm, outputs: Mapping[int, Sequence[Sequence[Any]]]) -> Handle[Tensor]:
    """The loss of the batch, which its microbatches' add up to, from the stage that has it to every rank. outputs: of an
    executor."""
    assert form.loss is not None
    stage, info = form.loss
    loss: Tensor | None = None
    if stage in outputs:
        losses = [row[0].wait() if isinstance(row[0], Handle) else row[0] for row in outputs[stage]]
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
    return start_tell(form.pipeline, comm, stage, loss, info.shape, info)


def _joined(form: Form, outputs: Outputs, stage: int, info: TensorInfo, *, local: bool = False) -> Tensor | None:
    """An output of the whole batch on the ranks of the stage that makes it, None on others; local: this rank's shards."""
    if stage not in form.stages:
        return None
    place, comm = form.pipeline.tables(stage).outputs.index(info), form.stages[stage].comm
    values = [row[place] for row in outputs[stage]]
    if not local:
        values = [gather_full(v, info.spec, comm, f"output {info.name}", info.shape) for v in values]
    return values[0] if len(values) == 1 else join_microbatches(values, *info.join)


def start_tell(
    pipeline: Pipeline, comm: Comm, stage: int, value: Tensor | None, shape: tuple[int, ...], info: TensorInfo
) -> Handle[Tensor]:
    """A full tensor that the ranks of one stage have, on every rank."""
    if pipeline.covers(stage):
        return Handle(None, value)
    if value is None:
        value = torch.empty(shape, dtype=info.dtype, device=comm.device)
    return comm.start_broadcast(
        value, tuple(comm.mesh), pipeline.meshes[stage][1], site=f"{info.name} of stage {stage}"
    )
