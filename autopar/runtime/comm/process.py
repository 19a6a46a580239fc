"""Ranks as processes over torch.distributed: NCCL between GPUs, Gloo between CPUs.

Groups are created once, in the same order on every rank, one per set of mesh axes that is larger than one, for the mesh
of all ranks and for those of stages. torch sorts the ranks of a group, so a group named in another axis order shares
the process group and is addressed by member. Messages between ranks go through the group of all.

NCCL has every collective; some of Gloo's are built from messages (gloo.py), and large ones among several nodes go by node
(hierarchical.py), on process groups of their own and brought on by a thread. Which of them a group has is asked of the group
(`group_transports`), and what there is to know of it stands in its row (backends.py).

When a collective fails or times out, ranks leave a note in the job's store, so that each error says what the other
ranks of the group were doing.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..data.datafile import parse_json
from ..data.schema import MOST_RANKS, integer, listed, paragraph, row
from ..errors import CollectiveMismatch, CollectiveTimeout, RuntimeProgramError
from ..health.flight import Flight
from ..health.notes import Notes
from ..health.stream_waits import StreamWaits
from . import collectives, gloo
from .backends import backend_of, present_backend, transport_named
from .buffers import BufferPool
from .calls import Call, Message, Posted
from .collectives import COLLECTIVES, as_bytes
from .comm import Comm
from .hierarchical import Courier, TwoLevels, phases
from .mesh import Group, group_ranks, mesh_size
from .text_exchange import tell_all

_CALL = row(paragraph(), listed(integer(0, MOST_RANKS)), paragraph())
MESSAGE_TAG = 1 << 28
FAILED, TIMED_OUT = "failed in", "timed out in"
_START = {"send": dist.isend, "recv": dist.irecv}


class _Job:
    """State that the Comms of one process share: process groups by their ranks, scratch buffers, notes, the message group."""

    def __init__(self, timeout_s: float, store: dist.Store | None) -> None:
        self.timeout_s = timeout_s
        self.pool = BufferPool()
        self.courier = Courier()
        self.notes = Notes(store, dist.get_rank(), timeout_s)
        self.flight = Flight(dist.get_rank(), dist.get_world_size())
        self._groups: dict[tuple[int, ...], Any] = {}

    def groups(self, mesh: Mapping[str, int], first_rank: int) -> dict[frozenset[str], Any]:
        """One process group per set of axes, for the instance of it that this rank is in. Every rank makes all."""
        axes = [axis for axis, size in mesh.items() if size > 1]
        ranks = range(first_rank, first_rank + mesh_size(mesh))
        own_groups: dict[frozenset[str], Any] = {}
        for count in range(1, len(axes) + 1):
            for names in itertools.combinations(axes, count):
                for members in dict.fromkeys(group_ranks(mesh, rank, names, first_rank) for rank in ranks):
                    if members not in self._groups:
                        timeout = timedelta(seconds=self.timeout_s)
                        self._groups[members] = dist.new_group(list(members), timeout=timeout)
                    if dist.get_rank() in members:
                        own_groups[frozenset(names)] = self._groups[members]
        return own_groups


class _Work(Posted):
    """A message under way in torch.distributed."""

    __slots__ = ("_comm", "_entry", "_message", "_work")

    def __init__(self, comm: TorchComm, work: Any, message: Message) -> None:
        self._comm = comm
        self._work = work
        self._message = message
        ends = (comm.rank, message.peer) if message.kind == "send" else (message.peer, comm.rank)
        way = f"messages {ends[0]} to {ends[1]}"
        flight = comm.flight
        number, signature = flight.started.get(way, -1) + 1, (*message.signature(), message.site)
        self._entry = flight.start(number, way, ends, signature, message.__str__, (message.kind, message.peer))

    def wait(self) -> None:
        self._comm.flight.wait(self._entry)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._comm.explain(error, str(self._message), None, 0) from error
        self._comm.flight.end(self._entry)

    def done(self) -> bool:
        return bool(self._work.is_completed())


def group_transports() -> dict[str, str]:
    """The backends of the default process group by the type of device: {"cpu": "gloo", "cuda": "nccl"}."""
    return dict(pair.split(":") for pair in dist.get_backend_config().split(","))


def group_device() -> torch.device:
    """The device that this rank computes on in a process group that somebody made: one with memory of its own where the group
    has a backend for those. Warns of devices that a group of the processors' backend alone leaves unused."""
    made = group_transports()
    host, row = backend_of(torch.device("cpu")), present_backend()
    if made.get(row.device_type, host.transport.name) != host.transport.name:
        return row.current()
    if not row.is_host:
        warnings.warn(
            f"the process group sends through {host.transport.name} alone ({dist.get_backend_config()}), so the program computes "
            f"on the processors, and {row.count()} {row.device_type} devices are unused; make the group with "
            f"init_process_group({row.transport.name!r}), or leave making it to autopar_runtime",
            RuntimeWarning,
            stacklevel=3,
        )
    return host.current()


