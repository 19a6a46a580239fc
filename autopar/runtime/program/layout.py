"""A spec as the runtime sees it: per tensor dim the tuple of mesh axes that shard it, major first. () is replicated.

A spec with one entry more is a run of elements (`autopar/runtime/comm/mesh.py`).

With mesh dp=2, tp=2 a (8, 6) parameter under (("dp", "tp"), ()) is stored as (2, 6) shards; rank (dp=1, tp=0) holds
rows 4 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.comm import Comm
from ..comm.mesh import (
    SpecDims,
    box_of,
    cut_by_shares,
    held_shape,
    is_elsewhere,
    owner_index,
    run_axes,
    run_shape,
    slices_of,
)
from ..comm.reshard import TableStep, run_step
from ..errors import RuntimeProgramError


def spec_dims(spec: Sequence[Sequence[str] | str]) -> SpecDims:
    """Any nesting of lists and tuples (JSON has only lists) as tuples."""
    return tuple((dim,) if isinstance(dim, str) else tuple(dim) for dim in spec)


def local_slices(shape: Sequence[int], spec: SpecDims, comm: Comm, what: str = "tensor") -> tuple[slice, ...]:
    """Where the calling rank's shard lies in the full tensor, or the block whose run it is."""
    return slices_of(box_of(shape, spec, comm.mesh, comm.position, what))


def local_shape(shape: Sequence[int], spec: SpecDims, comm: Comm, what: str = "tensor") -> tuple[int, ...]:
    return held_shape(shape, spec, comm.mesh, comm.position, what)


def holds(shape: Sequence[int], spec: SpecDims, comm: Comm) -> bool:
    """Whether the calling rank has a part of a tensor: of a block that one rank has whole, that is its owner alone."""
    return not is_elsewhere(shape, spec, comm.mesh, comm.position)


def local_view(full: Tensor, spec: SpecDims, comm: Comm, what: str = "tensor") -> Tensor:
    """The calling rank's shard, a view of the full tensor where it is no run that is filled up."""
    block = full[local_slices(full.shape, spec, comm, what)] if full.dim() else full
    return run_view(block, comm, full.shape, spec)


def run_view(block: Tensor, comm: Comm, shape: Sequence[int], spec: SpecDims) -> Tensor:
    """The calling rank's run of a block, a view of it where the block is contiguous and its elements divide, else a copy; the
    block itself where it is not cut, and none of it where another rank owns it. shape, spec: of the full tensor."""
    axes = run_axes(shape, spec)
    if not axes or owner_index(shape, spec) is not None:
        return block if holds(shape, spec, comm) else block[:0]
    parts, index = comm.axis_size(axes), comm.axis_index(axes)
    length, *ones = run_shape(block.shape, parts)
    own = block.reshape(-1)[index * length : (index + 1) * length]
    if block.numel() == length * parts and block.is_contiguous():
        return own.view(length, *ones)
    run = block.new_zeros(length, *ones)
    run.view(-1)[: len(own)].copy_(own)
    return run


def fill(local: Tensor, parts: Sequence[Tensor]) -> None:
    """Put the parts that a rank holds of a tensor (`boxes_of`) into its shard."""
    if len(parts) == 1 and parts[0].shape == local.shape:
        local.copy_(parts[0])
        return
    flat, start = local.view(-1), 0
    for part in parts:
        flat[start : start + part.numel()].copy_(part.reshape(-1))
        start += part.numel()
    flat[start:].zero_()


def gather_full(x: Tensor, spec: SpecDims, comm: Comm, site: str = "", shape: Sequence[int] = ()) -> Tensor:
    """The full tensor on every rank's device. x: this rank's part, which may lie on the host; shape: of the full tensor, where x
    may be a run."""
    x = x.to(comm.device)
    owner, axes = owner_index(shape or x.shape, spec), run_axes(shape or x.shape, spec)
    if owner is not None:
        x = run_step(comm, x, ("broadcast", axes, owner, *local_shape(shape, spec[: len(shape)], comm)), site)
    elif axes:
        x = run_step(comm, comm.all_gather(x, 0, axes, site=site), _unflatten(shape, spec, comm))
    for dim, axes in enumerate(spec[: x.dim()]):
        x = gather_dim(x, dim, axes, comm, site, shape[dim] if shape else None)
    return x


