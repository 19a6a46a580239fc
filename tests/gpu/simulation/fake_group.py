"""NCCL's process groups for one simulated rank, under the real code of torch.distributed and of the runtime.

Groups are those of torch's backend "fake". What they are asked for arrives as ops of `c10d`, which are taken here: nothing is
sent, each becomes a unit (messages.py) on its group's stream, which waits for the current stream when it starts, reads and
writes its tensors there, and holds them until it is waited for. `wait` makes the current stream wait, and never the host. A
batch of sends and receives is one unit, and all its requests are one work, as with NCCL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup, PythonCallbackWork
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.runtime.comm.process import TorchComm
from tests.gpu.simulation.budgets import MESSAGE
from tests.gpu.simulation.clocks import Timeline
from tests.gpu.simulation.device import Machine
from tests.gpu.simulation.findings import Place
from tests.gpu.simulation.messages import End, RankLog, Unit

_NCCL_DTYPES = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
}
"""The dtypes that torch has NCCL's names for."""


@dataclass
class _Group:
    """A communicator and its stream."""

    name: str
    members: tuple[int, ...]
    timeline: Timeline


@dataclass
class _Started:
    """A unit under way: the clock at its end, and what it holds. Nothing is held once it was waited for."""

    clock: dict[str, int]
    place: Place
    what: str
    held: list[Tensor]
    waited: bool = False


_OpenEnd = tuple[str, int, Tensor]
"""An end that is asked for: its kind, the other rank, and the tensor."""


class FakeGroups:
    """The process groups of one rank."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.units: list[Unit] = []
        self.made: list[tuple[int, ...]] = []
        self._groups: dict[str, _Group] = {}
        self._started: list[_Started] = []
        self._batch: list[tuple[_Group, _OpenEnd]] | None = None

    def log(self) -> RankLog:
        return RankLog(self.machine.rank, tuple(self.units), tuple(self.made))

    def end(self) -> None:
        """The program is over: what was never waited for is told."""
        for one in self._started:
            if not one.waited:
                self.machine.report("never waited for", one.what, (one.place,))
                one.held.clear()

    # ---- ops of c10d

    def __call__(self, func: Any, args: Sequence[Any]) -> Any:
        """Start what an op asks for; its results, the work among them."""
        name = func._schema.name.partition("::")[2]
        group = self._group(ProcessGroup.unbox(next(x for x in args if isinstance(x, torch.ScriptObject))))
        if name in ("send", "recv_"):
            return self._post("send" if name == "send" else "recv", group, args[2], args[0][0]).boxed()
        reads, writes, facts = _COLLECTIVES[name](args, group.members.index(self.machine.rank))
        tensor = (*reads, *writes)[0]
        sizes = tuple(x.numel() for x in (*reads, *writes)) if name != "alltoall_base_" else ()
        signature = (sizes, str(tensor.dtype).removeprefix("torch."), *facts)
        parts = _parts(args, len(group.members)) if name == "alltoall_base_" else ((), ())
        work = self._work(self._start(group, name.strip("_"), signature, reads, writes, (), *parts)).boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)

    def _start(
        self,
        group: _Group,
        kind: str,
        signature: tuple[object, ...],
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        ends: tuple[End, ...] = (),
        sent: tuple[int, ...] = (),
        received: tuple[int, ...] = (),
    ) -> _Started:
        machine, place = self.machine, self.machine.places.here()
        machine.current.timeline.join(machine.host.clock)
        group.timeline.join(machine.current.timeline.clock)
        needs = {
            name: group.timeline.clock.get(other.timeline.name, 0)
            for name, other in self._groups.items()
            if other is not group
        }
        number = group.timeline.tick()
        unit = Unit(group.name, group.members, len(self.units), kind, signature, place, ends, needs, sent, received)
        self.units.append(unit)
        machine.budget.note(MESSAGE, kind, place, (*reads, *writes))
        for tensor in (*reads, *writes):
            self._check(tensor, str(unit), place)
        home = machine.current.timeline
        for tensor in reads:
            machine.memory.access(tensor, group.timeline, number, False, kind, place, home)
        for tensor in writes:
            machine.memory.access(tensor, group.timeline, number, True, kind, place, home)
        started = _Started(dict(group.timeline.clock), place, str(unit), [*reads, *writes])
        self._started.append(started)
        return started

    def _check(self, tensor: Tensor, what: str, place: Place) -> None:
        if tensor.dtype not in _NCCL_DTYPES:
            self.machine.report("dtype", f"NCCL has no {tensor.dtype}: {what}", (place,))
        if tensor.device.type != "cuda":
            self.machine.report("layout", f"a tensor on {tensor.device}: {what}", (place,))
        elif not tensor.is_contiguous():
            self.machine.report("layout", f"strides {tensor.stride()} of {list(tensor.shape)}: {what}", (place,))

    def _group(self, group: Any) -> _Group:
        return self._named(group.group_name, tuple(dist.get_process_group_ranks(group)))

    def _pair(self, group: _Group, peer: int) -> _Group:
        """The communicator of a message that goes out alone: of its two ranks."""
        low, high = sorted((self.machine.rank, peer))
        return self._named(f"{group.name}, {low}:{high}", (low, high))

    def _named(self, name: str, members: tuple[int, ...]) -> _Group:
        known = self._groups.get(name)
        if known is None:
            known = self._groups[name] = _Group(name, members, Timeline(f"group {name} {list(members)}"))
            self.machine.timelines.append(known.timeline)
        return known

    # ---- works

    def _work(self, started: _Started) -> Any:
        """The request of torch for a unit."""
        return PythonCallbackWork(lambda _: self._wait(started))

    def _wait(self, started: _Started) -> bool:
        self.machine.current.timeline.join(started.clock)
        started.waited = True
        started.held.clear()
        return True

    # ---- messages between two ranks

    def _post(self, kind: str, group: _Group, peer: int, tensor: Tensor) -> Any:
        """peer: by its number in the group."""
        end = (kind, group.members[peer], tensor)
        if self._batch is None:
            return self._work(self._send(self._pair(group, group.members[peer]), [end]))
        self._batch.append((group, end))
        return FakeWork()

    def _send(self, group: _Group, batch: Sequence[_OpenEnd]) -> _Started:
        ends = tuple(
            End(kind, peer, tensor.numel(), str(tensor.dtype).removeprefix("torch.")) for kind, peer, tensor in batch
        )
        reads = [tensor for kind, _, tensor in batch if kind == "send"]
        writes = [tensor for kind, _, tensor in batch if kind == "recv"]
        return self._start(group, "p2p", (), reads, writes, ends)

    def batch_isend_irecv(self, operations: Sequence[Any]) -> list[Any]:
        """The double of torch's: one NCCL kernel, one work."""
        batch = self._batch = []
        try:
            for one in operations:
                peer = {"group_dst" if one.op is dist.isend else "group_src": one.group_peer}
                one.op(one.tensor, group=one.group, tag=one.tag, **peer)
        finally:
            self._batch = None
        return [self._work(self._send(batch[0][0], [end for _, end in batch]))]


