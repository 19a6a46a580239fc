"""The entries of a session in a checkpoint: parameters, buffers, optimizer state and counters by name.

A rank has the names of its own stages; a tensor of several stages is its owner's. Every value is described by its
global shape and spec, so checkpoint.py can move it between meshes and pipelines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.comm import Comm
from ..errors import CheckpointError
from ..program.layout import StateEntry, TensorInfo, holds, of_owner
from ..program.tables import Pipeline
from ..update.optimizer_parts import Parts
from ..update.update import SKIPPED, Updater
from ..update.update_state import check_plain, step_number
from .pending import Pending
from .same_data import SameData
from .shape_variants import Form
from .shared import Shared
from .stage import Stage
from .unsent_state import prepare_unsent, unsent_entries


class State:
    """The part of a session that gives and takes state."""

    comm: Comm
    pipeline: Pipeline
    stages: dict[int, Stage]
    forms: tuple[Form, ...]
    shared: Shared
    opt_params: dict[str, nn.Parameter]
    updater: Updater
    parts: Parts | None
    same_data: SameData | None
    pending: Pending

    def settle(self, what: str) -> None:
        """See that all batches so far were the same on all ranks. what: this rank does next, as in "saving". Raises RankError."""
        if self.same_data is not None:
            self.same_data.settle(what, next(iter(self.stages.values())).rt.step)

    def settle_tiers(self) -> None:
        """Wait until all that was sent to memory tiers has arrived: the host is about to read or write there."""
        for stage in self.stages.values():
            stage.tiers.settle()

    def state_dict(self) -> dict[str, Any]:
        """State by name. Over processes: DTensors of this rank's stages, on its device; over threads: full tensors of all."""
        from .dtensors import merge, pack  # torch.distributed.tensor takes most of a second to import

        return merge({name: pack(entry) for name, entry in self.state_entries().items()}, self.comm)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of state_dict, for any plan: full tensors and DTensors of any layout are taken."""
        from .dtensors import unpack

        self.prepare_optimizer_state({name: _signature(value) for name, value in state.items()})
        entries = self.state_entries()
        missing = [name for name in entries if name not in (*state, SKIPPED)]
        if missing:
            raise CheckpointError(f"the state has no {', '.join(missing[:5])} ({len(missing)} missing)")
        self.accept({name: unpack(state.get(name, entry.value), entry) for name, entry in entries.items()})

    def state_entries(self) -> dict[str, StateEntry]:
        """Everything a checkpoint holds of this rank: local values with global shape and spec. Nothing is copied: what rests in a
        tier is there, and nothing is on its way to it. All ranks call it, and were given the same batches. Raises RankError."""
        if self.pending.batches:
            raise CheckpointError(
                f"the gradients of {self.pending.batches} batches wait for an update, and no state holds them; update first"
            )
        self.settle("reading or saving the state")
        self.settle_tiers()
        entries = {
            info.name: StateEntry(value, info.shape, info.spec, stage.comm) for stage, info, value in self._owned()
        }
        step = next(iter(self.stages.values())).rt.step
        extra: dict[str, StateEntry] = {"step": StateEntry(torch.tensor(step), (), (), self.comm)}
        for stage, name, parameter in self._optimized():
            info = stage.tables.parameters[name]
            for key, value in self.updater.state_of(name).items():
                sharded = isinstance(value, Tensor) and value.shape == parameter.shape
                shape = info.shape if sharded else tuple(getattr(value, "shape", ()))
                spec = info.opt_spec if sharded else of_owner(shape, info.shape, info.opt_spec)
                extra[f"optim.{name}.{key}"] = StateEntry(value, shape, spec, stage.comm)
        extra |= {name: StateEntry(text, (), (), self.comm) for name, text in self.updater.dump().items()}
        extra |= {name: one for stage in self.stages.values() for name, one in unsent_entries(stage).items()}
        clash = entries.keys() & extra.keys()
        if clash:
            raise CheckpointError(f"parameter names {sorted(clash)} are reserved in checkpoints; rename them")
        return entries | extra

    def prepare_optimizer_state(self, available: Mapping[str, tuple[tuple[int, ...], torch.dtype] | None]) -> None:
        """Allocate the optimizer state that a checkpoint has (name -> shape and dtype; None: no tensor), and forget what it has
        not: a parameter that had no gradient yet has no state."""
        shapes = {name: stage.tables.parameters[name].shape for stage, name, _ in self._optimized()}
        for name in self.opt_params if "optim_groups" in available else ():
            state = self.updater.state_of(name)
            for key in [key for key in state if f"optim.{name}.{key}" not in available]:
                del state[key]
        for stage in self.stages.values():
            prepare_unsent(stage, available)
        for full_name, signature in available.items():
            name, _, key = full_name.removeprefix("optim.").rpartition(".")
            if not full_name.startswith("optim.") or not self.updater.takes(name):
                continue
            parameter, state = self.opt_params[name], self.updater.state_of(name)
            if key in state:
                continue
            if signature is None:
                state[key] = None
                continue
            shape, dtype = signature
            if math.prod(shape) > max(math.prod(shapes[name]), *(n * n for n in shapes[name]), 1):
                raise CheckpointError(
                    f"{full_name} has shape {shape}, more than the state of a parameter of shape {shapes[name]} can have"
                )
            local = parameter.shape if shape == shapes[name] else shape
            device = parameter.device if local or self.updater.counts_on_device(name) else torch.device("cpu")
            state[key] = torch.zeros(local, dtype=dtype, device=device)

    @torch.no_grad()
    def accept(self, local: Mapping[str, Any]) -> None:
        """Take local values for the names of state_entries (those in the entry's own memory stay put)."""
        step = step_number(local["step"])
        self.updater.restore({name: local[name] for name in self.updater.dump()})
        for _, info, target in self._owned():
            value = local[info.name]
            if value.data_ptr() != target.data_ptr():
                target.copy_(value)
        for stage in self.stages.values():
            stage.rt.step = step
        for name in self.opt_params:
            state = self.updater.state_of(name)
            for key in state:
                value = local[f"optim.{name}.{key}"]
                if not isinstance(state[key], Tensor):
                    check_plain(f"optim.{name}.{key}", value)
                    state[key] = value
                elif value.data_ptr() != state[key].data_ptr():
                    state[key].copy_(value)
        for stage in self.stages.values():
            for name, entry in unsent_entries(stage).items():
                if local[name].data_ptr() != entry.value.data_ptr():
                    entry.value.copy_(local[name])
        if self.parts is not None:
            self.parts.park()
        for stage in self.stages.values():
            stage.refresh_optimizer_shards()
        self.shared.spread_parameters()
        self.shared.spread_buffers(every=True)

    def names(self) -> set[str]:
        """Parameters and buffers of this rank's checkpoint entries."""
        return {info.name for _, info, _ in self._owned()}

    def _owned(self) -> Iterator[tuple[Stage, TensorInfo, Tensor]]:
        """The tensors that rest on this rank and are nobody else's: of the first form; of others the constants that
        they alone have."""
        known: set[str] = set()
        for form in self.forms:
            for stage in form.stages.values():
                for info, value in stage.stored():
                    owns = form.pipeline.owns(stage.index, info.name) and holds(info.shape, info.spec, stage.comm)
                    if info.name not in known and owns:
                        yield stage, info, value
            known |= {info.name for stage in form.stages.values() for info, _ in stage.stored()}

    def _optimized(self) -> Iterator[tuple[Stage, str, nn.Parameter]]:
        for stage in self.stages.values():
            for name, parameter in stage.opt_params.items():
                yield stage, name, parameter


def _signature(value: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