def gather_dim(x: Tensor, dim: int, axes: tuple[str, ...], comm: Comm, site: str, size: int | None) -> Tensor:
    """The whole dim, which has this size: of axes along which ranks hold unequal blocks, one after the other."""
    if not cut_by_shares((axes,), comm.mesh):
        return comm.all_gather(x, dim, axes, site=site)
    if size is None:
        raise RuntimeProgramError(f"{site}: blocks of unequal size cannot be joined without the size of the whole")
    for place in reversed(range(len(axes))):
        x = comm.all_gather(x, dim, axes[place], comm.block_size(size, axes[:place]) if place else size, site=site)
    return x


def _unflatten(shape: Sequence[int], spec: SpecDims, comm: Comm) -> TableStep:
    """The step from all runs of a block to the block."""
    return ("unflatten", run_axes(shape, spec), *local_shape(shape, spec[:-1], comm))


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise RuntimeProgramError(f"{name!r} is no dtype")
    return dtype


def refinement(spec: SpecDims, finer: SpecDims, what: str) -> Mapping[int, tuple[str, ...]]:
    """dim -> the axes that `finer` appends to `spec`. Raises when it is no refinement."""
    added = {}
    for dim, (axes, more) in enumerate(zip(spec, finer, strict=False)):
        if more[: len(axes)] != axes:
            raise RuntimeProgramError(f"{what}: optimizer spec {finer} does not refine the storage spec {spec}")
        if len(more) > len(axes):
            added[dim] = more[len(axes) :]
    return added


class TensorInfo:
    """One row of a stage module's PARAMETERS, BUFFERS, INPUTS or OUTPUTS."""

    def __init__(self, name: str, row: Mapping[str, Any], dtype: torch.dtype | None = None) -> None:
        self.name = name
        self.shape = tuple(row["shape"])
        self.dtype = dtype_of(row["dtype"])
        if dtype is not None and self.dtype.is_floating_point:
            self.dtype = dtype
        self.spec: SpecDims = spec_dims(row["spec"])
        self.opt_spec: SpecDims = spec_dims(row.get("opt_spec") or row["spec"])
        self.trainable = bool(row.get("trainable", False))
        self.gather = tuple(tuple(step) for step in row.get("gather", ()))
        self.tier = str(row.get("tier", ""))
        self.optimizer_tier = str(row.get("optimizer_tier", ""))
        self.room = str(row.get("room", ""))
        self.narrow = dtype or dtype_of(row["narrow"]) if "narrow" in row else None
        self.index = int(row.get("index", 0))
        self.batch_dim: int | None = row.get("batch_dim")
        self.row_axes: tuple[str, ...] = tuple(row.get("row_axes", ()))
        self.join: tuple[str, int, int] = tuple(row.get("join", ("same", 0, 1)))

    @property
    def stored_as(self) -> tuple[object, ...]:
        """The facts that say how a parameter and its optimizer's state rest."""
        return (self.shape, self.dtype, self.spec, self.opt_spec, self.tier, self.optimizer_tier)


class StateEntry:
    """One value of a checkpoint: the local part, the global shape, and how it lies on the mesh of a stage."""

    __slots__ = ("comm", "shape", "spec", "value")

    def __init__(self, value: Any, shape: tuple[int, ...], spec: SpecDims, comm: Comm) -> None:
        self.value = value
        self.shape = shape
        self.spec = spec
        self.comm = comm


def full_of_holders(entry: StateEntry) -> Tensor:
    """The full tensor on every rank that holds a part of it."""
    owned = owner_index(entry.shape, entry.spec) is not None
    spec = entry.spec[: len(entry.shape)] if owned else entry.spec
    return gather_full(entry.value, spec, entry.comm, "state", entry.shape)


def of_owner(shape: Sequence[int], parameter: Sequence[int], spec: SpecDims) -> SpecDims:
    """How a tensor lies that is whole on the ranks that update a parameter of this spec: on its owner, or on all of them."""
    owned = bool(shape) and owner_index(parameter, spec) is not None
    return (*((),) * len(shape), *(spec[len(parameter) :] if owned else ()))
