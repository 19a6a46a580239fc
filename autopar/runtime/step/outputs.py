"""Outputs of a step, put together: over a stage's ranks from shards, over microbatches by joining them, and from the stage that
has them to all ranks."""

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

Runs = Mapping[int, list[list[Any]]]
"""The outputs of this rank's stages, by microbatch."""


def start_tell(
    pipeline: Pipeline, comm: Comm, stage: int, value: Tensor | None, shape: tuple[int, ...], info: TensorInfo
) -> Handle[Tensor]:
    """A full tensor that the ranks of one stage have, on every rank. comm: of all ranks."""
    if pipeline.covers(stage):
        return Handle(None, value)
    if value is None:
        value = torch.empty(shape, dtype=info.dtype, device=comm.device)
    first = pipeline.meshes[stage][1]
    return comm.start_broadcast(value, tuple(comm.mesh), first, site=f"{info.name} of stage {stage}")


def full_outputs(form: Form, comm: Comm, runs: Runs, numbers: Sequence[int] | None = None) -> dict[int, Tensor]:
    """Outputs of the whole batch by number (all of them by default), on every rank. comm: of all ranks."""
    full: dict[int, Tensor] = {}
    for index, info in form.pipeline.outputs():
        if numbers is None or info.index in numbers:
            shape = joined_shape(info, form.pipeline.microbatches)
            own = _joined(form, runs, index, info, local=False)
            full[info.index] = start_tell(form.pipeline, comm, index, own, shape, info).wait()
    return full


def local_outputs(form: Form, runs: Runs) -> list[Tensor | None]:
    """This rank's shards of the outputs of the whole batch, None of those of other ranks' stages."""
    return [_joined(form, runs, index, info, local=True) for index, info in form.pipeline.outputs()]


def start_loss(form: Form, comm: Comm, runs: Runs) -> Handle[Tensor]:
    """The loss of the batch, which its microbatches' add up to, from the stage that has it to every rank. comm: of all ranks."""
    assert form.loss is not None
    stage, info = form.loss
    loss: Tensor | None = None
    if stage in runs:
        losses = [_arrived(values[0]) for values in runs[stage]]
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
    return start_tell(form.pipeline, comm, stage, loss, info.shape, info)


def _joined(form: Form, runs: Runs, index: int, info: TensorInfo, local: bool) -> Tensor | None:
    """An output of the whole batch from the stage that makes it; local: this rank's shards. None on other ranks."""
    if index not in form.stages:
        return None
    place = form.pipeline.tables(index).outputs.index(info)
    values = [_arrived(outputs[place]) for outputs in runs[index]]
    if not local:
        comm = form.stages[index].comm
        values = [gather_full(v, info.spec, comm, f"output {info.name}", info.shape) for v in values]
    return values[0] if len(values) == 1 else join_microbatches(values, *info.join)


def _arrived(value: Any) -> Tensor:
    arrived: Tensor = value.wait() if isinstance(value, Handle) else value
    return arrived