class TorchComm(Comm):
    """One rank of an initialized default process group whose size is the mesh's, or of a part of it (`split`)."""

    def __init__(
        self,
        mesh: Mapping[str, int],
        device: torch.device | str | None = None,
        timeout_s: float = 600.0,
        *,
        store: dist.Store | None = None,
        check: bool = False,
        whole: TorchComm | None = None,
        first_rank: int = 0,
    ) -> None:
        """store: where failing ranks leave notes for each other. check: compare every collective before it starts,
        so that a mismatch is an error instead of a timeout (slow, for debugging). whole, first_rank: see split."""
        size, wanted = dist.get_world_size(), mesh_size(mesh)
        if whole is None and size != wanted:
            raise RuntimeProgramError(f"the program needs {wanted} ranks ({dict(mesh)}), the process group has {size}")
        super().__init__(dist.get_rank(), mesh, group_device() if device is None else device, first_rank)
        made = group_transports()
        if self.device.type not in made:
            raise RuntimeProgramError(
                f"the process group has no backend for {self.device.type} devices ({dist.get_backend_config()}); make it with "
                f"init_process_group({backend_of(self.device).transport.name!r})"
            )
        self.transport = transport_named(made[self.device.type])
        self.in_order = self.transport.in_order
        self.gloo = not self.in_order
        self.timeout_s = timeout_s
        self._job: _Job = whole._job if whole is not None else _Job(timeout_s + self.transport.patience_s, store)
        row = backend_of(self.device)
        if not row.is_host and whole is None:
            own = self.device if self.device.index is not None else row.current()
            self.flight.stream = StreamWaits(row, partial(row.module.set_device, own))
        self._check = check
        self._counts: dict[frozenset[str], int] = {}
        self._labels: dict[tuple[str, ...], str] = {}
        self._device_meshes: dict[tuple[tuple[str, ...], str], DeviceMesh] = {}
        self._process_groups = self._job.groups(mesh, first_rank)
        everyone = frozenset(axis for axis, size in mesh.items() if size > 1)
        self._message_group: Any = whole._message_group if whole is not None else self._process_groups.get(everyone)

    def _part(self, mesh: Mapping[str, int], first_rank: int, inside: bool) -> Comm | None:
        if not inside:
            self._job.groups(mesh, first_rank)
            return None
        part = TorchComm(mesh, self.device, self.timeout_s, check=self._check, whole=self, first_rank=first_rank)
        part.gloo, part.in_order = self.gloo, self.in_order
        return part

    def device_mesh(self, order: tuple[str, ...], device_type: str = "") -> DeviceMesh:
        """torch's mesh of these ranks with the axes (those larger than one) in this order. device_type: of tensors that are
        described and not sent, where they lie elsewhere than on the rank's device."""
        key = order, device_type or self.device.type
        device_mesh = self._device_meshes.get(key)
        if device_mesh is None:
            axes = list(self.mesh)
            ranks = torch.arange(self.first_rank, self.first_rank + self.world_size)
            ranks = ranks.reshape([self.mesh[axis] for axis in axes])
            ranks = ranks.permute([*map(axes.index, order), *(i for i, a in enumerate(axes) if a not in order)])
            ranks = ranks.reshape([self.mesh[axis] for axis in order]).contiguous()
            groups = [self._process_groups[frozenset((axis,))] for axis in order]
            device_mesh = DeviceMesh.from_group(groups, key[1], mesh=ranks, mesh_dim_names=order)
            self._device_meshes[key] = device_mesh
        return device_mesh

    def machines(self) -> list[str] | None:
        """torchrun numbers machines; else they are told apart by their hosts' names."""
        return [str(name) for name in self.share(f"{os.environ.get('GROUP_RANK', '')}@{socket.gethostname()}")]

    def new_group(self, ranks: tuple[int, ...]) -> Any:
        return dist.new_group(list(ranks), timeout=timedelta(seconds=self._job.timeout_s))

    def go_by_node(self, levels: TwoLevels, inside: Any, between: Any) -> None:
        super().go_by_node(levels, inside, between)
        for group, made in ((levels.inside, inside), (levels.between, between)):
            self._process_groups[frozenset(group.axes)] = made

    def _tell(self, text: str) -> list[str]:
        if self.world_size == 1:
            return [text]
        flight, what = self.flight, "values that all ranks tell each other"
        ranks = tuple(range(self.first_rank, self.first_rank + self.world_size))
        entry = flight.start(flight.started.get(what, -1) + 1, what, ranks, (what,), what.__str__)
        flight.wait(entry)
        try:
            everyone = tell_all(text, self._message_group, self.device)
        except RuntimeError as error:
            raise self.explain(error, what, None, 0) from error
        flight.end(entry)
        return everyone

    # ---- collectives

    def _start(self, call: Call) -> Callable[[], None]:
        key = frozenset(call.group.axes)
        number = self._counts[key] = self._counts.get(key, -1) + 1
        flight, signature = self._job.flight, (*call.signature(), call.site)
        self._job.notes.last = (number, call.group, call.kind, call.site)
        entry = flight.start(number, self._label(call.group), call.group.ranks, signature, call.describe)
        try:
            if self._check:
                self._compare(call, number)
            with flight.connects(entry):
                wait = self._start_gloo(call, number) if self.gloo else self._start_nccl(call)
        except RuntimeError as error:
            raise self.explain(error, call.describe(), call.group, number) from error

        def guarded() -> None:
            flight.wait(entry)
            try:
                wait()
            except RuntimeError as error:
                raise self.explain(error, call.describe(), call.group, number) from error
            flight.end(entry)

        return guarded

    def _label(self, group: Group) -> str:
        """A group's name, the same on all its ranks."""
        label = self._labels.get(group.axes)
        if label is None:
            ranks = ", ".join(map(str, group.ranks[:4])) + (f", … {group.ranks[-1]}" if group.size > 4 else "")
            label = self._labels[group.axes] = f"{'×'.join(group.axes)} ({ranks})"
        return label

    @property
    def flight(self) -> Flight:
        """The record of this process's last messages."""
        return self._job.flight

    @property
    def waited_s(self) -> float:
        return self.flight.waited_s

    def excused(self, why: str) -> AbstractContextManager[None]:
        return self.flight.excused(why)

    def at(self, step: int, action: str) -> None:
        if step != self._job.flight.step:
            self._job.flight.begin_step(step)
        self._job.flight.action = action

    def _order(self, group: Group) -> Tensor | None:
        """member -> its place among the sorted ranks, when the two orders differ."""
        if list(group.ranks) == sorted(group.ranks):
            return None
        place = {rank: index for index, rank in enumerate(sorted(group.ranks))}
        return torch.tensor([place[rank] for rank in group.ranks], device=self.device)

    def _start_gloo(self, call: Call, number: int) -> Callable[[], None]:
        levels, courier = self.two_levels(call), self._job.courier
        if levels is not None:
            return courier.send(phases(call, levels, courier.pool), self._start_phase)
        return self._start_on_group(call, number, self._job.pool)

    def _start_phase(self, call: Call) -> Callable[[], None]:
        """A part of a call that goes by node; the courier's thread alone starts these."""
        key = frozenset(call.group.axes)
        self._counts[key] = self._counts.get(key, -1) + 1
        return self._start_on_group(call, self._counts[key], self._job.courier.pool)

    def _start_on_group(self, call: Call, number: int, pool: BufferPool) -> Callable[[], None]:
        group = self._process_groups[frozenset(call.group.axes)]
        return gloo.start(call, number, group, pool) or self._start_native(call)

    def _start_nccl(self, call: Call) -> Callable[[], None]:
        as_torch_has_them = COLLECTIVES[call.kind].by_rank or self._order(call.group) is None
        return self._start_native(call) if as_torch_has_them else self._start_reordered(call)

    def _start_native(self, call: Call) -> Callable[[], None]:
        return collectives.start(call, self._process_groups[frozenset(call.group.axes)], self.transport)

    def _start_reordered(self, call: Call) -> Callable[[], None]:
        """Members named in another order than their ranks: permute rows before or after."""
        order, row = self._order(call.group), COLLECTIVES[call.kind]
        assert order is not None
        if not row.fixed:
            raise RuntimeProgramError(f"{call.describe()} over {call.group}: name its axes in the order of the mesh")
        back = torch.argsort(order)
        inp, out = call.inp, call.out
        if row.rows_in:
            inp = inp[back]
        if row.rows_out:
            out = torch.empty_like(out)
        arrive = self._start_native(Call(call.kind, call.group, out, inp, call.op, call.root, call.site))

        def wait() -> None:
            arrive()
            if out is not call.out:
                call.out.copy_(out[order])

        return wait

    # ---- point to point

    def _post(self, messages: Sequence[Message]) -> list[Posted]:
        """Post messages: without tags (NCCL), sends and receives that meet go out as one; each pair's must be in the
        same order."""
        if not messages:
            return []
        group = self._message_group
        works: list[Any]
        buffers = [m.buffer if self.transport.takes(m.buffer.dtype) else as_bytes(m.buffer) for m in messages]
        pairs = list(zip(messages, buffers, strict=True))
        try:
            if self.in_order:
                works = dist.batch_isend_irecv([dist.P2POp(_START[m.kind], x, m.peer, group) for m, x in pairs])
                works = works if len(works) == len(messages) else works[:1] * len(messages)
            else:
                works = [_START[m.kind](x, m.peer, group=group, tag=MESSAGE_TAG + m.tag) for m, x in pairs]
        except RuntimeError as error:
            raise self.explain(error, "; ".join(map(str, messages)), None, 0) from error
        return [_Work(self, work, message) for work, message in zip(works, messages, strict=True)]

    # ---- when things go wrong

    def _compare(self, call: Call, number: int) -> None:
        """Every member's description of the call, exchanged through its process group."""
        group = self._process_groups[frozenset(call.group.axes)]
        own = (str(call.signature()), list(call.group.ranks), call.describe())
        everyone = tell_all(json.dumps(own), group, self.device)
        for rank, told in zip(sorted(call.group.ranks), everyone, strict=True):
            signature, ranks, description = _CALL(parse_json(told), f"what rank {rank} calls")
            if signature != own[0] or ranks != own[1]:
                raise CollectiveMismatch(
                    f"collective #{number} over {call.group}: rank {self.rank} calls {call.describe()}, "
                    f"rank {rank} calls {description} over ranks {ranks}"
                )

    def explain(self, error: RuntimeError, what: str, group: Group | None, number: int) -> RuntimeError:
        """The error with rank, group, place and what other ranks were doing."""
        if isinstance(error, RuntimeProgramError):
            return error
        self.flight.fail()
        where = f"#{number} over {group}: {what}" if group is not None else what
        first = str(error).splitlines()[0]
        notes = self._job.notes
        timed_out = "timed out" in first.lower() or "timeout" in first.lower()
        notes.leave(f"{TIMED_OUT if timed_out else FAILED} {where}")
        others = notes.of_others(group.ranks if group is not None else range(dist.get_world_size()))
        text = f"{self.describe_rank()}: {where} failed: {first}" + "".join(f"; {note}" for note in others)
        # Who times out first closes its connections, which is what its peers see.
        timed_out = timed_out or any(f" {TIMED_OUT} " in note for note in others)
        return CollectiveTimeout(text) if timed_out else RuntimeProgramError(text)

    def release(self) -> None:
        self._job.pool.clear()
        self._job.courier.pool.clear()
        self._job.flight.end_step()

    def leave_note(self, what: str) -> None:
        """Tell the other ranks what this one was doing when it failed. Only the first note of a rank counts."""
        self._job.notes.leave(what)
