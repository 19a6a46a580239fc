"""NCCL's meaning over Gloo: processes without a GPU whose messages order streams, and whose host runs ahead of them.

`install` makes this machine's processors a *device*: one more kind of `runtime/comm/backends.py`, with a stream that is a thread,
and a process group on top of Gloo.

    stream    what is told to it is done in order, later. Events are marks in it
    device    every tensor that a message has touched, or that was computed from one; what is computed of it is told to the stream
    message   begins when the stream comes to it, on a stream of its group; `Work.wait` tells the stream to wait and returns at
              once; `is_completed` asks. The first of a group connects its members, for which the host waits
    host      waits where it reads: item, tolist, cpu, an event, a stream. Pinned memory is read as it is

So losses and weights are those of Gloo only if everybody waits where he must. A connection that breaks ends the process as
NCCL's watchdog does: soon, and without Python. This file is copied beside run.py, and is told the runtime's name there.
"""

from __future__ import annotations

import importlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

NAME = "nccl_meaning"
ABORTED = 134
WATCHDOG_S = 0.1


# ---- streams


class Stream:
    """A thread that does one thing after the other."""

    def __init__(self, device: Any = None) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def tell(self, job: Callable[[], Any]) -> None:
        """Do this after all that it was told before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        with torch.no_grad():
            while True:
                try:
                    self._jobs.get()()
                except BaseException as error:
                    abort(f"{type(error).__name__}: {error}")

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.tell(event.passed.wait)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    """A mark in a stream."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.passed = threading.Event()
        self.at_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        passed = self.passed = threading.Event()

        def mark() -> None:
            self.at_s = time.perf_counter()
            passed.set()

        (stream or current_stream()).tell(mark)

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        self.passed.wait()

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        return (end.at_s - self.at_s) * 1e3


def abort(why: str) -> None:
    """End the process as a watchdog does that is not Python's."""
    time.sleep(WATCHDOG_S)
    os.write(2, f"{NAME}: {why}\n".encode())
    os._exit(ABORTED)


_CURRENT = [Stream()]


def current_stream(device: Any = None) -> Stream:
    return _CURRENT[-1]


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    _CURRENT.append(stream)
    try:
        yield
    finally:
        _CURRENT.pop()


# ---- tensors


class Storages:
    """Storages that something is true of, for as long as they are there."""

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}

    def add(self, tensor: Tensor) -> None:
        if tensor not in self:
            if len(self._known) > 4096:
                self._known = {key: ref for key, ref in self._known.items() if not ref.expired()}
            ref = StorageWeakRef(tensor.untyped_storage())
            self._known[ref.cdata] = ref

    def __contains__(self, tensor: object) -> bool:
        assert isinstance(tensor, Tensor)
        return not tensor.is_meta and tensor.untyped_storage()._cdata in self._known


ON_DEVICE, PINNED = Storages(), Storages()
WAITS = SimpleNamespace(reads=0, unknown=set[str]())
"""How often the host waited because it read, and ops for which it had to, though a GPU would not."""


def host_reads(tensors: Sequence[Tensor]) -> None:
    """The host is about to read these."""
    if any(one in ON_DEVICE and one not in PINNED for one in tensors):
        WAITS.reads += 1
        current_stream().synchronize()


def tensors_of(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor)]


class _Ops(TorchDispatchMode):
    """Ops with a tensor of the device are told to the stream; those of the host alone are done at once."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        pinned = kwargs.pop("pin_memory", None)
        given = tensors_of(args, kwargs)
        if not any(one in ON_DEVICE for one in given):
            result = func(*args, **kwargs)
            if pinned:
                PINNED.add(result)
            return result
        returns = func._schema.returns
        if func.is_view or kwargs.get("device") == torch.device("meta"):
            return func(*args, **kwargs)
        if func.namespace == "c10d" or not all(str(one.type) in ("Tensor", "List[Tensor]") for one in returns):
            host_reads(given)
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._change(func, args, kwargs, given)
        return self._compute(func, args, kwargs, given)

    def _change(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
        schema, written = func._schema, {}
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                written[tuple(argument.alias_info.before_set)] = value
        results = [written.get(tuple(one.alias_info.before_set)) if one.alias_info else None for one in schema.returns]
        if any(one is None for one in results):
            return self._at_once(func, args, kwargs, given)
        self._tell(func, args, kwargs, given, lambda _: None)
        return None if not results else results[0] if len(results) == 1 else tuple(results)

    def _compute(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
        try:
            like = func(*_on_meta(args), **_on_meta(kwargs))
        except (RuntimeError, NotImplementedError):
            return self._at_once(func, args, kwargs, given)
        outs = tree_map_only(Tensor, lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype), like)
        rooms = [room.data for room in tensors_of(outs)]

        def fill(result: Any) -> None:
            for room, value in zip(rooms, tensors_of(result), strict=True):
                room.copy_(value)

        for room in rooms:
            ON_DEVICE.add(room)
        self._tell(func, args, kwargs, given, fill)
        return outs

    def _tell(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], then: Callable[[Any], None]) -> None:
        for one in given:
            ON_DEVICE.add(one)
        args, kwargs = (tree_map_only(Tensor, lambda t: t.data, value) for value in (args, kwargs))
        current_stream().tell(lambda: then(func(*args, **kwargs)))

    def _at_once(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
        WAITS.unknown.add(str(func))
        current_stream().synchronize()
        result = func(*args, **kwargs)
        for one in tensors_of(result):
            ON_DEVICE.add(one)
        return result


def _on_meta(value: Any) -> Any:
    value = tree_map_only(
        Tensor, lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta"), value
    )
    return tree_map_only(torch.device, lambda _: torch.device("meta"), value)


class _Reads(TorchFunctionMode):
    """Reading a tensor of the device into the host's memory, which for the processors' own tensors is no op at all."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.cpu, Tensor.tolist) or (func is Tensor.to and args[1:2] == ("cpu",)):
            host_reads(args[:1])
        return func(*args, **(kwargs or {}))


