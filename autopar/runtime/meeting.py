"""How the workers of one round find each other in a store that outlives them.

torchrun keeps its store when it starts workers again, after a failure or because machines came or went, and says nowhere
which round it is: what it counts are failures seen by one machine. So keys of workers that are dead are still there, and ranks
that trust them wait for nobody. Here every worker gives itself a name that no other ever has and writes it under its
rank. Rank 0 reads all names and writes a roster with a token of its own; who finds its name there adds to the
token's count; when all did, rank 0 opens the token. A roster with the name of a dead worker is never confirmed:
the live one of that rank writes its own name over it, rank 0 sees that and writes another roster.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from .errors import CollectiveTimeout

POLL_S = 0.02


def joined(timeout_s: float) -> tuple[dist.Store, int]:
    """The store of this round's workers, and this one's rank among them, as torchrun counts (a worker that was not started by it
    is alone). Raises CollectiveTimeout."""
    timeout = timedelta(seconds=timeout_s)
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0" if os.environ["WORLD_SIZE"] == "1" else "29500")
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    store.set_timeout(timeout)
    return dist.PrefixStore(meet(store, rank, world_size, timeout_s), store), rank


def meet(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> str:
    """A name for this round that all its workers, and no others, have. Raises CollectiveTimeout naming who is missing."""
    own, end = uuid.uuid4().hex, time.monotonic() + timeout_s
    names = dist.PrefixStore(f"meet/{world_size}", store)
    names.set(str(rank), own)
    if rank == 0:
        return _call(names, world_size, end, timeout_s)
    while time.monotonic() < end:
        roster = _roster(names)
        if len(roster) > rank and roster[rank] == own:
            token = roster[-1]
            names.add(f"{token}/count", 1)
            while time.monotonic() < end:
                if names.check([f"{token}/open"]):
                    return token
                if _roster(names) != roster:
                    break
                time.sleep(POLL_S)
        time.sleep(POLL_S)
    raise CollectiveTimeout(f"rank {rank}: rank 0 did not call it up in {timeout_s:g} s; did it start?")


def _call(names: dist.Store, world_size: int, end: float, timeout_s: float) -> str:
    """What rank 0 does."""
    keys = [str(rank) for rank in range(world_size)]
    while time.monotonic() < end:
        if not names.check(keys):
            time.sleep(POLL_S)
            continue
        known = [name.decode() for name in names.multi_get(keys)]
        token = uuid.uuid4().hex
        names.set("roster", json.dumps([*known, token]))
        while time.monotonic() < end and [name.decode() for name in names.multi_get(keys)] == known:
            if names.add(f"{token}/count", 0) == world_size - 1:
                names.set(f"{token}/open", "1")
                return token
            time.sleep(POLL_S)
    missing = [key for key in keys if not names.check([key])]
    who = f"ranks {', '.join(missing[:8])} never came" if missing else "some ranks were named that are no more"
    raise CollectiveTimeout(f"rank 0: not all of {world_size} ranks met in {timeout_s:g} s: {who}")


def _roster(names: dist.Store) -> list[str]:
    """Names by rank, and the token; empty where there is none."""
    if not names.check(["roster"]):
        return []
    roster: list[str] = json.loads(names.get("roster"))
    return roster
