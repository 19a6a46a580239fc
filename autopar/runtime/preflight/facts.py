"""Facts of one rank about itself and its machine before a run, which checks judge (finding.py).

Everything here is looked up on this machine; nobody is asked and nothing waits. Facts travel as JSON, so they are plain
values. Where a system does not say something (no /proc, no /dev/shm) the fact is None, and nothing is concluded from it.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import ipaddress
import os
import platform
import resource
import shutil
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ..comm.backends import BACKENDS, own_index, present_backend, transport_named
from ..comm.environment import MASTER_PORT, started, whole
from ..data.datafile import read_json
from ..data.schema import MOST_RANKS, SchemaError
from ..data.whole_files import file_facts

IF_INET6 = Path("/proc/net/if_inet6")
_SIOCGIFFLAGS, _SIOCGIFADDR, _UP = 0x8913, 0x8915, 1


@dataclass(frozen=True)
class Place:
    """Which rank this is, and where the others are to be met. by_machine: torchrun did not start it, so it speaks for a machine,
    and so does every other: ranks are machines."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    master: str
    port: int
    by_machine: bool = False

    @classmethod
    def of(cls, environment: Mapping[str, str], ranks_per_node: int, ranks: int) -> Place:
        """The place of this process by torchrun's variables; without these, by those of launch.sh (NODE_RANK), of a
        program of so many ranks.

        Raises LaunchError where one of them is not as it may be.
        """
        if "RANK" in environment:
            own = started(environment)
            return cls(own.rank, own.ranks, own.local_rank, own.local_ranks, own.master, own.port or MASTER_PORT)
        nodes = max(ranks // ranks_per_node, 1)
        number = whole(environment, "NODE_RANK", 0, 0, MOST_RANKS)
        master, port = (
            environment.get("MASTER_ADDR") or "127.0.0.1",
            whole(environment, "MASTER_PORT", MASTER_PORT, 0, 65535),
        )
        return cls(number, nodes, 0, ranks_per_node, master, port, by_machine=True)


@dataclass(frozen=True)
class Device:
    """A GPU that a rank sees. bus: where it sits, numa: the node of memory beside it (-1: not said)."""

    name: str
    bus: str
    numa: int = -1


@dataclass(frozen=True)
class Interface:
    """A network interface. address: its IPv4 address, empty where it has none."""

    name: str
    up: bool
    address: str


@dataclass(frozen=True)
class Facts:
    """Facts of one rank. Bytes where nothing else is said.

    named: the interfaces that the environment names; address: by which others reach this rank. files: one hash of all files of
    the program; changed: those that are not as they were written; wanted: paths of arguments that are not there. versions: of
    what must be the same everywhere. shm: shared memory, in all and free; cpus: those that this process may use; threads:
    that it will use. open_files, locked: limits (None: none). writable: "" where the run directory can be written, else why
    not; free: its room. port: where the rank listens, so that others see whether they reach it.
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    host: str
    process: int
    backend: str
    master: str
    master_addresses: tuple[str, ...]
    interfaces: tuple[Interface, ...]
    named: Mapping[str, str]
    address: str
    files: str
    changed: tuple[str, ...]
    missing: tuple[str, ...]
    wanted: tuple[str, ...]
    versions: Mapping[str, str]
    devices: tuple[Device, ...]
    shm: int | None
    shm_free: int | None
    cpus: tuple[int, ...]
    threads: int
    numa_cpus: Mapping[str, tuple[int, ...]]
    open_files: int | None
    locked: int | None
    infiniband: bool = False
    run: str = ""
    writable: str = ""
    free: int | None = None
    port: int = 0

    @property
    def device(self) -> Device | None:
        """The device that the rank computes on, where it sees one for it."""
        index = own_index(len(self.devices), self.local_rank)
        return None if index is None else self.devices[index]

    def as_data(self) -> dict[str, Any]:
        """The facts as JSON; `of` reads them."""
        data = {one.name: getattr(self, one.name) for one in fields(self)}
        data["devices"] = [vars(one) for one in self.devices]
        data["interfaces"] = [vars(one) for one in self.interfaces]
        return data

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Facts:
        """The facts that `as_data` gave, after a way as JSON."""
        lists = ("master_addresses", "changed", "missing", "wanted", "cpus")
        read = {**data, **{name: tuple(data[name]) for name in lists}}
        read["devices"] = tuple(Device(**one) for one in data["devices"])
        read["interfaces"] = tuple(Interface(**one) for one in data["interfaces"])
        read["numa_cpus"] = {node: tuple(cpus) for node, cpus in data["numa_cpus"].items()}
        return cls(**read)


def own_facts(place: Place, folders: Sequence[Path], backend: str, run: str | None, wanted: Sequence[str]) -> Facts:
    """The facts of this process. folders: of the program, and of the candidate that runs in its place; run: the run directory;
    wanted: files that arguments name."""
    names = {str(folder / name): digest for folder in folders for name, digest in _written(folder).items()}
    found = {name: _digest(Path(name), bool(digest)) for name, digest in names.items()}
    whole = hashlib.sha256("\n".join(f"{Path(name).name} {value}" for name, value in found.items()).encode())
    shm = _room(Path("/dev/shm"))
    writable, free = ("", None) if run is None else try_directory(Path(run))
    return Facts(
        rank=place.rank,
        ranks=place.ranks,
        local_rank=place.local_rank,
        local_ranks=place.local_ranks,
        host=socket.gethostname(),
        process=os.getpid(),
        backend=backend,
        master=place.master,
        master_addresses=_addresses(place.master),
        interfaces=interfaces(),
        named={name: os.environ[name] for name in socket_variables() if name in os.environ},
        address=_own_address(backend),
        files=whole.hexdigest()[:16],
        changed=tuple(name for name, value in found.items() if names[name] and value not in ("", names[name])),
        missing=tuple(name for name, value in found.items() if not value),
        wanted=tuple(path for path in wanted if not Path(path).exists()),
        versions=_versions(),
        devices=_devices(),
        shm=shm[0] if shm else None,
        shm_free=shm[1] if shm else None,
        cpus=tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (),
        threads=torch.get_num_threads(),
        numa_cpus=_numa_cpus(),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked=_limit(resource.RLIMIT_MEMLOCK),
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
        run="" if run is None else str(Path(run).absolute()),
        writable=writable,
        free=free,
    )


def _written(directory: Path) -> dict[str, str]:
    """The files that a program consists of, with the hash that each was written with ("": not known, as of weights), as
    program.json says, or the folder where that says nothing."""
    try:
        facts = read_json(directory / "program.json")
        listed = facts.get("files") if isinstance(facts, dict) else None
    except (OSError, SchemaError):
        listed = None
    if isinstance(listed, dict):
        return {str(n): "" if n == "program.json" else str(digest) for n, digest in listed.items()}
    found = (p for p in directory.rglob("*.py") if "__pycache__" not in p.parts)
    return {path.relative_to(directory).as_posix(): "" for path in (*sorted(found), directory / "manifest.json")}


def _digest(path: Path, read: bool) -> str:
    """A hash of a file's content, or of how many bytes it has; empty where it is not there, or cannot be read."""
    try:
        if read or path.suffix in (".py", ".json"):
            return str(file_facts(path)["sha256"])
        return f"{path.stat().st_size} bytes"
    except OSError:
        return ""


def interfaces() -> tuple[Interface, ...]:
    """The network interfaces of this machine, each with its IPv4 address, or, where it has none, one of IPv6 that is no
    link-local one."""
    found, of_ipv6 = [], _ipv6_addresses()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            try:
                (flags,) = array.array("h", fcntl.ioctl(one.fileno(), _SIOCGIFFLAGS, asked)[16:18])
            except OSError:
                continue
            address = of_ipv6.get(name, "")
            with contextlib.suppress(OSError):
                address = socket.inet_ntoa(fcntl.ioctl(one.fileno(), _SIOCGIFADDR, asked)[20:24])
            found.append(Interface(name, bool(flags & _UP), address))
    return tuple(found)


def _ipv6_addresses() -> dict[str, str]:
    """Addresses by interface, as Linux tells them (address, index, prefix, scope, flags, name); link-local ones are left out, as
    they say nothing without their interface."""
    try:
        rows = [line.split() for line in IF_INET6.read_text().splitlines()]
    except OSError:
        return {}
    return {row[5]: socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[3] != "20"}


def _addresses(host: str) -> tuple[str, ...]:
    try:
        return tuple(sorted({str(row[4][0]) for row in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}))
    except OSError:
        return ()


def socket_variables() -> list[str]:
    """The variables that name interfaces to use."""
    return [row.transport.interface_variable for row in BACKENDS.values()]


def _own_address(backend: str) -> str:
    """The address by which other ranks reach this one: that of the interface that is named; else by sockets that of the host's
    name, loopback where it has none, and otherwise the first that is up."""
    transport = transport_named(backend)
    known = [one for one in interfaces() if one.up and one.address]
    name = os.environ.get(transport.interface_variable, "").split(",")[0].strip("=")
    if name and not name.startswith("^"):
        return next((one.address for one in known if one.name == name), "")
    if not transport.by_sockets:
        return next((one.address for one in known if not ipaddress.ip_address(one.address).is_loopback), "")
    try:
        own = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        return str(min(own, key=lambda row: row[0] != socket.AF_INET)[4][0])
    except OSError:
        return "127.0.0.1"


def _versions() -> dict[str, str]:
    own = {"Python": ".".join(platform.python_version_tuple()[:2]), "torch": torch.__version__}
    return own | dict(present_backend().versions())


def _devices() -> tuple[Device, ...]:
    row, found = present_backend(), []
    for device in () if row.is_host else [torch.device(row.device_type, index) for index in range(row.count())]:
        bus, numa = row.bus(device), -1
        with contextlib.suppress(OSError, ValueError):
            numa = int(Path(f"/sys/bus/pci/devices/{bus}/numa_node").read_text())
        found.append(Device(row.module.get_device_name(device), bus, numa))
    return tuple(found)


def _numa_cpus() -> dict[str, tuple[int, ...]]:
    """The CPUs of every node of memory."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")):
        with contextlib.suppress(OSError, ValueError):
            spans = [part.split("-") for part in path.read_text().strip().split(",") if part]
            found[path.parent.name[4:]] = tuple(c for s in spans for c in range(int(s[0]), int(s[-1]) + 1))
    return found


def _room(path: Path) -> tuple[int, int] | None:
    """Bytes of a file system: all, and free."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.total, usage.free


def try_directory(path: Path) -> tuple[str, int | None]:
    """Why a directory cannot be made or written; empty where it can be. Its free bytes."""
    probe = path / f".preflight-{socket.gethostname()}-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"?")
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error), None
    room = _room(path)
    return "", room[1] if room else None


def _limit(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft
