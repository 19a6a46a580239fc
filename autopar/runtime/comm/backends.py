"""Kinds of devices that ranks compute on: a row, `Backend`, says all that others ask of a kind, apart from its kernels.

    HOST    tensors lie in host memory, a kernel is over when its call returns; ranks talk through Gloo
    CUDA    kernels and messages queue in streams of the device, behind the host; ranks talk through NCCL. AMD's GPUs are
            CUDA devices to torch, and so they are here

Streams, events and counts are those of torch's module of the kind (`torch.cuda`; those of `torch.cpu` are empty), so a row has
what torch does not say. To add a kind, `register_backend` its row; which kernels it has is for `runtime/kernels` to say.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RuntimeProgramError
from .environment import LaunchError

Mark = Any
"""A moment: seconds, or an event of a stream."""


@dataclass(frozen=True)
class Transport:
    """A way of messages between processes: a backend of torch.distributed.

    in_order: messages have no tags, those of a pair of ranks are received in the order sent. dtypes: that its collectives take
    (None: all). by_sockets: all bytes go through the kernel's sockets, from the address of the host's name; else it finds links
    by itself, from the first interface that is up, and takes shared and locked memory. patience_s: seconds that it is given
    beyond the limit of a collective, as it then ends the process itself, and no rank could say who was missing. slow_share: the
    share of the described rate below which a link is slow. slow_remedy, join_remedy: what to do where links are slow, or ranks
    do not come together.
    """

    name: str
    in_order: bool = True
    dtypes: frozenset[torch.dtype] | None = None
    by_sockets: bool = False
    patience_s: float = 0.0
    slow_share: float = 0.5
    slow_remedy: str = "see which links it takes; or calibrate the cluster's file"
    join_remedy: str = "see what it logs"

    @property
    def interface_variable(self) -> str:
        """The environment's variable that names the interface to use."""
        return f"{self.name.upper()}_SOCKET_IFNAME"

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether its collectives take a dtype."""
        return self.dtypes is None or dtype in self.dtypes


@dataclass(frozen=True)
class Backend:
    """A kind of device with memory of its own, whose kernels queue in streams.

    device_type: torch's name of it. transport: of messages between its ranks. preset: the figures of a device of which no more
    is known. kernels: kind and capability by which the kernels of a device are chosen, by its index; least: the capability where
    there is none to ask. graphs: a step can be captured (cuda_graphs.py). versions: what all ranks must have alike.
    """

    device_type: str
    transport: Transport
    preset: str
    kernels: Callable[[int], tuple[str, tuple[int, int]]] | None = None
    least: tuple[int, int] = (0, 0)
    graphs: bool = False
    versions: Callable[[], Mapping[str, str]] = dict

    is_host: ClassVar[bool] = False
    """Whether tensors lie in host memory, and kernels are over when their calls return."""
    ahead: ClassVar[int] = 1
    """Steps that the host of a training loop begins before it waits for what the device computed in an earlier one."""

    @property
    def module(self) -> Any:
        """torch's module of this kind: `Stream`, `Event`, `synchronize`, …"""
        return getattr(torch, self.device_type)

    # ---- devices

    def count(self) -> int:
        """Devices that this process sees."""
        return int(self.module.device_count())

    def device(self, local_rank: int) -> torch.device:
        """The device of a rank of this machine. Raises LaunchError where it sees none."""
        index = own_index(self.count(), local_rank)
        if index is None or not dist.is_backend_available(self.transport.name):
            raise LaunchError(
                f"--backend {self.transport.name}: this machine has {self.count()} {self.device_type} devices, and LOCAL_RANK is "
                f"{local_rank}; start at most a rank per device, or leave --backend out"
            )
        return torch.device(self.device_type, index)

    def current(self) -> torch.device:
        """The device that this process has made current."""
        return torch.device(self.device_type, self.module.current_device())

    def bus(self, device: torch.device) -> str:
        """Where a device sits in its machine; "" where that is not known."""
        facts = self.module.get_device_properties(device)
        if not hasattr(facts, "pci_bus_id"):
            return ""
        return f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"

    # ---- time and memory

    def mark(self) -> Mark:
        """A mark of this moment in the current stream."""
        event = self.module.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: Mark) -> bool:
        """Whether the device has passed a mark."""
        return bool(mark.query())

    def seconds(self, start: Mark, end: Mark) -> float:
        """Seconds between two marks that the device has passed."""
        return float(start.elapsed_time(end)) * 1e-3

    def catch_up(self, device: torch.device) -> None:
        """Block the host until the device's current stream has done what it was told so far."""
        self.module.current_stream(device).synchronize()

    def hold(self, value: Tensor, stream: Any) -> None:
        """Keep a value's memory until a stream has done what it was told so far."""
        value.record_stream(stream)

    def peak_bytes(self, device: torch.device) -> int:
        """The most bytes that were allocated on a device since the start."""
        return int(self.module.max_memory_allocated(device))

    def repeatable(self, strict: bool = True) -> AbstractContextManager[None]:
        """A context of kernels that give the same bits every time. strict: torch raises by name where an op has none."""
        return _deterministic(strict)


