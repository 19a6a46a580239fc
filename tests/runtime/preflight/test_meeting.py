"""Workers of a round find each other in a store where those of earlier rounds have left their traces."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch.distributed as dist

from autopar.runtime.errors import CollectiveTimeout
from autopar.runtime.run.meeting import meet


def met(store: dist.Store, size: int, late: int = -1, delay_s: float = 0.3) -> list[str]:
    """The token that every rank of a round is told; the late one comes after the others."""
    tokens = [""] * size

    def worker(rank: int) -> None:
        if rank == late:
            time.sleep(delay_s)
        tokens[rank] = meet(store, rank, size, 20.0)

    threads = [threading.Thread(target=worker, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tokens


def test_rounds_have_tokens_of_their_own():
    store = dist.HashStore()
    rounds = [met(store, size) for size in (4, 4, 2, 4, 1, 1)]
    assert all(len(set(tokens)) == 1 for tokens in rounds)
    assert len({tokens[0] for tokens in rounds}) == len(rounds)


@pytest.mark.parametrize("late", range(3))
def test_the_name_of_a_dead_worker_is_not_taken_for_a_live_one(late):
    """All names of the round before, the roster, its count and whether it is open are there; one rank comes late, so
    that its old name is read first."""
    store = dist.HashStore()
    before = met(store, 3)
    after = met(store, 3, late)
    assert len(set(after)) == 1
    assert after[0] != before[0]


def test_a_worker_that_died_while_it_was_called_is_replaced():
    """Rank 1 said its name, was called, confirmed, and died; another one takes its rank before rank 2 comes at all."""
    store = dist.HashStore()
    names = dist.PrefixStore("meet/3", store)
    tokens: dict[int, str] = {}

    def worker(rank: int) -> None:
        tokens[rank] = meet(store, rank, 3, 20.0)

    threads = [threading.Thread(target=worker, args=(rank,)) for rank in (0,)]
    threads[0].start()
    names.set("1", "dead")
    names.set("2", "dead too")
    while not names.check(["roster"]):
        time.sleep(0.01)
    first = json.loads(names.get("roster"))
    assert first[1:3] == ["dead", "dead too"]
    names.add(f"{first[-1]}/count", 1)
    threads += [threading.Thread(target=worker, args=(rank,)) for rank in (1, 2)]
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(tokens.values())) == 1
    assert tokens[0] != first[-1]


def test_who_is_missing_is_named():
    store = dist.HashStore()
    with pytest.raises(CollectiveTimeout, match="ranks 1, 2 never came"):
        meet(store, 0, 3, 0.2)
    with pytest.raises(CollectiveTimeout, match="rank 2: rank 0 did not call it up"):
        meet(dist.HashStore(), 2, 3, 0.2)
