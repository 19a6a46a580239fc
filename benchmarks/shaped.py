"""Ranks on one machine, with or without links of a given rate between them.

Without a rate, ranks talk as processes of one machine do. With one, every rank is in a network namespace of its own, and all
of these are joined by a bridge: the n-th has the address 10.213.7.(n + 1), and what it sends and what it receives passes at so
many Mbit/s. With several ranks to a node, those of a node share a namespace and its link, and are told so as by torchrun. Needs
root, `ip` and `tc`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.harness import WorkersFailed

INTERFACE = "veth0"
"""The network interface of every rank that has a namespace of its own."""


@dataclass(frozen=True)
class Ranks:
    """prefixes: by rank, the words that its command starts with; interfaces: by rank, the one it talks over ("": any);
    per_node: ranks that share a machine (0: all)."""

    prefixes: tuple[tuple[str, ...], ...]
    interfaces: tuple[str, ...]
    address: str = "127.0.0.1"
    per_node: int = 0

    def run(self, command: Sequence[str]) -> str:
        """The output of rank 0 when every rank runs a command of this Python. Raises WorkersFailed."""
        with socket.socket() as free:
            free.bind(("", 0))
            port = str(free.getsockname()[1])
        size = len(self.prefixes)
        per_node = self.per_node or size
        shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(per_node)}
        shared |= {"MASTER_ADDR": self.address, "MASTER_PORT": port}
        processes = []
        for rank, (prefix, interface) in enumerate(zip(self.prefixes, self.interfaces, strict=True)):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank % per_node), "OMP_NUM_THREADS": "1"}
            own |= {"GROUP_RANK": str(rank // per_node)}
            own |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
            processes.append(
                subprocess.Popen(
                    [*prefix, sys.executable, *command],
                    env={**os.environ, **shared, **own},
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    text=True,
                )
            )
        printed, _ = processes[0].communicate()
        failed = max((process.wait() for process in processes), key=abs)
        if failed:
            raise WorkersFailed(failed)
        return printed or ""


def _run(*words: str) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def ranks_on(count: int, mbit: float | None, per_node: int = 1) -> Iterator[Ranks]:
    """So many ranks, with links of so many Mbit/s between each so many of them (None: as processes of one machine)."""
    if mbit is None:
        yield Ranks(((),) * count, ("",) * count)
        return
    names = [f"ap{os.getpid()}r{node}" for node in range(count // per_node)]
    bridge = f"ap{os.getpid()}"
    shape = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "100ms"]
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for node, name in enumerate(names):
            inside, port = ("ip", "netns", "exec", name), f"{bridge}p{node}"
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _run("ip", "link", "set", port, "master", bridge)
            _run(*inside, "ip", "addr", "add", f"10.213.7.{node + 1}/24", "dev", INTERFACE)
            for prefix, device in (((), port), (inside, INTERFACE)):
                _run(*prefix, "ip", "link", "set", device, "up")
                _run(*prefix, "tc", "qdisc", "add", "dev", device, *shape)
            _run(*inside, "ip", "link", "set", "lo", "up")
        prefixes = tuple(("ip", "netns", "exec", names[rank // per_node]) for rank in range(count))
        yield Ranks(prefixes, (INTERFACE,) * count, "10.213.7.1", per_node if per_node > 1 else 0)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", bridge], check=False, stderr=subprocess.DEVNULL)
