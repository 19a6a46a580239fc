"""Gradients that compression has not sent yet (compression.py), as entries of checkpoints.

Every rank has its own, so an entry has one row for each rank of the stage's mesh, in its order. Where it belongs, to which
parameter and to which sum of its gradient, follows from mesh and steps: their hash is in the entry's name, and what another
layout has not sent is not taken but begins from zero, which is said.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping

import torch

from ..errors import CheckpointError
from ..program.layout import StateEntry
from .stage import Stage

_PREFIX = "optim_unsent"


def unsent_entries(stage: Stage) -> dict[str, StateEntry]:
    """This rank's rows by entry name."""
    comm, entries = stage.comm, {}
    for (name, left), value in stage.rt.grads.unsent.values.items():
        spec = (tuple(comm.mesh), *((),) * value.dim())
        entries[_entry_name(stage, name, left)] = StateEntry(value[None], (comm.world_size, *value.shape), spec, comm)
    return entries


def prepare_unsent(stage: Stage, available: Mapping[str, tuple[tuple[int, ...], torch.dtype] | None]) -> None:
    """Room for what a checkpoint has (name -> shape and dtype; None: no tensor), and for nothing else. Raises CheckpointError
    where an entry cannot be of its parameter."""
    unsent, taken = stage.rt.grads.unsent, set()
    unsent.forget()
    for name, entry in stage.tables.gradients.items():
        for left in range(len(entry.steps)) if entry.compression else ():
            full_name = _entry_name(stage, name, left)
            signature = available.get(full_name)
            if signature is None:
                continue
            parameter, (ranks, *shape) = stage.tables.parameters[name], signature[0] or (0,)
            if ranks != stage.comm.world_size or math.prod(shape) > math.prod(parameter.shape):
                raise CheckpointError(
                    f"{full_name} has shape {signature[0]}, the program has {stage.comm.world_size} ranks and a parameter of "
                    f"shape {parameter.shape}"
                )
            unsent.values[name, left] = torch.zeros(shape, dtype=parameter.dtype, device=stage.comm.device)
            taken.add(full_name)
    others = [name for name in available if name.startswith(f"{_PREFIX}.{stage.index}.") and name not in taken]
    if others and stage.comm.rank == stage.comm.first_rank:
        warnings.warn(
            f"what compressed gradients of stage {stage.index} have not sent ({len(others)} entries such as {others[0]}) is of "
            "another layout: it is left out, and begins from zero",
            stacklevel=2,
        )


def _entry_name(stage: Stage, name: str, left: int) -> str:
    row = stage.tables.parameters[name]
    mesh = {axis: int(size) for axis, size in stage.comm.mesh.items()}  # whatever rows ranks hold
    layout = repr((mesh, row.opt_spec, stage.tables.gradients[name].steps))
    return f"{_PREFIX}.{stage.index}.{left}.{hashlib.sha256(layout.encode()).hexdigest()[:8]}.{name}"
