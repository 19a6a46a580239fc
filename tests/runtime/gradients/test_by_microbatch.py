"""Gradients that are reduced after every microbatch: the same sums, more messages, and shards alone that rest in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.counter import ByteCounter
from autopar.runtime import GradEntry, GradStore, run_threads
from autopar.runtime.gradients.bucket_sizes import BucketSizes
from tests.runtime import scenarios

SCATTER = (("reduce_scatter", ("a",), 0),)
N, RANKS, MICROBATCHES = 1 << 14, 4, 6


@pytest.mark.few(4)
@pytest.mark.parametrize("some", ["all", "every second one"])
@pytest.mark.parametrize("sizes", [(1, 1 << 30), (1 << 12, 1 << 14), (1 << 30, 1 << 30), (1 << 12, 1)], ids=str)
def test_sums_are_those_of_gradients_that_are_reduced_once(sizes: tuple[int, int], some: str) -> None:
    once = run_threads(4, scenarios.MESH, lambda comm: scenarios.gradients(comm, *sizes), timeout_s=60)

    def body(comm: Any) -> Any:
        return scenarios.gradients(comm, *sizes, by_microbatch=lambda index: some == "all" or index % 2 == 0)

    for wanted, got in zip(once, run_threads(4, scenarios.MESH, body, timeout_s=60), strict=True):
        assert wanted.keys() == got.keys()
        for name in wanted:
            torch.testing.assert_close(got[name], wanted[name], rtol=1e-13, atol=1e-13)


def accumulated(
    comm: Any, entry: GradEntry, compensated: bool = False, count: int = MICROBATCHES
) -> tuple[torch.Tensor, list[int], list[tuple[str, int]]]:
    """A gradient of many microbatches, the bytes that the store holds after each, and its messages (kind, elements)."""
    calls: list[tuple[str, int]] = []
    start = comm._start
    comm._start = lambda call: calls.append((call.kind, call.inp.numel())) or start(call)
    store = GradStore(comm, {"w": entry}, count, BucketSizes(), compensated)
    held = []
    with ByteCounter() as counter:
        for microbatch in range(count):
            for part in range(entry.contributions):
                value = torch.full((N,), 1.0 + comm.rank + 10 * microbatch + 100 * part, dtype=torch.float32)
                store.add("w", value, owned=True)
                del value
            held.append(counter.alive)
        total = store.finish()["w"].clone()
    return total, held, calls


@pytest.mark.parametrize("compensated", [False, True])
@pytest.mark.parametrize("contributions", [1, 3])
def test_a_shard_rests_between_microbatches(contributions: int, compensated: bool) -> None:
    """Beside the sum of shards, and what compensation keeps of it, messages of two microbatches are under way."""
    entry = GradEntry(contributions, SCATTER, torch.float32, by_microbatch=True)
    results = run_threads(RANKS, {"a": RANKS}, lambda comm: accumulated(comm, entry, compensated), timeout_s=60)
    wanted = sum(
        1.0 + rank + 10 * microbatch + 100 * part
        for rank in range(RANKS)
        for microbatch in range(MICROBATCHES)
        for part in range(contributions)
    )
    whole, shard = 4 * N, 4 * N // RANKS
    for total, held, calls in results:
        assert torch.equal(total, torch.full((N // RANKS,), wanted))
        assert calls == [("reduce_scatter", N)] * MICROBATCHES
        under_way = 2 * (whole + shard) + (1 + compensated) * shard  # of two messages
        assert max(held[:-1]) <= under_way
        assert held[-1] <= under_way + whole  # the last one waits for what a bucket may still be filled with


def test_compensation_keeps_what_shards_lose() -> None:
    """Addends of which every second one is lost in float32: a compensated sum of shards has them all."""

    def body(comm: Any, compensated: bool) -> torch.Tensor:
        entry = GradEntry(1, SCATTER, torch.float32, by_microbatch=True)
        store = GradStore(comm, {"w": entry}, 9, BucketSizes(), compensated)
        for microbatch in range(9):
            store.add("w", torch.full((4,), 2.0**24 if microbatch == 0 else 0.5), owned=True)
        return store.finish()["w"].clone()

    for compensated, wanted in ((False, 2.0**25), (True, 2.0**25 + 8)):
        for total in run_threads(2, {"a": 2}, lambda comm, c=compensated: body(comm, c), timeout_s=60):
            assert torch.equal(total, torch.full((2,), wanted))


def test_one_microbatch_is_as_it_was() -> None:
    entry = GradEntry(1, SCATTER, by_microbatch=True)
    for total, _, calls in run_threads(2, {"a": 2}, lambda comm: accumulated(comm, entry, count=1), timeout_s=60):
        assert calls == [("reduce_scatter", N)]
        assert torch.equal(total, torch.full((N // 2,), 3.0))
