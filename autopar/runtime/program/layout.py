"""A spec as the runtime sees it: per tensor dim the tuple of mesh axes that shard it, major first. () is replicated.

With mesh dp=2, tp=2 a (8, 6) parameter under (("dp", "tp"), ()) is stored as (2, 6) shards; rank (dp=1, tp=0) holds
rows 4 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.comm import Comm
from ..comm.mesh import SpecDims, box_of
from ..errors import RuntimeProgramError


def spec_dims(spec: Sequence[Sequence[str] | str]) -> SpecDims:
    """Any nesting of lists and tuples (JSON has only lists) as tuples."""
    return tuple((dim,) if isinstance(dim, str) else tuple(dim) for dim in spec)


def local_slices(shape: Sequence[int], spec: SpecDims, comm: Comm, what: str = "tensor") -> tuple[slice, ...]:
    """Where the calling rank's shard lies in the full tensor."""
    return tuple(slice(start, stop) for start, stop in box_of(shape, spec, comm.mesh, comm.position, what))


def local_shape(shape: Sequence[int], spec: SpecDims, comm: Comm, what: str = "tensor") -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in local_slices(shape, spec, comm, what))


def local_view(full: Tensor, spec: SpecDims, comm: Comm, what: str = "tensor") -> Tensor:
    """The calling rank's shard, a view of the full tensor."""
    return full[local_slices(full.shape, spec, comm, what)] if full.dim() else full


def gather_full(x: Tensor, spec: SpecDims, comm: Comm, site: str = "") -> Tensor:
    """The full tensor on every rank's device. x: this rank's part, which may lie on the host."""
    x = x.to(comm.device)
    for dim, axes in enumerate(spec):
        x = comm.all_gather(x, dim, axes, site=site)
    return x


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise RuntimeProgramError(f"{name!r} is no dtype")
    return dtype


def refinement(spec: SpecDims, finer: SpecDims, what: str) -> Mapping[int, tuple[str, ...]]:
    """dim -> the axes that `finer` appends to `spec`. Raises when it is no refinement."""
    added = {}
    for dim, (axes, more) in enumerate(zip(spec, finer, strict=True)):
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
        self.narrow = dtype or dtype_of(row["narrow"]) if "narrow" in row else None
        self.index = int(row.get("index", 0))
        self.batch_dim: int | None = row.get("batch_dim")
        self.join: tuple[str, int, int] = tuple(row.get("join", ("same", 0, 1)))

    @property
    def stored_as(self) -> tuple[object, ...]:
        """The facts that say how a parameter and its optimizer's state rest."""
        return (self.shape, self.dtype, self.spec, self.opt_spec, self.trainable, self.tier, self.optimizer_tier)


class StateEntry:
    """One value of a checkpoint: the local part, the global shape, and how it lies on the mesh of a stage."""

    __slots__ = ("comm", "shape", "spec", "value")

    def __init__(self, value: Any, shape: tuple[int, ...], spec: SpecDims, comm: Comm) -> None:
        self.value = value
        self.shape = shape
        self.spec = spec
        self.comm = comm