# ---- messages


class Work:
    """A message under way."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def wait(self, timeout: Any = None) -> bool:
        current_stream().tell(self.done.wait)
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()


class Group(dist.ProcessGroup):
    """A process group of Gloo with NCCL's meaning."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._stream = Stream()
        self._connected = False
        self._sent: dict[tuple[str, int], int] = {}

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def allreduce(self, tensors: Any, opts: Any) -> Work:
        return self._collective(self._gloo.allreduce, tensors, opts)

    def broadcast(self, tensors: Any, opts: Any) -> Work:
        return self._collective(self._gloo.broadcast, tensors, opts)

    def allgather(self, outs: Any, inps: Any, opts: Any) -> Work:
        return self._collective(self._gloo.allgather, outs, inps, opts)

    def all_gather_single(self, out: Tensor, inp: Tensor, opts: Any) -> Work:
        return self._collective(self._gloo._allgather_base, out, inp, opts)

    def reduce_scatter_single(self, out: Tensor, inp: Tensor, opts: Any) -> Work:
        return self._collective(self._gloo._reduce_scatter_base, out, inp, opts)

    def all_to_all_single(self, out: Tensor, inp: Tensor, received: Any, sent: Any, opts: Any) -> Work:
        return self._collective(self._gloo.alltoall_base, out, inp, received, sent, opts)

    def send(self, tensors: Any, to: int, tag: int) -> Work:
        return self._message(self._gloo.send, tensors, to)

    def recv(self, tensors: Any, of: int, tag: int) -> Work:
        return self._message(self._gloo.recv, tensors, of)

    def _collective(self, start: Callable[..., Any], *args: Any) -> Work:
        if not self._connected:
            self._connected = True
            self._gloo.barrier().wait()
        own = torch.tensor([len(start.__name__), *(one.nbytes for one in tensors_of(args))][:3])
        told = [torch.zeros_like(own) for _ in range(self.size())]

        def meet(given: Any) -> None:
            self._gloo.allgather([told], [own]).wait()
            if any(not torch.equal(own, other) for other in told):
                threading.Event().wait()  # NCCL does not see that others call something else, and may wait for ever
            start(*given).wait()

        return self._start(meet, args)

    def _message(self, start: Callable[..., Any], tensors: Any, peer: int) -> Work:
        """Messages of a pair have no tags: they meet in the order in which they were sent, and others may pass meanwhile."""
        key = start.__name__, peer
        tag = self._sent[key] = self._sent.get(key, -1) + 1
        return self._start(lambda given: start(*given).wait(), (tensors, peer, tag), apart=True)

    def _start(self, run: Callable[[Any], Any], args: Any, apart: bool = False) -> Work:
        work, ready = Work(), current_stream().record_event()
        for one in tensors_of(args):
            ON_DEVICE.add(one)
        given = tree_map_only(Tensor, lambda t: t.data, args)

        def go() -> None:
            try:
                run(given)
            except RuntimeError as error:
                abort(f"a message failed: {str(error).splitlines()[0]}")
            work.done.set()

        self._stream.tell(ready.passed.wait)
        self._stream.tell(threading.Thread(target=go, daemon=True).start if apart else go)
        return work


# ---- the kind of device


MODULE = SimpleNamespace(
    Stream=Stream,
    Event=Event,
    stream=on_stream,
    current_stream=current_stream,
    synchronize=lambda device=None: current_stream().synchronize(),
    set_device=lambda device: None,
    current_device=lambda: 0,
    device_count=lambda: 1,
)


def install(package: str) -> None:
    """From now on `--backend nccl_meaning` computes on this thread's device. package: the name of the runtime."""
    backends: Any = importlib.import_module(f"{package}.comm.backends")

    @dataclass(frozen=True)
    class Row(backends.Backend):  # type: ignore[misc]
        module = MODULE

        def device(self, local_rank: int) -> torch.device:
            return torch.device("cpu")

        def current(self) -> torch.device:
            return torch.device("cpu")

        def bus(self, device: torch.device) -> str:
            return ""

        def hold(self, value: Tensor, stream: Any) -> None:
            """A stream holds what it was told of."""

        def peak_bytes(self, device: torch.device) -> int:
            return 0

        def repeatable(self, strict: bool = True) -> Any:
            return nullcontext()

    dist.Backend.register_backend(NAME, Group, devices=["cpu"])
    backends.register_backend(Row("cpu", backends.Transport(NAME, by_sockets=True, patience_s=30.0), preset="cpu"))
    _Ops().__enter__()
    _Reads().__enter__()
    if os.environ.get("NCCL_MEANING_WAITS"):
        import atexit

        atexit.register(lambda: print(f"waits {WAITS.reads} unknown {sorted(WAITS.unknown)}", file=sys.stderr))
