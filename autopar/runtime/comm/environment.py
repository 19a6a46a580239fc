"""Variables that torchrun, or whoever starts ranks, sets in the environment, read once and named where one is wrong.

    RANK < WORLD_SIZE                which of how many ranks this is
    LOCAL_RANK < LOCAL_WORLD_SIZE    the same on this machine
    MASTER_ADDR, MASTER_PORT         where all meet, which rank 0 (or torchrun) listens at

Without any of them a process is alone.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ..data.schema import MOST_RANKS, shown
from ..errors import RuntimeProgramError

MASTER_PORT = 29500


class LaunchError(RuntimeProgramError):
    """Ranks were started in a way in which they cannot find each other."""


@dataclass(frozen=True)
class Started:
    """This process among the others. port: 0 for any free one, where it is alone."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    master: str
    port: int


def machine_name() -> str:
    """The name of this machine as whoever starts jobs calls it: Slurm's name of the node, or AUTOPAR_MACHINE, or its
    host name."""
    own = os.environ.get("AUTOPAR_MACHINE") or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return re.sub(r"[^A-Za-z0-9._-]", "_", own)


def whole(environment: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """A variable that is a whole number. Raises LaunchError."""
    words = environment.get(name)
    if words is None:
        return default
    if not (words.isascii() and words.strip().isdigit() and len(words) <= 19 and least <= int(words) <= most):
        raise LaunchError(
            f"{name} is {shown(words)} in the environment, and must be a whole number from {least} to {most}; torchrun sets it: "
            "start with torchrun, or unset it, or set what torchrun would"
        )
    return int(words)


def started(environment: Mapping[str, str] | None = None) -> Started:
    """The rank, the number of ranks and the meeting place that the environment names. Raises LaunchError."""
    said = os.environ if environment is None else environment
    ranks = whole(said, "WORLD_SIZE", 1, 1, MOST_RANKS)
    rank = whole(said, "RANK", 0, 0, MOST_RANKS)
    local_ranks = whole(said, "LOCAL_WORLD_SIZE", ranks, 1, MOST_RANKS)
    local_rank = whole(said, "LOCAL_RANK", 0, 0, MOST_RANKS)
    port = whole(said, "MASTER_PORT", 0 if ranks == 1 else MASTER_PORT, 0, 65535)
    if rank >= ranks:
        counted = "it" if "WORLD_SIZE" in said else "it, which is not set,"
        raise LaunchError(
            f"RANK is {rank} and WORLD_SIZE {ranks}: ranks are counted from 0 and are fewer than {counted} says; start "
            "with torchrun, or set both alike on all machines"
        )
    if ranks > 1 and "RANK" not in said:
        raise LaunchError(
            f"WORLD_SIZE is {ranks}, but RANK is not set; start with torchrun, or set RANK to another number from 0 to "
            f"{ranks - 1} for every process"
        )
    if local_rank >= local_ranks:
        raise LaunchError(
            f"LOCAL_RANK is {local_rank} and LOCAL_WORLD_SIZE {local_ranks}: ranks of a machine are counted from 0; start with "
            "torchrun, or set both alike on this machine"
        )
    return Started(rank, ranks, local_rank, local_ranks, said.get("MASTER_ADDR") or "127.0.0.1", port)


def check_name(master: str) -> None:
    """Raises LaunchError where this machine knows no address of that name."""
    try:
        socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise LaunchError(
            f"MASTER_ADDR {shown(master)} is no name that this machine knows; set MASTER_ADDR to the first machine's address"
        ) from None


def no_answer(error: OSError) -> tuple[str, str]:
    """A text of what is wrong with an address where nobody answers, and one of what to do."""
    if isinstance(error, socket.gaierror):
        return "is no name that this machine knows", "set MASTER_ADDR to the first machine's address"
    if error.errno == errno.ECONNREFUSED:
        return (
            "refuses: the machine is there, but nobody listens",
            "start the first machine too, with the same MASTER_PORT; see that MASTER_ADDR is its address",
        )
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return (
            f"is out of reach ({error.strerror})",
            "set MASTER_ADDR to an address in a network that the machines share",
        )
    return "did not answer", "open that port in the first machine's firewall, or set another MASTER_PORT"


def place_text(master: str, port: int) -> str:
    """An address and a port as people write them."""
    return f"[{master}]:{port}" if ":" in master else f"{master}:{port}"
