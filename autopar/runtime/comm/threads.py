"""Every rank as a thread of this process: the backend for tests, verification and laptops.

A collective is a meeting: members post their Call in a slot (group, sequence number); the last one to come runs the
whole collective over everyone's buffers, in member order, so results do not depend on timing. Because all ranks are
known, a deadlock needs no timeout to be found: when every unfinished rank waits and no meeting is complete, nobody can
ever come, and the report says who waits where.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import CollectiveMismatch, CollectiveTimeout, RuntimeProgramError
from .buffers import BufferPool
from .calls import Call, Message, Posted
from .collectives import COLLECTIVES
from .comm import Comm
from .hierarchical import in_turn, phases
from .mesh import mesh_index

T = TypeVar("T")


class _Aborted(BaseException):
    """Unwinds a rank after another one failed. Not an Exception: user code must not swallow it."""


class _OwnMemory(BufferPool):
    """Buffers of the backend, which no counter of a rank's bytes sees, as it does not see those of processes."""

    def take(self, numel: int, like: Tensor) -> Tensor:
        with _disable_current_modes():
            return super().take(numel, like)


class _Slot:
    """One meeting of a group: the calls posted so far, and whether it is over."""

    __slots__ = ("calls", "done", "missing", "number")

    def __init__(self, size: int, number: int) -> None:
        self.calls: list[Call | None] = [None] * size
        self.missing = size
        self.number = number
        self.done = False