@dataclass(frozen=True)
class Host(Backend):
    """The processors of a machine."""

    is_host: ClassVar[bool] = True
    ahead: ClassVar[int] = 0

    def device(self, local_rank: int) -> torch.device:
        return torch.device(self.device_type)

    def current(self) -> torch.device:
        return torch.device(self.device_type)

    def bus(self, device: torch.device) -> str:
        return ""

    def mark(self) -> Mark:
        return time.perf_counter()

    def passed(self, mark: Mark) -> bool:
        return True

    def seconds(self, start: Mark, end: Mark) -> float:
        return float(end - start)

    def catch_up(self, device: torch.device) -> None:
        return

    def hold(self, value: Tensor, stream: Any) -> None:
        return

    def peak_bytes(self, device: torch.device) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def repeatable(self, strict: bool = True) -> AbstractContextManager[None]:
        return nullcontext()


@contextmanager
def _deterministic(strict: bool) -> Iterator[None]:
    before, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which torch takes no product for repeatable
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    settings.fill_uninitialized_memory = False  # nothing here is read before it is written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
        settings.fill_uninitialized_memory = filled


def _cuda_kernels(index: int) -> tuple[str, tuple[int, int]]:
    return ("rocm", (0, 0)) if torch.version.hip else ("cuda", torch.cuda.get_device_capability(index))


def _cuda_versions() -> dict[str, str]:
    versions = {"CUDA": str(torch.version.cuda or torch.version.hip)}
    with suppress(Exception):
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


_DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    | {torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool}
)
HOST = Host(
    "cpu",
    Transport(
        "gloo",
        in_order=False,
        dtypes=_DTYPES,
        by_sockets=True,
        slow_share=0.2,
        slow_remedy="set GLOO_SOCKET_IFNAME to the fast interface, look at ethtool for its speed; or calibrate the cluster's "
        "file",
        join_remedy="see GLOO_SOCKET_IFNAME and the firewall",
    ),
    preset="cpu",
)
CUDA = Backend(
    "cuda",
    Transport(
        "nccl",
        dtypes=_DTYPES,
        patience_s=30.0,
        slow_remedy="see with NCCL_DEBUG=INFO which transport it takes: NET/Socket means that InfiniBand was not found "
        "(NCCL_IB_HCA, NCCL_IB_DISABLE=0), else look at ibstat and nvidia-smi topo -m; or calibrate the cluster's file",
        join_remedy="see NCCL_DEBUG=INFO",
    ),
    preset="a100",
    kernels=_cuda_kernels,
    least=(8, 0),
    graphs=True,
    versions=_cuda_versions,
)
BACKENDS: dict[str, Backend] = {}
"""Every kind by the name of its transport, which is what `--backend` says."""
OF_TYPE: dict[str, Backend] = {"meta": HOST}
"""The kind that was registered last for a type of device; tensors without data lie on the host."""


def register_backend(row: Backend) -> None:
    """Add a kind of device."""
    BACKENDS[row.transport.name] = OF_TYPE[row.device_type] = row


register_backend(HOST)
register_backend(CUDA)


# ---- which one


def backend_of(device: torch.device) -> Backend:
    """The kind of a device. Raises RuntimeProgramError where it is not known."""
    row = OF_TYPE.get(device.type)
    if row is None:
        raise RuntimeProgramError(f"nothing is known of {device.type} devices; `register_backend` says what is")
    return row


def backend_named(name: str) -> Backend:
    """The kind whose transport has this name. Raises RuntimeProgramError."""
    if name not in BACKENDS:
        raise RuntimeProgramError(f"unknown backend {name!r}; backends are {', '.join(BACKENDS)}")
    return BACKENDS[name]


def transport_named(name: str) -> Transport:
    """A transport of torch.distributed; of one that is not known nothing is assumed."""
    return BACKENDS[name].transport if name in BACKENDS else Transport(name)


def present_backend() -> Backend:
    """The kind of the devices of this machine: one with memory of its own, where this process sees any, else its processors."""
    accelerators = (row for row in reversed(BACKENDS.values()) if not row.is_host and row.count())
    return next(accelerators, None) or backend_of(torch.device("cpu"))


def usual_backend(local_ranks: int) -> Backend:
    """The kind for ranks that are told none, so many on this machine. Raises LaunchError where not each of them has a device."""
    row = present_backend()
    if not row.is_host and (row.count() < local_ranks or not dist.is_backend_available(row.transport.name)):
        seen, name, host = row.count(), row.transport.name, backend_of(torch.device("cpu")).transport.name
        raise LaunchError(
            f"{local_ranks} ranks of this machine see {seen} {row.device_type} device{'s' if seen > 1 else ''}; start at most a "
            f"rank per device, or say what is meant: --backend {name}, where every rank sees one device that is its own, or "
            f"--backend {host}, to compute on the processors"
        )
    return row


def own_index(devices: int, local_rank: int) -> int | None:
    """Which of the devices that a rank sees is its own: by its number on the machine, or the only one it is shown."""
    return local_rank if local_rank < devices else 0 if devices == 1 else None


# ---- to the host


class Arriving:
    """Tensors on their way to the host, which does not wait for those of a device until they are needed."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._events = list(tensors), list[Any]()
        for place, tensor in enumerate(tensors):
            row = backend_of(tensor.device)
            if not row.is_host:
                room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._tensors[place] = room.copy_(tensor, non_blocking=True)
                self._events.append(row.module.Event())
                self._events[-1].record()

    @property
    def late(self) -> bool:
        """Whether they need not be there yet."""
        return bool(self._events)

    def wait(self) -> list[Tensor]:
        """The tensors, once they are there."""
        for event in self._events:
            event.synchronize()
        return self._tensors
