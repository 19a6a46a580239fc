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
from .entries import EntryForms
from .same_data import SameData
from .shape_variants import Form
from .shared import Shared
from .stage import Stage
from .unsent_state import prepare_unsent, unsent_entries

AVERAGES = ("average@", "averaged@")
"""The beginnings of names of averages, which a checkpoint may be without."""


class State:
    """The part of a session that gives and takes state."""

    comm: Comm
    pipeline: Pipeline
    stages: dict[int, Stage]
    forms: tuple[Form, ...]
    shared: Shared
    opt_params: dict[str, nn.Parameter]
    entries: dict[str, EntryForms]
    updater: Updater
    parts: Parts | None
    same_data: SameData | None

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
        optional = (SKIPPED, *AVERAGES)
        missing = [name for name in entries if name not in state and not name.startswith(optional)]
        if missing:
            raise CheckpointError(f"the state has no {', '.join(missing[:5])} ({len(missing)} missing)")
        self.accept({name: unpack(state.get(name, entry.value), entry) for name, entry in entries.items()})

    def state_entries(self) -> dict[str, StateEntry]:
        """Everything a checkpoint holds of this rank: local values with global shape and spec. Nothing is copied: what rests in a
        tier is there, and nothing is on its way to it. All ranks call it, and were given the same batches. Raises RankError."""
        waiting = sum(one.pending.batches for one in self.entries.values())
        if waiting:
            raise CheckpointError(
                f"the gradients of {waiting} batches wait for an update, and no state holds them; update first"
            )
        self.settle("reading or saving the state")
        self.settle_tiers()
        entries = {
            info.name: StateEntry(value, info.shape, info.spec, stage.comm) for stage, info, value in self._owned()
        }
        step = next(iter(self.stages.values())).rt.step
        extra: dict[str, StateEntry] = {"step": StateEntry(torch.tensor(step), (), (), self.comm)}
        for entry, one in self.entries.items():
            for stage, name, parameter in _optimized(one):
                info = stage.tables.parameters[name]
                for key, value in one.updater.state_of(name).items():
                    sharded = isinstance(value, Tensor) and value.shape == parameter.shape
                    shape = info.shape if sharded else tuple(getattr(value, "shape", ()))
                    spec = info.opt_spec if sharded else of_owner(shape, info.shape, info.opt_spec)
                    extra[f"{_prefix(entry)}{name}.{key}"] = StateEntry(value, shape, spec, stage.comm)
            extra |= {_of(entry, n): StateEntry(text, (), (), self.comm) for n, text in one.updater.dump().items()}
        extra |= {name: one for stage in self.stages.values() for name, one in unsent_entries(stage).items()}
        extra |= dict(self._averages())
        clash = entries.keys() & extra.keys()
        if clash:
            raise CheckpointError(f"parameter names {sorted(clash)} are reserved in checkpoints; rename them")
        return entries | extra

    def prepare_optimizer_state(self, available: Mapping[str, tuple[tuple[int, ...], torch.dtype] | None]) -> None:
        """Allocate the optimizer state that a checkpoint has (name -> shape and dtype; None: no tensor), and forget what it has
        not: a parameter that had no gradient yet has no state."""
        for stage in self.stages.values():
            prepare_unsent(stage, available)
        for entry, one in self.entries.items():
            self._prepare_optimizer_state(entry, one, available)
            if one.averages is not None and _of(entry, "averaged") not in available:
                one.averages.steps.zero_()

    def _prepare_optimizer_state(
        self, entry: str, one: EntryForms, available: Mapping[str, tuple[tuple[int, ...], torch.dtype] | None]
    ) -> None:
        """The same for the optimizers of an entry."""
        updater, prefix = one.updater, _prefix(entry)
        shapes = {name: stage.tables.parameters[name].shape for stage, name, _ in _optimized(one)}
        for name in one.opt_params if _of(entry, "optim_groups") in available else ():
            state = updater.state_of(name)
            for key in [key for key in state if f"{prefix}{name}.{key}" not in available]:
                del state[key]
        for full_name, signature in available.items():
            name, _, key = full_name.removeprefix(prefix).rpartition(".")
            if not full_name.startswith(prefix) or not updater.takes(name):
                continue
            parameter, state = one.opt_params[name], updater.state_of(name)
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
            device = parameter.device if local or updater.counts_on_device(name) else torch.device("cpu")
            state[key] = torch.zeros(local, dtype=dtype, device=device)

    @torch.no_grad()
    def accept(self, local: Mapping[str, Any]) -> None:
        """Take local values for the names of state_entries (those in the entry's own memory stay put)."""
        step = step_number(local["step"])
        for entry, one in self.entries.items():
            one.updater.restore({name: local[_of(entry, name)] for name in one.updater.dump()})
        for _, info, target in self._owned():
            value = local[info.name]
            if value.data_ptr() != target.data_ptr():
                target.copy_(value)
        for stage in self.stages.values():
            stage.rt.step = step
        for entry, one in self.entries.items():
            for name in one.opt_params:
                state = one.updater.state_of(name)
                for key in state:
                    full_name = f"{_prefix(entry)}{name}.{key}"
                    value = local[full_name]
                    if not isinstance(state[key], Tensor):
                        check_plain(full_name, value)
                        state[key] = value
                    elif value.data_ptr() != state[key].data_ptr():
                        state[key].copy_(value)
        for stage in self.stages.values():
            for name, unsent in unsent_entries(stage).items():
                if local[name].data_ptr() != unsent.value.data_ptr():
                    unsent.value.copy_(local[name])
        for name, average in self._averages():
            if local[name].data_ptr() != average.value.data_ptr():
                average.value.copy_(local[name])
        if self.parts is not None:
            self.parts.park()
        for one in self.entries.values():
            for stage in one.stages.values():
                stage.refresh_optimizer_shards()
        self.shared.spread_parameters()
        self.shared.spread_buffers(every=True)
        for one in self.entries.values():
            if one.averages is not None:
                one.forms[0].shared.spread_parameters()
                one.averages.begin()

    def _averages(self) -> Iterator[tuple[str, StateEntry]]:
        """The averages that entries compute with, and how many steps are in them."""
        for entry, one in self.entries.items():
            if one.averages is None or one.averaging is None:
                continue
            yield _of(entry, "averaged"), StateEntry(one.averages.steps, (), (), self.comm)
            for stage in one.stages.values():
                for name in one.averaging.names:
                    info = stage.tables.parameters.get(name)
                    if info is not None and one.forms[0].pipeline.owns(stage.index, name):
                        average = StateEntry(stage.rt.params[name], info.shape, info.spec, stage.comm)
                        yield f"{_of(entry, 'average')}.{name}", average

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


def _optimized(entry: EntryForms) -> Iterator[tuple[Stage, str, nn.Parameter]]:
    """The parameters that an entry trains on this rank."""
    for stage in entry.stages.values():
        for name, parameter in stage.opt_params.items():
            yield stage, name, parameter


def _prefix(entry: str) -> str:
    """The beginning of the names of an entry's optimizer state."""
    return f"{_of(entry, 'optim')}."


def _of(entry: str, name: str) -> str:
    """A name of a checkpoint that every entry which trains has one of."""
    return f"{name}@{entry}" if entry else name


def _signature(value: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
