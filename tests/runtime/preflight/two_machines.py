"""Two machines on this one: network, host name and mounts of their own, joined by a cable (10.9.0.1 - 10.9.0.2).

Namespaces of a user need no rights of root where the system allows them (`possible`).
"""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.warm import python

CABLE = """
set -e
hostname alpha
printf '127.0.0.1 localhost\n10.9.0.1 alpha\n10.9.0.2 beta\n' > "$DIR/hosts"
mount --bind "$DIR/hosts" /etc/hosts
ip link set lo up
ip link add cable type veth peer name cableb
unshare --net --uts --mount bash -c 'hostname beta; ip link set lo up; touch "$0/up"; exec sleep 600' "$DIR" &
B=$!
trap 'kill $B' EXIT
until [ -e "$DIR/up" ]; do sleep 0.02; done
ip link set cableb netns $B
on_b() { nsenter --target $B --net --uts --mount bash -c "$1"; }
ip addr add 10.9.0.1/24 dev cable
ip link set cable up
on_b 'ip link set cableb name cable; ip addr add 10.9.0.2/24 dev cable; ip link set cable up'
"""


@dataclass(frozen=True, repr=False)
class Ended:
    """A process of one machine."""

    status: int
    out: str

    def __repr__(self) -> str:
        return f"status {self.status}:\n{self.out}"

    def has(self, *words: str) -> bool:
        """Whether one line says all of it."""
        return any(all(word in line for word in words) for line in self.out.splitlines())


@functools.cache
def possible() -> bool:
    """Whether this system lets a user have such machines."""
    try:
        probe = (
            "ip link add a0 type veth peer name b0 && tc qdisc add dev a0 root tbf rate 1mbit burst 9kbit latency 9ms"
        )
        command = ["unshare", "-Ur", "--net", "--uts", "--mount", "bash", "-c", probe]
        return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def on_two(
    folder: Path,
    commands: Sequence[Sequence[str]],
    *,
    setup: str = "",
    environments: Sequence[Mapping[str, str]] = ({}, {}),
    master: str = "10.9.0.1",
) -> tuple[list[Ended], float]:
    """Run a command as the one rank of each machine; how they ended, and seconds of the longest. setup: bash, on the first
    machine (`on_b '…'` on the second). An empty command is not started."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    shared = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    shared |= {"MASTER_ADDR": master, "MASTER_PORT": "29511"}
    lines = [CABLE, setup]
    for rank, (command, own) in enumerate(zip(commands, environments, strict=True)):
        if command:
            values = shared | {"RANK": str(rank)} | dict(own)
            said = " ".join(f"{name}={shlex.quote(value)}" for name, value in values.items())
            inner = f"env {said} {shlex.join(command)} > {folder}/out{rank} 2>&1; echo $? > {folder}/status{rank}"
            lines.append(f"{'on_b ' + shlex.quote(inner) if rank else 'bash -c ' + shlex.quote(inner)} & W{rank}=$!")
    lines += [f"wait $W{rank} || true" for rank, command in enumerate(commands) if command]
    script = ["unshare", "-Ur", "--net", "--uts", "--mount", "bash", "-c", "\n".join(lines)]
    start = time.monotonic()
    done = subprocess.run(
        script, capture_output=True, text=True, timeout=120, env=environment | {"DIR": str(folder)}, check=False
    )
    seconds = time.monotonic() - start
    (folder / "up").unlink(missing_ok=True)
    ended = []
    for rank, command in enumerate(commands):
        if command:
            status = folder / f"status{rank}"
            assert status.exists(), done.stdout + done.stderr
            ended.append(Ended(int(status.read_text()), (folder / f"out{rank}").read_text()))
            status.unlink()
        else:
            ended.append(Ended(-1, ""))
    return ended, seconds


def looking(program: Path, *arguments: str, executable: str = "") -> list[str]:
    """The command that looks at the machines for a program."""
    return [executable or python(), str(program / "run.py"), "--preflight", "--timeout", "6", *arguments]
