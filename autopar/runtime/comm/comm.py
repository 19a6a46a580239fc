"""Collectives over the named axes of a mesh: one rank's view of it.

A collective names one axis or a tuple of axes, major first; its group is the grid of these axes that contains the
calling rank, and members are numbered major first in the order the axes are *named* (`("b", "a")` is not `("a", "b")`).
How ranks stand on a mesh is in mesh.py.

Two layers: functional calls for emitted code (new contiguous results, inputs untouched, axes of total size 1 return
the input itself), and `*_into` calls on contiguous buffers for the runtime's own buckets. `start_*` returns a Handle.
A Comm of all ranks gives those of the meshes of stages (`split`) and carries messages between any two ranks
(`start_messages`). A backend (threads.py, process.py) implements `_start` for a Call, `_post` for messages, and the split.
Who wants to know when messages start, are waited for and arrive watches (recorder.py).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..data.datafile import parse_json
from ..data.schema import Schema, SchemaError, anything
from ..errors import RuntimeProgramError
from .backends import backend_of
from .calls import Call, Handle, Message, Posted, Watcher
from .chunks import front_chunks, join_chunks
from .collectives import COLLECTIVES
from .hierarchical import TwoLevels
from .mesh import Group, cut, group_ranks, interval, mesh_index, mesh_size
from .reductions import REDUCTIONS

T = TypeVar("T")
Axes = str | tuple[str, ...]


class Comm(ABC):
    """One rank's view of a mesh: who it is, and how it talks to the others.

    rank counts in the whole job; the mesh has world_size ranks, the first of which is first_rank. in_order: messages
    have no tags, those of a pair of ranks are received in the order sent.
    """

    in_order = False

    def __init__(
        self, rank: int, mesh: Mapping[str, int], device: torch.device | str = "cpu", first_rank: int = 0
    ) -> None:
        self.rank = rank
        self.mesh: dict[str, int] = dict(mesh)
        self.device = torch.device(device)
        self.first_rank = first_rank
        self.world_size = mesh_size(self.mesh)
        if not first_rank <= rank < first_rank + self.world_size:
            raise RuntimeProgramError(
                f"rank {rank} is outside of the mesh {self.mesh} of {self.world_size} ranks"
                + (f" from rank {first_rank} on" if first_rank else "")
            )
        self.position = mesh_index(self.mesh, rank - first_rank)
        self.watcher: Watcher | None = None
        self._groups: dict[Axes, Group] = {}
        self._two_levels: dict[tuple[str, ...], TwoLevels] = {}
        self._parts: dict[tuple[Any, int], Comm | None] = {(tuple(self.mesh.items()), first_rank): self}

    # ---- geometry

    def group(self, axes: Axes) -> Group:
        group = self._groups.get(axes)
        if group is None:
            names = (axes,) if isinstance(axes, str) else tuple(axes)
            for name in names:
                if name not in self.mesh:
                    raise RuntimeProgramError(f"the mesh {self.mesh} has no axis {name!r}")
            if len(set(names)) != len(names):
                raise RuntimeProgramError(f"an axis is named twice in {names}")
            real = tuple(name for name in names if self.mesh[name] > 1)
            ranks = group_ranks(self.mesh, self.rank, real, self.first_rank)
            group = self._groups[axes] = Group(real, ranks, ranks.index(self.rank))
        return group

    def axis_size(self, axes: Axes) -> int:
        return self.group(axes).size

    def axis_index(self, axes: Axes) -> int:
        return self.group(axes).index

    def block_size(self, size: int, axes: Axes) -> int:
        """How much of a dim of this size this rank holds. Raises RuntimeProgramError where it does not divide."""
        start, stop = self._block(size, axes)
        return stop - start

    def block_start(self, size: int, axes: Axes) -> int:
        """Where what this rank holds of a dim of this size begins. Raises RuntimeProgramError where it does not divide."""
        return self._block(size, axes)[0]

    def _block(self, size: int, axes: Axes) -> tuple[int, int]:
        group = self.group(axes)
        block = interval(size, group.axes, self.mesh, self.position)
        if block is None:
            raise RuntimeProgramError(f"a dim of size {size} cannot be split over {group}")
        return block

    @property
    def waited_s(self) -> float:
        """Seconds for which this rank, or its device, waited for messages so far."""
        return 0.0

    def excused(self, why: str) -> AbstractContextManager[None]:
        """A context in which this rank may take its time, as files are slow: others wait, and nobody ends because of it."""
        return nullcontext()

    def describe_rank(self) -> str:
        place = ", ".join(f"{axis}={index}" for axis, index in self.position.items())
        first = f" from rank {self.first_rank} on" if self.first_rank else ""
        return f"rank {self.rank} of {self.world_size}{first} ({place})"

    # ---- functional collectives

    def all_reduce(self, x: Tensor, axes: Axes, op: str = "sum", site: str = "") -> Tensor:
        """The elementwise sum, max or min of every member's x."""
        return self.start_all_reduce(x, axes, op, site).wait()

    def all_gather(self, x: Tensor, dim: int, axes: Axes, whole: int | None = None, site: str = "") -> Tensor:
        """Every member's x, joined along dim in member order. whole: size of dim after it, where members' may differ."""
        return self.start_all_gather(x, dim, axes, whole, site).wait()

    def reduce_scatter(self, x: Tensor, dim: int, axes: Axes, op: str = "sum", site: str = "") -> Tensor:
        """This member's chunk along dim of the reduced x."""
        return self.start_reduce_scatter(x, dim, axes, op, site).wait()

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int, axes: Axes, site: str = "") -> Tensor:
        """Whole along concat_dim, a chunk along split_dim; x is the other way round."""
        return self.start_all_to_all(x, split_dim, concat_dim, axes, site).wait()

    def broadcast(self, x: Tensor, axes: Axes, index: int = 0, site: str = "") -> Tensor:
        """Member `index`'s x on every member (the others' x gives shape and dtype only)."""
        return self.start_broadcast(x, axes, index, site).wait()

    def reduce(self, x: Tensor, axes: Axes, index: int = 0, op: str = "sum", site: str = "") -> Tensor:
        """The elementwise sum, max or min of every member's x on member `index`; what others get counts for nothing."""
        if self.group(axes).size == 1:
            return x
        return self.start_reduce_into(x.contiguous().clone(), axes, index, op, site).wait()

    def barrier(self, axes: Axes | None = None, site: str = "") -> None:
        """Return when every member (by default, every rank) has come here: the host waits for it, also where messages are
        waited for by streams."""
        group = self.group(tuple(self.mesh) if axes is None else axes)
        if group.size > 1:
            token = torch.zeros(1, device=self.device)
            self._start(Call("all_reduce", group, token, token, "sum", site=site or "barrier"))()
            backend_of(self.device).catch_up(self.device)

    def start_maximum(self, numbers: Tensor, site: str) -> Callable[[], None]:
        """Begin to make these, in place, the largest of all ranks; what waits for it. No message of the program: nobody who
        watches is told."""
        return self._start(Call("all_reduce", self.group(tuple(self.mesh)), numbers, numbers, "max", site=site))

    def shard(self, x: Tensor, dim: int, axes: Axes) -> Tensor:
        """This member's chunk of x along dim; nothing is sent."""
        group = self.group(axes)
        if group.size == 1:
            return x
        dim = self._check_dim(x, dim, "shard")
        start, stop = self._block(x.shape[dim], axes)
        return x.narrow(dim, start, stop - start).contiguous()

    def start_all_reduce(self, x: Tensor, axes: Axes, op: str = "sum", site: str = "") -> Handle[Tensor]:
        group = self.group(axes)
        if group.size == 1:
            return Handle(None, x)
        x = x.contiguous()
        out = torch.empty_like(x)
        return self.start(Call("all_reduce", group, out, x, op, site=site), out)

    def start_all_gather(
        self, x: Tensor, dim: int, axes: Axes, whole: int | None = None, site: str = ""
    ) -> Handle[Tensor]:
        group = self.group(axes)
        if group.size == 1:
            return Handle(None, x)
        dim = self._check_dim(x, dim, "all_gather")
        lengths = None if whole is None or len(group.axes) > 1 else cut(whole, self.mesh[group.axes[0]])
        if isinstance(lengths, tuple):
            return self._start_uneven_gather(x, dim, axes, lengths, site)
        out = x.new_empty((group.size, *x.shape))
        handle = self.start(Call("all_gather", group, out, x.contiguous(), site=site), out)
        return handle.then(lambda chunks: join_chunks(chunks, dim))

    def _start_uneven_gather(
        self, x: Tensor, dim: int, axes: Axes, lengths: tuple[int, ...], site: str
    ) -> Handle[Tensor]:
        """Blocks are sent as long as the longest of them, and what fills them up is left out again."""
        longest, group = max(lengths), self.group(axes)
        filled = x.new_zeros((longest, *x.movedim(dim, 0).shape[1:]))
        filled[: x.shape[dim]].copy_(x.movedim(dim, 0))
        out = x.new_empty((group.size, *filled.shape))

        def joined(chunks: Tensor) -> Tensor:
            whole, start = x.new_empty((sum(lengths), *filled.shape[1:])), 0
            for place, length in enumerate(lengths):
                whole[start : start + length].copy_(chunks[place][:length])
                start += length
            return whole.movedim(0, dim).contiguous()

        return self.start(Call("all_gather", group, out, filled, site=site), out).then(joined)

    def start_reduce_scatter(self, x: Tensor, dim: int, axes: Axes, op: str = "sum", site: str = "") -> Handle[Tensor]:
        group = self.group(axes)
        if group.size == 1:
            return Handle(None, x)
        dim = self._check_split(x, dim, group, "reduce_scatter", site)
        chunks = front_chunks(x, dim, group.size).contiguous()
        out = x.new_empty(chunks.shape[1:])
        return self.start(Call("reduce_scatter", group, out, chunks, op, site=site), out)

    def start_all_to_all(
        self, x: Tensor, split_dim: int, concat_dim: int, axes: Axes, site: str = ""
    ) -> Handle[Tensor]:
        group = self.group(axes)
        if group.size == 1:
            return Handle(None, x)
        concat_dim = self._check_dim(x, concat_dim, "all_to_all")
        chunks = front_chunks(x, self._check_split(x, split_dim, group, "all_to_all", site), group.size).contiguous()
        out = torch.empty_like(chunks)
        handle = self.start(Call("all_to_all", group, out, chunks, site=site), out)
        return handle.then(lambda received: join_chunks(received, concat_dim))

    def start_broadcast(self, x: Tensor, axes: Axes, index: int = 0, site: str = "") -> Handle[Tensor]:
        group = self.group(axes)
        if group.size == 1:
            return Handle(None, x)
        x = x.contiguous()
        out = torch.empty_like(x)
        return self.start(Call("broadcast", group, out, x, root=index, site=site), out)

    def start_shift(self, x: Tensor, axes: Axes, by: int = 1, site: str = "") -> Handle[Tensor]:
        """The x of the member `by` places before this one, counted round and round."""
        group = self.group(axes)
        if by % group.size == 0:
            return Handle(None, x)
        x = x.contiguous()
        out = torch.empty_like(x)
        return self.start(Call("shift", group, out, x, root=by % group.size, site=site), out)

    def start_exchange(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], axes: Axes, site: str = ""
    ) -> Handle[Tensor]:
        """Rows by member: `sent[m]` of them go to member m, in the result `received[m]` come from there."""
        group = self.group(axes)
        if group.size == 1:
            return Handle(None, rows)
        if len(sent) != group.size or len(received) != group.size or sum(sent) != len(rows):
            raise RuntimeProgramError(
                f"exchange of {len(rows)} rows: {list(sent)} to and {list(received)} from the members of {group}"
            )
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        call = Call("exchange", group, out, rows.contiguous(), site=site, sent=tuple(sent), received=tuple(received))
        return self.start(call, out)

    # ---- collectives into given contiguous buffers

    def start_all_reduce_into(self, buffer: Tensor, axes: Axes, op: str = "sum", site: str = "") -> Handle[Tensor]:
        """Reduce `buffer` in place."""
        group = self.group(axes)
        if group.size == 1:
            return Handle(None, buffer)
        return self.start(Call("all_reduce", group, buffer, buffer, op, site=site), buffer)

    def start_reduce_into(
        self, buffer: Tensor, axes: Axes, index: int, op: str = "sum", site: str = ""
    ) -> Handle[Tensor]:
        """Reduce `buffer` in place on member `index`; on others it may be written to."""
        group = self.group(axes)
        return self.start(Call("reduce", group, buffer, buffer, op, root=index, site=site), buffer)

    def start_broadcast_into(self, buffer: Tensor, axes: Axes, index: int, site: str = "") -> Handle[Tensor]:
        """Make `buffer`, in place, that of member `index`."""
        return self.start(Call("broadcast", self.group(axes), buffer, buffer, root=index, site=site), buffer)

    def start_all_gather_into(self, out: Tensor, x: Tensor, axes: Axes, site: str = "") -> Handle[Tensor]:
        """out: (n, *x.shape); x may be its own row of out."""
        group = self.group(axes)
        return self.start(Call("all_gather", group, out, x, site=site), out)

    def start_reduce_scatter_into(
        self, out: Tensor, x: Tensor, axes: Axes, op: str = "sum", site: str = ""
    ) -> Handle[Tensor]:
        """x: (n, *out.shape), untouched, must not change before the wait."""
        group = self.group(axes)
        return self.start(Call("reduce_scatter", group, out, x, op, site=site), out)

    def start_messages(self, messages: Sequence[Message]) -> list[Posted]:
        """Start sends and receives together, between any ranks of the job. Buffers stay as they are until the wait."""
        posted = self._post(messages)
        return posted if self.watcher is None else self.watcher.posted(messages, posted)

    def watch(self, watcher: Watcher | None) -> None:
        """Tell it, or from now on nobody, of all that this Comm and its parts start."""
        for part in self._parts.values():
            if part is not None:
                part.watcher = watcher

    # ---- the backend's part

    @abstractmethod
    def _start(self, call: Call) -> Callable[[], None]:
        """Start the call; the returned function waits for it. The group has at least two members."""

    @abstractmethod
    def _post(self, messages: Sequence[Message]) -> list[Posted]:
        """Start the messages."""

    def split(self, meshes: Sequence[tuple[Mapping[str, int], int]]) -> list[Comm | None]:
        """The Comm of every (mesh, first rank), None where this rank is outside. All ranks call it alike."""
        parts = []
        for mesh, first_rank in meshes:
            key = (tuple(mesh.items()), first_rank)
            if key not in self._parts:
                inside = first_rank <= self.rank < first_rank + mesh_size(mesh)
                self._parts[key] = self._part(mesh, first_rank, inside)
            parts.append(self._parts[key])
        return parts

    def under(self, mesh: Mapping[str, int]) -> Comm:
        """The same ranks on the same mesh, cut by other shares. Groups and what is known of messages are those of this one."""
        if dict(mesh) == self.mesh:
            return self
        key = (tuple(mesh.items()), self.first_rank)
        if self._parts.get(key) is None:
            other = self._parts[key] = copy(self)
            other.mesh = dict(mesh)
        found = self._parts[key]
        assert found is not None
        return found

    @abstractmethod
    def _part(self, mesh: Mapping[str, int], first_rank: int, inside: bool) -> Comm | None:
        """Make the Comm of a part, None where this rank is not inside. Every rank makes every part, in the same order."""

    def machines(self) -> list[str] | None:
        """The machine of every rank of the job, by name; None where ranks are as they are said to be. All ranks call it."""
        return None

    def new_group(self, ranks: tuple[int, ...]) -> Any:
        """The backend's object for a group of the job's ranks beside those of axes. All ranks call it alike."""
        return None

    def go_by_node(self, levels: TwoLevels, inside: Any, between: Any) -> None:
        """Collectives of a group go by node where `levels` takes them. inside, between: what `new_group` gave for these."""
        self._two_levels[levels.group.axes] = levels

    def two_levels(self, call: Call) -> TwoLevels | None:
        """How the call goes by node; None where it goes flat."""
        levels = self._two_levels.get(call.group.axes)
        return levels if levels is not None and levels.takes(call) else None

    def at(self, step: int, action: str) -> None:
        """Note the step and the action that this rank runs, for whoever asks."""
        return

    def release(self) -> None:
        """A step is over: let go of the memory that messages have used."""
        return

    def share(self, value: T, schema: Schema[T] = anything) -> list[T]:
        """Every rank's small value, by rank: plain data (numbers, text, lists, tables by name, None), read as the schema has it.
        All ranks of a Comm that is no part of a split call it. Raises RuntimeProgramError."""
        everyone = list[T]()
        for rank, told in enumerate(self._tell(json.dumps(value, allow_nan=False)), self.first_rank):
            try:
                everyone.append(schema(parse_json(told), ""))
            except SchemaError as error:
                raise RuntimeProgramError(
                    f"rank {rank} tells the others what they do not understand ({error}); copy the directory of the program to "
                    "every machine whole, and run one version of torch"
                ) from error
        return everyone

    @abstractmethod
    def _tell(self, text: str) -> list[str]:
        """Every rank's text, by rank."""

    def start(self, call: Call, result: Tensor) -> Handle[Tensor]:
        """Start any collective on contiguous buffers. result: what waiting for it gives. Raises RuntimeProgramError."""
        if COLLECTIVES[call.kind].reduces and call.op not in REDUCTIONS:
            raise RuntimeProgramError(f"{call.describe()}: unknown reduction {call.op!r}; use sum, max or min")
        wait = self._start(call)
        if self.watcher is not None:
            wait = self.watcher.collective(call, wait)

        def finish() -> Tensor:
            wait()
            return result

        return Handle(finish)

    # ---- small print

    def _check_dim(self, x: Tensor, dim: int, what: str) -> int:
        if not -x.dim() <= dim < x.dim():
            raise RuntimeProgramError(f"{what} along dim {dim} of a tensor of shape {tuple(x.shape)}")
        return dim % x.dim()

    def _check_split(self, x: Tensor, dim: int, group: Group, what: str, site: str = "") -> int:
        dim = self._check_dim(x, dim, what)
        if x.shape[dim] % group.size:
            where = f" at {site}" if site else ""
            raise RuntimeProgramError(
                f"{what}{where}: dim {dim} of shape {tuple(x.shape)} cannot be split over {group}"
            )
        return dim
