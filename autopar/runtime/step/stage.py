"""One stage on one rank: its stored tensors, its `rt`, its part of the batch, and the shards that the optimizer sees.

Storage and optimizer shard are one memory wherever the shard is a contiguous part of the storage (always, when the two
specs are equal), so the gather after the optimizer writes only what other ranks own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.backends import backend_of
from ..comm.comm import Comm
from ..comm.mesh import boxes_of, run_axes, slices_of
from ..compiled.inductor import CompiledRegion, compiled_stage
from ..errors import RuntimeProgramError
from ..gradients.bucket_sizes import BucketSizes, Value
from ..gradients.gather import Gather, start_gathers
from ..gradients.grads import GradStore
from ..guards import Guards
from ..memory.tiers import Tiers
from ..program.layout import TensorInfo, fill, holds, local_shape, local_slices, refinement, run_view
from ..program.tables import Pipeline, StageTables
from ..rank import Rank

SliceReader = Callable[[str, tuple[slice, ...]], Tensor]
Cut = tuple[slice, ...]
Cuts = Sequence[Sequence[Cut]]
"""Where a stage's inputs lie in leaves, by input and microbatch."""


class Rooms:
    """The memories in which tensors of a stage lie one after another, in the order of its table."""

    def __init__(self, infos: Iterable[TensorInfo]) -> None:
        self._names: dict[str, list[str]] = {}
        for info in infos:
            self._names.setdefault(info.room, []).append(info.name)
        self._memory: dict[str, Tensor] = {}

    def empty(self, info: TensorInfo, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor in its place of its room, or in a memory of its own. All of a room are alike."""
        if not info.room:
            return torch.empty(shape, dtype=dtype, device=device)
        names = self._names[info.room]
        if info.room not in self._memory:
            self._memory[info.room] = torch.empty((len(names), *shape), dtype=dtype, device=device)
        return self._memory[info.room][names.index(info.name)]


class Stage:
    """The state of a stage on a rank of its mesh. held: tensors of another stage of this rank to share. owner: the same stage
    of the session's first form, which has the shards of parameters that optimizers update (this one, by default); opt_params:
    those of them that this form trains."""

    def __init__(
        self,
        pipeline: Pipeline,
        tables: StageTables,
        comm: Comm,
        seed: int,
        bucket_bytes: int,
        held: Mapping[str, Tensor] | None = None,
        compensated: bool = False,
        tiers: Tiers | None = None,
        guards: Guards | None = None,
        owner: Stage | None = None,
    ) -> None:
        self.index = tables.index
        self.tables = tables
        self.comm = comm
        self.held = held or {}
        self.tiers = tiers or Tiers(comm.device)
        room, narrow_room = Rooms(tables.parameters.values()), Rooms(tables.parameters.values())
        params = {name: self._storage(info, room) for name, info in tables.parameters.items()}
        self.rt = Rank(
            comm,
            params,
            {name: self._storage(info, room) for name, info in tables.buffers.items()},
            GradStore(
                comm,
                tables.gradients,
                pipeline.microbatches,
                BucketSizes.of(self._gradients(), comm.mesh, bucket_bytes),
                compensated=compensated,
                tiers=self.tiers,
                tier_of={name: info.tier for name, info in tables.parameters.items() if info.tier},
            ),
            seed=seed,
            tiers=self.tiers,
            in_tier=frozenset(name for name, info in tables.parameters.items() if info.tier),
            guards=guards,
            narrow=self._narrow(params, owner, narrow_room),
        )
        self.module, self.regions = tables.module, list[CompiledRegion]()
        if pipeline.compiler != "none":
            self.module, self.regions = compiled_stage(tables.module, self.rt, self.index)
        self.microbatches = pipeline.microbatches
        self.cut_inputs()
        self.optimized: list[TensorInfo] = pipeline.optimized(self.index) if pipeline.training else []
        self.shards: dict[str, nn.Parameter] = {} if owner is None else owner.shards
        self.opt_params: dict[str, nn.Parameter] = {}
        for info in self.optimized:
            if holds(info.shape, info.opt_spec, comm):
                if info.name not in self.shards:
                    self.shards[info.name] = self._optimizer_shard(info)
                self.opt_params[info.name] = self.shards[info.name]

    def stored(self) -> Iterator[tuple[TensorInfo, Tensor]]:
        """Parameters and buffers with their local values."""
        for name, info in self.tables.parameters.items():
            yield info, self.rt.params[name]
        for name, info in self.tables.buffers.items():
            yield info, self.rt.buffers[name]

    @torch.no_grad()
    def load(self, full: Mapping[str, Tensor] | SliceReader) -> None:
        """Fill parameters and buffers; see Session.load_weights."""
        for info, target in self.stored():
            boxes = boxes_of(info.shape, info.spec, self.comm.mesh, self.comm.position, info.name)
            if isinstance(full, Mapping):
                if info.name not in full:
                    raise RuntimeProgramError(f"the weights have no tensor {info.name!r}")
                source = full[info.name]
                if tuple(source.shape) != info.shape:
                    raise RuntimeProgramError(
                        f"{info.name}: the program expects shape {info.shape}, the weights have {tuple(source.shape)}"
                    )
                parts = [source[slices_of(box)] if info.shape else source for box in boxes]
            else:
                parts = [full(info.name, slices_of(box)) for box in boxes]
            if any(part.is_meta or hasattr(part, "fake_mode") for part in parts):
                raise RuntimeProgramError(
                    f"{info.name}: the weights hold no data (meta or fake tensor); load a checkpoint"
                )
            fill(target, parts)
        self.refresh_optimizer_shards()

    def apart(self, value: Tensor) -> Tensor:
        """An output of forward; a copy where it lies in a parameter or buffer, which the step goes on to change."""
        stored = (t.untyped_storage()._cdata for t in (*self.rt.params.values(), *self.rt.buffers.values()))
        return value.clone() if value.untyped_storage()._cdata in set(stored) else value

    def cut_inputs(self) -> None:
        """Find where this rank's parts of the batch lie, under the shares that the mesh has now."""
        self.cuts = [self._cuts(info) for info in self.tables.inputs]

    def inputs(self, batch: Sequence[Tensor], microbatch: int, cuts: Cuts | None = None) -> list[Tensor]:
        """This rank's part of a microbatch's leaves. cuts: where it lies in these (default: in those of a global batch)."""
        return [self._brought(view, dtype) for view, dtype in self._views(batch, microbatch, cuts)]

    def own_inputs(self, batch: Sequence[Tensor], microbatch: int, cuts: Cuts | None = None) -> list[Tensor]:
        """The same in memory of their own, where they are: in pinned memory, if they are to go to the device."""
        return [self._pinned(view, dtype) for view, dtype in self._views(batch, microbatch, cuts)]

    def _views(
        self, batch: Sequence[Tensor], microbatch: int, cuts_of: Cuts | None
    ) -> Iterator[tuple[Tensor, torch.dtype]]:
        for info, cuts in zip(self.tables.inputs, self.cuts if cuts_of is None else cuts_of, strict=True):
            leaf = batch[info.index]
            yield leaf[cuts[microbatch]] if cuts[microbatch] else leaf, info.dtype

    def _travels(self, part: Tensor) -> bool:
        """Whether a part of the batch goes from the host's memory to that of the device."""
        device = self.comm.device
        return not (part.device.type == device.type or backend_of(device).is_host) and backend_of(part.device).is_host

    def _pinned(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(part, dtype=dtype, pin_memory=self._travels(part)).copy_(part)

    def _brought(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """A part of the batch on the rank's device. From the host's memory it goes by way of pinned memory, so that the host does
        not wait for the kernels before; torch keeps that memory until the copy is over."""
        if not self._travels(part):
            return part.to(device=self.comm.device, dtype=dtype)
        return self._pinned(part, dtype).to(device=self.comm.device, non_blocking=True)

    def start_regather(self) -> Callable[[], Any]:
        """Bring updated optimizer shards back to storage; the returned function waits for it."""
        gathers: list[Gather] = [
            (
                self.opt_params[info.name].data if info.name in self.opt_params else self._shard_view(info),
                info.gather,
                self.rt.params[info.name],
            )
            for info in self.optimized
            if info.gather and info.name not in self.rt.in_tier
        ]
        return start_gathers(self.comm, gathers, site="updated parameters").wait if gathers else lambda: None

    @torch.no_grad()
    def store_updated(self, shards: Mapping[str, Tensor]) -> None:
        """Bring updated optimizer shards, which are on the device, to storage that rests in a tier."""
        rows = {name: shard for name, shard in shards.items() if self.tables.parameters[name].gather}
        gathers: list[Gather] = [(shard, self.tables.parameters[name].gather, None) for name, shard in rows.items()]
        handle = start_gathers(self.comm, gathers, site="updated parameters") if gathers else None
        for name, shard in shards.items():
            self.tiers.write(self.opt_params[name].data, shard)
        for name, full in zip(rows, handle.wait() if handle is not None else [], strict=True):
            self.tiers.write(self.rt.params[name], full)

    @torch.no_grad()
    def refresh_optimizer_shards(self) -> None:
        """Make the optimizer's shards what the storage holds."""
        for name, parameter in self.opt_params.items():
            shard = self._shard_view(self.tables.parameters[name])
            if shard.data_ptr() != parameter.data_ptr():
                parameter.copy_(shard)

    # ---- small print

    def _storage(self, info: TensorInfo, rooms: Rooms) -> Tensor:
        if info.name in self.held:
            return self.held[info.name]
        shape = local_shape(info.shape, info.spec, self.comm, info.name)
        if info.tier:
            room = self.tiers.empty(shape, info.dtype, info.tier)
        else:
            room = rooms.empty(info, shape, info.dtype, self.comm.device)
        return room.zero_() if run_axes(info.shape, info.spec) else room

    def _narrow(self, params: Mapping[str, Tensor], owner: Stage | None, rooms: Rooms) -> dict[str, Tensor]:
        """Rooms for the copies of parameters in lower precision; the owner's serve where it stores the same."""
        copies: dict[str, Tensor] = {}
        if owner is not None:
            copies = {n: c for n, c in owner.rt.narrow.items() if owner.rt.params[n] is params.get(n)}
        return {
            name: copies[name]
            if name in copies
            else rooms.empty(info, params[name].shape, info.narrow, params[name].device)
            for name, info in self.tables.parameters.items()
            if info.narrow is not None
        }

    def _gradients(self) -> Iterator[Value]:
        """The gradients that are put into buckets in a step."""
        for name, entry in self.tables.gradients.items():
            info = self.tables.parameters[name]
            yield name, info.shape, info.opt_spec, info.dtype.itemsize, entry.steps

    def _optimizer_shard(self, info: TensorInfo) -> nn.Parameter:
        if info.opt_spec != info.spec and not info.gather:
            raise RuntimeProgramError(f"{info.name}: optimizer spec {info.opt_spec} without the steps back to storage")
        shard = self._shard_view(info)
        is_part = shard is self.rt.params[info.name] or shard._is_view()
        if not shard.is_contiguous() or (info.tier and not is_part):
            apart = self.tiers.empty(shard.shape, shard.dtype, info.tier) if info.tier else shard.contiguous()
            shard = apart.copy_(shard)
        return nn.Parameter(shard)

    def _shard_view(self, info: TensorInfo) -> Tensor:
        """This rank's part of its storage shard under the optimizer spec."""
        view = self.rt.params[info.name]
        stored, updated = (local_slices(info.shape, spec, self.comm, info.name) for spec in (info.spec, info.opt_spec))
        for dim in refinement(info.spec, info.opt_spec, info.name):
            view = view.narrow(dim, updated[dim].start - stored[dim].start, updated[dim].stop - updated[dim].start)
        axes = run_axes(info.shape, info.opt_spec)
        return view if axes == run_axes(info.shape, info.spec) else run_view(view, self.comm, info.shape, info.opt_spec)

    def _cuts(self, info: TensorInfo) -> list[Cut]:
        """Where this rank's part of every microbatch lies in the whole batch's leaf."""
        whole = local_slices(info.shape, info.spec, self.comm, f"input {info.name}")
        if info.batch_dim is None:
            return [whole] * self.microbatches
        dim, size = info.batch_dim, info.shape[info.batch_dim]
        return [
            (*whole[:dim], slice(whole[dim].start + m * size, whole[dim].stop + m * size), *whole[dim + 1 :])
            for m in range(self.microbatches)
        ]


Inputs = Callable[[Stage, int], list[Tensor]]
"""A stage's part of a microbatch's leaves."""


def inputs_of(batch: Sequence[Tensor]) -> Inputs:
    """Parts of a global batch."""
    return lambda stage, microbatch: stage.inputs(batch, microbatch)
