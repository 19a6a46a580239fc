"""Where all ranks of a preflight meet, and how they tell each other what they know: for so many seconds, and no longer."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..comm.environment import no_answer, place_text
from .facts import Place
from .finding import Finding

END_S = 3.0
"""Seconds that a rank waits for the others at the end."""
POLL_S = 0.05


class CannotMeet(Exception):
    """The store where all meet is out of reach."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding


def meeting_store(place: Place, wait_s: float) -> dist.Store:
    """The job's store: that of torchrun, or of the first machine. Raises CannotMeet."""
    timeout = timedelta(seconds=wait_s)
    hosts_it = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") != "True"
    where = f"rank {place.rank} ({socket.gethostname()})"
    if not hosts_it:
        _await_port(place, wait_s, where)
    try:
        store: dist.Store = dist.TCPStore(
            place.master, place.port, None, is_master=hosts_it, timeout=timeout, wait_for_workers=False
        )
    except RuntimeError as error:
        in_use = hosts_it and ("EADDRINUSE" in str(error) or "in use" in str(error))
        remedy = "set MASTER_PORT to a free one, the same on every machine; ss -ltnp shows who has it" if in_use else ""
        raise CannotMeet(
            Finding(
                "port in use" if in_use else "meeting place",
                where,
                f"{place.master}:{place.port}: {str(error).splitlines()[0][:200]}",
                remedy or "set MASTER_ADDR and MASTER_PORT to the first machine's, the same everywhere",
            )
        ) from error
    round_name = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"preflight/{round_name}", store)


def _await_port(place: Place, wait_s: float, where: str) -> None:
    """Wait until somebody listens where all meet. Raises CannotMeet with what is wrong on the way there."""
    end = time.monotonic() + wait_s
    last: OSError = TimeoutError("")
    while time.monotonic() < end:
        try:
            socket.create_connection((place.master, place.port), min(5.0, wait_s)).close()
            return
        except socket.gaierror as error:
            last = error
            break
        except OSError as error:
            last = error
            time.sleep(0.2)
    evidence, remedy = no_answer(last)
    finding = Finding(
        "closed port", where, f"{place_text(place.master, place.port)} {evidence} for {wait_s:.0f} s", remedy
    )
    raise CannotMeet(finding)


class Meeting:
    """All ranks say something, and hear what all said, in turns that have names."""

    def __init__(self, store: dist.Store, rank: int, ranks: int, wait_s: float) -> None:
        self.store, self.rank, self.ranks, self.wait_s = store, rank, ranks, wait_s

    def say(self, turn: str, value: Mapping[str, Any]) -> dict[int, list[dict[str, Any]]]:
        """By rank what every process that said to be it has said; nothing of ranks that did not come in time."""
        number = self.store.add(f"{turn}/{self.rank}/count", 1)
        self.store.set(f"{turn}/{self.rank}/{number}", json.dumps(value))
        keys = [f"{turn}/{rank}/1" for rank in range(self.ranks)]
        end = time.monotonic() + self.wait_s
        while not self.store.check(keys) and time.monotonic() < end:
            time.sleep(POLL_S)
        heard: dict[int, list[dict[str, Any]]] = {}
        for rank in range(self.ranks):
            count = self.store.add(f"{turn}/{rank}/count", 0)
            written = [key for n in range(count) if self.store.check([key := f"{turn}/{rank}/{n + 1}"])]
            heard[rank] = [json.loads(self.store.get(key)) for key in written]
        return heard

    def end(self, speaker: int) -> None:
        """This rank reads no more. It waits a little: for the rank that speaks, as torchrun stops all when one ends; and that one
        for all others, as it may have the store."""
        others = [f"end/{rank}" for rank in range(self.ranks) if rank != self.rank]
        with contextlib.suppress(RuntimeError):  # the store may go with the rank that has it
            if self.rank == speaker:
                self.store.set(f"end/{self.rank}", "1")
                self._await(others)
            else:
                self._await([f"end/{speaker}"])
                self.store.set(f"end/{self.rank}", "1")

    def _await(self, keys: Sequence[str]) -> None:
        until = time.monotonic() + END_S
        while not self.store.check(list(keys)) and time.monotonic() < until:
            time.sleep(POLL_S)