class _World:
    """State that the rank threads share; every field is guarded by `lock`. A rank sleeps on its own bell."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.lock = threading.Lock()
        self.deadline = time.monotonic() + timeout_s
        self.timeout_s = timeout_s
        self.world_size = world_size
        self.slots: dict[tuple[str, tuple[int, ...], int], _Slot] = {}
        self.shared: dict[tuple[str, int], dict[int, Any]] = {}
        self.mail: dict[tuple[int, int, int], deque[Tensor]] = {}
        self.bells = [threading.Semaphore(0) for _ in range(world_size)]
        self.waited_s = [0.0] * world_size
        self.running = set(range(world_size))
        self.waiting: dict[int, tuple[object, Callable[[], str]]] = {}
        self.failure: tuple[int, BaseException] | None = None
        self.open: list[dict[Any, tuple[Any, ...]]] = [{} for _ in range(world_size)]

    def fail(self, rank: int, error: BaseException) -> None:
        """Keep the first failure and wake everyone. Call with the lock held."""
        if self.failure is None:
            self.failure = (rank, error)
        for sleeper in list(self.waiting):
            self.wake(sleeper)

    def wake(self, rank: int) -> None:
        """Call with the lock held."""
        del self.waiting[rank]
        self.bells[rank].release()

    def wait(self, rank: int, subject: object, done: Callable[[], bool], what: Callable[[], str]) -> None:
        """Sleep until done(); whoever makes it true wakes the ranks that wait for the subject."""
        while True:
            with self.lock:
                if self.failure is not None:
                    raise _Aborted
                if done():
                    return
                self.waiting[rank] = (subject, what)
                self.check_deadlock()
            began = time.monotonic()
            if not self.bells[rank].acquire(timeout=max(0.0, self.deadline - began)):
                with self.lock:
                    if rank in self.waiting:
                        text = f"rank {rank} waited until the run's limit of {self.timeout_s:g} s; {self.report()}"
                        self.fail(rank, CollectiveTimeout(text))
                self.bells[rank].acquire()
            self.waited_s[rank] += time.monotonic() - began

    def check_open(self, rank: int) -> None:
        """Raises RuntimeProgramError where a rank is done and has not waited for all that it started: over Gloo what nobody waits
        for may never leave. Threads see to it so that tests find it."""
        if self.open[rank]:
            (kind, *signature), site, axes = next(iter(self.open[rank].values()))
            raise RuntimeProgramError(
                f"rank {rank} started {len(self.open[rank])} collectives and never waited for them, at first {kind} {signature} "
                f"over {'×'.join(axes)}{f' at {site}' if site else ''}: its Handle was dropped"
            )

    def check_deadlock(self) -> None:
        if self.failure is None and self.waiting and len(self.waiting) == len(self.running):
            self.fail(min(self.waiting), CollectiveTimeout(f"no rank can go on: {self.report()}"))

    def report(self) -> str:
        lines = [f"rank {rank} waits in {what()}" for rank, (_, what) in sorted(self.waiting.items())]
        busy = sorted(self.running - set(self.waiting))
        if busy:
            lines.append(f"ranks {busy} are computing")
        done = sorted(set(range(self.world_size)) - self.running)
        if done:
            lines.append(f"ranks {done} have finished")
        return "; ".join(lines)


class _Sent(Posted):
    """A message that was copied when it was sent."""

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True


class _Awaited(Posted):
    """A message that is still to come."""

    def __init__(self, comm: ThreadComm, message: Message) -> None:
        self._comm = comm
        self._message = message

    def wait(self) -> None:
        self._comm.receive(self._message)

    def done(self) -> bool:
        return False


class ThreadComm(Comm):
    """One rank among the threads of a `run_threads` call. name: tells the Comms of one rank apart."""

    def __init__(self, rank: int, mesh: Mapping[str, int], world: _World, first_rank: int = 0, name: str = "") -> None:
        super().__init__(rank, mesh, first_rank=first_rank)
        self._world = world
        self._name = name
        self._next: dict[tuple[int, ...], int] = {}
        self._tickets: dict[tuple[str, int], int] = {}
        self._shares = 0

    def _part(self, mesh: Mapping[str, int], first_rank: int, inside: bool) -> Comm | None:
        name = f"{self._name}{tuple(mesh.items())} from {first_rank}"
        return ThreadComm(self.rank, mesh, self._world, first_rank, name) if inside else None

    @property
    def waited_s(self) -> float:
        return self._world.waited_s[self.rank]

    def _tell(self, text: str) -> list[str]:
        return self.hand_round(text)

    def hand_round(self, value: Any) -> list[Any]:
        """Every rank's value itself, by rank."""
        self._shares += 1
        with self._world.lock:
            box = self._world.shared.setdefault((self._name, self._shares), {})
            box[self.rank] = value
        self.barrier(site="share")
        with self._world.lock:  # everyone has come here, so everyone has read the box before
            self._world.shared.pop((self._name, self._shares - 1), None)
        return [box[rank] for rank in sorted(box)]

    def _start(self, call: Call) -> Callable[[], None]:
        levels = self.two_levels(call)
        if levels is not None:
            return in_turn(phases(call, levels, _OwnMemory()), self._start)
        world, group = self._world, call.group
        ranks = tuple(sorted(group.ranks))
        number = self._next.get(ranks, 0)
        self._next[ranks] = number + 1
        key, opened = (self._name, ranks, number), world.open[self.rank]
        opened[key] = call.signature(), call.site, group.axes
        with world.lock:
            if world.failure is not None:
                raise _Aborted
            slot = world.slots.get(key)
            if slot is None:
                slot = world.slots[key] = _Slot(group.size, number)
            else:
                self._check_match(slot, call)
            slot.calls[group.index] = call
            slot.missing -= 1
            last = slot.missing == 0
            if last:
                del world.slots[key]
        if last:
            execute([posted for posted in slot.calls if posted is not None])
            with world.lock:
                slot.done = True
                slot.calls.clear()
                for rank in group.ranks:
                    if rank in world.waiting and world.waiting[rank][0] is slot:
                        world.wake(rank)

        def wait() -> None:
            opened.pop(key, None)
            if not slot.done:
                world.wait(self.rank, slot, lambda: slot.done, lambda: f"{call.describe()}, #{number} over {group}")

        return wait

    def _check_match(self, slot: _Slot, call: Call) -> None:
        other = next(posted for posted in slot.calls if posted is not None)
        if other.group.ranks == call.group.ranks and other.signature() == call.signature():
            return
        raise CollectiveMismatch(
            f"collective #{slot.number} over {call.group}: rank {self.rank} calls {call.describe()}, "
            f"rank {other.group.ranks[other.group.index]} calls {other.describe()} over {other.group}"
        )

    def _post(self, messages: Sequence[Message]) -> list[Posted]:
        if self.in_order:
            for message in messages:
                key = (message.kind, message.peer)
                message.tag = self._tickets[key] = self._tickets.get(key, -1) + 1
        return [self._mail(m) if m.kind == "send" else _Awaited(self, m) for m in messages]

    def _mail(self, message: Message) -> Posted:
        copy, world, peer = message.buffer.detach().clone(), self._world, message.peer
        with world.lock:
            if world.failure is not None:
                raise _Aborted
            world.mail.setdefault((self.rank, peer, message.tag), deque()).append(copy)
            if peer in world.waiting and world.waiting[peer][0] is world.mail:
                world.wake(peer)
        return _Sent()

    def receive(self, message: Message) -> None:
        """Wait for a message and fill its buffer."""
        world, key, buffer = self._world, (message.peer, self.rank, message.tag), message.buffer
        world.wait(self.rank, world.mail, lambda: bool(world.mail.get(key)), lambda: str(message))
        with world.lock:
            arrived = world.mail[key].popleft()
        if arrived.shape != buffer.shape or arrived.dtype != buffer.dtype:
            raise CollectiveMismatch(
                f"rank {self.rank}, {message}: expected {buffer.dtype}{list(buffer.shape)}, "
                f"rank {message.peer} sent {arrived.dtype}{list(arrived.shape)}"
            )
        with torch.no_grad():
            buffer.copy_(arrived)


