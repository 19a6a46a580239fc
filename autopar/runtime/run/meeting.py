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
import queue
import socket
import threading
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..comm.environment import LaunchError, Started, check_name, no_answer, place_text, started
from ..data.datafile import parse_json
from ..errors import CollectiveTimeout

POLL_S = 0.02
GRACE_S = 5.0
"""Seconds beyond the limit that torch has to say itself what is wrong."""
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torch's rendezvous reads."""


def joined(timeout_s: float) -> tuple[dist.Store, int]:
    """The store of this round's workers, and this one's rank among them, as torchrun counts (a worker that was not started by it
    is alone). Raises LaunchError, CollectiveTimeout."""
    own, timeout = started(), timedelta(seconds=timeout_s)
    check_name(own.master)
    for name, value in zip(_VARIABLES, (own.rank, own.ranks, own.master, own.port), strict=True):
        os.environ[name] = str(value)
    try:
        store, rank, world_size = _rendezvous(timeout_s)
        store.set_timeout(timeout)
        return dist.PrefixStore(meet(store, rank, world_size, timeout_s), store), rank
    except dist.DistError as error:
        raise _cannot_meet(own, error, timeout_s) from None


def _rendezvous(timeout_s: float) -> tuple[dist.Store, int, int]:
    """The store of torch's rendezvous, which waits for ever where somebody listens and says nothing. Raises dist.DistError."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))))
        except dist.DistError as error:
            answers.put(error)

    threading.Thread(target=ask, name="rendezvous", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_s + GRACE_S)
    except queue.Empty:
        raise dist.DistNetworkError(f"it has said nothing for {timeout_s + GRACE_S:g} s") from None
    if isinstance(answer, dist.DistError):
        raise answer
    found: tuple[dist.Store, int, int] = answer
    return found


def _cannot_meet(own: Started, error: Exception, timeout_s: float) -> LaunchError:
    """Why there is no store to meet in."""
    place, first = place_text(own.master, own.port), str(error).splitlines()[0][:200]
    if "EADDRINUSE" in first or "already in use" in first:
        return LaunchError(
            f"rank {own.rank}: port {own.port} is taken on this machine; set MASTER_PORT (torchrun --master-port) to a free one, "
            "the same on every machine; ss -ltnp shows who has it"
        )
    if own.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return LaunchError(
            f"rank 0: not all of {own.ranks} ranks came to {place} in {timeout_s:g} s (--timeout); see that the others were "
            "started, and that MASTER_ADDR and MASTER_PORT are this machine's, the same everywhere"
        )
    try:
        socket.create_connection((own.master, own.port), 5.0).close()
    except OSError as problem:
        evidence, remedy = no_answer(problem)
        return LaunchError(f"rank {own.rank}: {place} {evidence}, for {timeout_s:g} s (--timeout); {remedy}")
    return LaunchError(
        f"rank {own.rank}: no store to meet in at {place}, though somebody listens there ({first}); does another program have "
        "that port? Set MASTER_ADDR and MASTER_PORT to the first machine's, the same everywhere"
    )


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
    """The token of a round in which rank 0 has met every rank, by the roster that it writes. Raises CollectiveTimeout."""
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


def default_store() -> dist.Store:
    """The store of the default process group, whoever made it."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def told(store: dist.Store, what: str, rank: int, ranks: int, own: Any, timeout_s: float, question: str) -> list[Any]:
    """The plain value that every rank tells, by rank. what: a key that the store lacks; question: that all answer, in words.
    Raises CollectiveTimeout."""
    keys = [f"{what}/{other}" for other in range(ranks)]
    try:
        store.set(keys[rank], json.dumps(own))
        store.wait(keys, timedelta(seconds=timeout_s))
        return [parse_json(said.decode()) for said in store.multi_get(keys)]
    except RuntimeError as error:
        raise CollectiveTimeout(
            f"rank {rank}: not all of {ranks} ranks said in {timeout_s:g} s {question} "
            f"({str(error).splitlines()[0]}); did they all start?"
        ) from error


def _roster(names: dist.Store) -> list[str]:
    """Names by rank, and the token; empty where there is none."""
    if not names.check(["roster"]):
        return []
    roster: list[str] = json.loads(names.get("roster"))
    return roster