_Asked = tuple[list[Tensor], list[Tensor], tuple[object, ...]]
"""The tensors that a collective reads and writes, and what its members have alike beside sizes and dtype."""


def _in_place(args: Sequence[Any], me: int) -> _Asked:
    return [], list(args[0]), (args[2].op(),)


def _broadcast(args: Sequence[Any], me: int) -> _Asked:
    root = args[2]
    return (list(args[0]), [], (root,)) if me == root else ([], list(args[0]), (root,))


def _reduce(args: Sequence[Any], me: int) -> _Asked:
    return [], list(args[0]), (args[2].op(), args[3])


def _out_of(args: Sequence[Any], me: int) -> _Asked:
    return [args[1]], [args[0]], ()


def _parts(args: Sequence[Any], members: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The elements that an exchange sends to each member, and those that it receives."""
    out, inp, _, out_rows, in_rows = args[:5]

    def elements(tensor: Tensor, rows: Sequence[int]) -> tuple[int, ...]:
        if not rows:
            return (tensor.numel() // members,) * members
        return tuple(n * math.prod(tensor.shape[1:]) for n in rows)

    return elements(inp, in_rows), elements(out, out_rows)


def _reduce_scatter(args: Sequence[Any], me: int) -> _Asked:
    return [args[1]], [args[0]], (args[3].op(),)


_COLLECTIVES: dict[str, Callable[[Sequence[Any], int], _Asked]] = {
    "allreduce_": _in_place,
    "broadcast_": _broadcast,
    "reduce_": _reduce,
    "_allgather_base_": _out_of,
    "_reduce_scatter_base_": _reduce_scatter,
    "alltoall_base_": _out_of,
}
"""Collectives by their op, from its arguments and the member that asks."""


@contextmanager
def fake_groups(machine: Machine, ranks: int) -> Iterator[FakeGroups]:
    """Inside, the default process group is one of so many ranks, of which the machine is one."""
    groups = FakeGroups(machine)
    make = dist.new_group

    def new_group(ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        groups.made.append(tuple(ranks))
        return make(ranks, *args, **kwargs)

    dist.init_process_group("fake", store=FakeStore(), rank=machine.rank, world_size=ranks)
    try:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(dist, "new_group", new_group))
            stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", groups.batch_isend_irecv))
            # What ranks tell each other beside the program is the same on all.
            tell = lambda comm, text: [text] * comm.world_size  # noqa: E731
            stack.enter_context(mock.patch.object(TorchComm, "_tell", tell))
            yield groups
    finally:
        dist.destroy_process_group()