@torch.no_grad()
def execute(calls: list[Call]) -> None:
    """Run one collective over the buffers of all its members, given in member order."""
    COLLECTIVES[calls[0].kind].among_threads(calls)


def run_threads(world_size: int, mesh: Mapping[str, int], fn: Callable[[Comm], T], timeout_s: float = 600.0) -> list[T]:
    """Call fn(comm) for every rank, each in its own thread; the results in rank order.

    A failing rank ends the others at once and its own exception is raised here, with a note naming the rank. Raises
    CollectiveMismatch when ranks disagree about a collective, CollectiveTimeout when ranks wait for each other forever
    or the run takes longer than timeout_s, RuntimeProgramError when a rank ends without having waited for all that it started.
    Each rank computes with one intra-op thread.
    """
    world = _World(world_size, timeout_s)
    comms = [ThreadComm(rank, mesh, world) for rank in range(world_size)]
    if comms and comms[0].world_size != world_size:
        raise RuntimeProgramError(f"the mesh {dict(mesh)} has {comms[0].world_size} ranks, asked to run {world_size}")
    results: dict[int, T] = {}

    def body(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            results[rank] = fn(comms[rank])
            world.check_open(rank)
        except _Aborted:
            pass
        except BaseException as error:
            with world.lock:
                world.fail(rank, error)
        finally:
            with world.lock:
                world.running.discard(rank)
                world.check_deadlock()

    intra_op = torch.get_num_threads()
    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(world_size)]
    try:
        for thread in threads:
            thread.start()
        _join_all(world, threads)
    except BaseException as error:
        with world.lock:
            world.fail(0, error)
        raise
    finally:
        torch.set_num_threads(intra_op)
    if world.failure is not None:
        rank, failure = world.failure
        place = ", ".join(f"{axis}={index}" for axis, index in mesh_index(mesh, rank).items())
        failure.add_note(f"raised by rank {rank} of {world_size} ({place})")
        raise failure
    return [results[rank] for rank in range(world_size)]


def _join_all(world: _World, threads: list[threading.Thread]) -> None:
    """Wait for the threads: until the deadline, or for a second each once a rank has failed."""
    for rank, thread in enumerate(threads):
        while thread.is_alive():
            failed = world.failure is not None
            thread.join(1.0 if failed else max(0.0, world.deadline + 1.0 - time.monotonic()))
            if thread.is_alive() and (failed or time.monotonic() > world.deadline):
                with world.lock:
                    world.fail(rank, CollectiveTimeout(_overtime(world, threads)))
                break


def _overtime(world: _World, threads: list[threading.Thread]) -> str:
    frames = sys._current_frames()
    places = []
    for rank, thread in enumerate(threads):
        frame = frames.get(thread.ident or -1)
        if thread.is_alive() and frame is not None and rank not in world.waiting:
            places.append(f"rank {rank} is at {frame.f_code.co_filename}:{frame.f_lineno}")
    return f"the run took longer than {world.timeout_s:g} s: {world.report()}" + "".join(f"; {p}" for p in places)
