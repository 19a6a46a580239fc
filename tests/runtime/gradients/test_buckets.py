"""How large buckets are: early messages, and little that is sent when backward is over."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from autopar.runtime import GradEntry, GradStore, run_threads
from autopar.runtime.comm.mesh import Shares, interval
from autopar.runtime.comm.reshard import TableStep
from autopar.runtime.gradients.bucket_sizes import BucketSizes, bytes_in_buckets
from autopar.runtime.gradients.buckets import Buckets
from autopar.runtime.gradients.runs import Run, ends, ends_are_small
from tests.runtime import stages
from tests.runtime.scenarios import train

ALL_REDUCE = ("all_reduce", "a")
LOSS_BYTES = 8
SIZES = {"a": 2, "b": 4}


def sent_bytes(
    count: int, elements: int, sizes: BucketSizes, owned: bool = False, step: TableStep = ALL_REDUCE
) -> list[int]:
    """Bytes of the messages that so many equal float32 gradients leave in, in their order."""
    messages: list[int] = []

    def body(comm):
        launch = comm._start
        if comm.rank == 0:
            comm._start = lambda call: messages.append(call.inp.numel() * 4) or launch(call)
        store = GradStore(comm, {f"g{i}": GradEntry(1, (step,)) for i in range(count)}, sizes=sizes)
        for i in range(count):
            store.add(f"g{i}", torch.ones(elements), owned)
        assert all(grad.unique().tolist() == [2.0] for grad in store.finish().values())

    run_threads(2, {"a": 2}, body, timeout_s=30)
    return messages


def test_no_bucket_has_more_than_half_of_what_is_left():
    sent = sent_bytes(64, 64, BucketSizes(full=1 << 20, first=256, least=256, step=64 * 256))
    assert sum(sent) == 64 * 256
    assert sent[0] == 256
    for place in range(1, len(sent) - 1):
        assert sent[place] <= sum(sent[place:]) / 2 + 256
    assert sent[-1] <= 2 * 256


def test_buckets_of_a_large_step_are_full():
    sent = sent_bytes(64, 64, BucketSizes(full=1024, first=256, least=256, step=64 * 256))
    assert sent[1:-3].count(1024) >= 10
    assert max(sent) == 1024


def test_without_a_known_step_buckets_are_full():
    assert sent_bytes(9, 64, BucketSizes(full=1024, first=256)) == [256, 1024, 1024]


def test_a_gradient_as_large_as_a_bucket_of_its_time_travels_alone():
    sizes = BucketSizes(full=1 << 20, first=512, least=512, step=4 * 1024)
    assert sent_bytes(4, 256, sizes, owned=True) == [1024, 2048, 1024]


def test_a_gradient_that_fills_a_late_bucket_is_scattered_alone_and_no_smaller_one():
    sizes = BucketSizes(full=1 << 20, first=256, direct=1024, least=1024)
    scatter = ("reduce_scatter", "a", 0)
    assert sent_bytes(2, 256, sizes, step=scatter) == [1024, 1024]
    assert sent_bytes(4, 128, sizes, step=scatter) == [512, 3 * 512]
    assert BucketSizes.direct == BucketSizes.least


# --- runs of a block that does not divide


def runs(
    steps: tuple[TableStep, ...], sizes: BucketSizes, sent: list[int], block: tuple[int, ...] = (5, 5)
) -> list[torch.Tensor]:
    """Every rank of a=2 × b=3 has, after steps, this of a float64 gradient that is (rank + 1) times its elements' numbers. sent:
    takes elements of rank 0's messages."""
    elements = math.prod(block)

    def body(comm):
        launch = comm._start
        if comm.rank == 0:
            comm._start = lambda call: sent.append(call.inp.numel()) or launch(call)
        store = GradStore(comm, {"g": GradEntry(1, steps), "other": GradEntry(1, steps)}, sizes=sizes)
        for name in store.table:
            store.add(name, (comm.rank + 1) * torch.arange(1.0, elements + 1, dtype=torch.float64).view(block))
        return store.finish()["g"]

    return run_threads(6, {"a": 2, "b": 3}, body, timeout_s=30)


SMALL = BucketSizes(full=48, first=48, direct=48, least=48)
"""Sizes in bytes at which a block of 25 elements travels alone, in parts."""
WITH_ENDS = BucketSizes(full=1 << 20, first=48, direct=1000, least=1000)
"""The same for blocks of 125 and more elements, which travel where they lie, the ends of their runs in buckets."""


@pytest.mark.parametrize("sizes", [SMALL, WITH_ENDS, BucketSizes()])
@pytest.mark.parametrize("block", [(5, 5), (125, 25)])
@pytest.mark.parametrize(
    ("steps", "factors"),
    [
        ((("reduce_scatter", ("a",), 0), ("reduce_scatter", ("b",), 0)), [21] * 6),
        ((("shard", ("a",), 0), ("reduce_scatter", ("b",), 0)), [6] * 3 + [15] * 3),
        ((("reduce_scatter", ("a",), 0), ("shard", ("b",), 0)), [5, 7, 9] * 2),
        ((("shard", ("a",), 0), ("shard", ("b",), 0)), [1, 2, 3, 4, 5, 6]),
    ],
)
def test_runs_of_a_block_that_does_not_divide_are_its_elements_in_order(
    sizes: BucketSizes, block: tuple[int, ...], steps: tuple[TableStep, ...], factors: list[int]
) -> None:
    elements = torch.arange(1.0, math.prod(block) + 1, dtype=torch.float64)
    length = -(-len(elements) // 6)
    filled = torch.cat([elements, elements.new_zeros(6 * length - len(elements))])
    for rank, run in enumerate(runs((("flatten", ("a", "b"), *block), *steps), sizes, [], block)):
        assert run.tolist() == (factors[rank] * filled.view(6, length, 1)[rank]).tolist()


def test_a_large_block_that_does_not_divide_is_sent_where_it_lies_and_the_ends_of_its_runs_beside() -> None:
    sent: list[int] = []
    steps = (("flatten", ("a", "b"), 25, 25), ("reduce_scatter", ("a",), 0), ("reduce_scatter", ("b",), 0))
    runs(steps, WITH_ENDS, sent, (25, 25))
    assert sorted(sent) == [2 * 2 * 3 * 2, 315, 315, 624, 624]  # of both gradients, their chunks are of 312 elements


def test_where_ends_are_not_small_a_block_is_sent_in_parts() -> None:
    """Their message would be as large as one that is sent alone."""
    sent: list[int] = []
    steps = (("flatten", ("a", "b"), 25, 25), ("reduce_scatter", ("a",), 0), ("reduce_scatter", ("b",), 0))
    runs(steps, SMALL, sent, (25, 25))
    assert sent[:16] == [40] * 15 + [30]  # of 630 elements with those that fill up, the runs of both ranks side by side
    sent.clear()
    runs(steps, replace(SMALL, full=2 * 100 * 8), sent, (25, 25))
    assert sent[:4] == [200, 200, 200, 30]


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("again", [1, 2, 3])
def test_chunks_and_ends_of_any_block_join_to_its_runs(ranks: int, again: int) -> None:
    """again: parts in which every run is cut further, so that it may lack more than one element of a chunk."""
    for elements in range(ranks, 400, 7):
        length = again * -(-elements // (ranks * again))
        value = torch.arange(1.0, elements + 1).view(-1, 1)
        if length * ranks == elements or not ends_are_small(value, ranks, length, 1 << 20):
            continue
        chunk, rows = elements // ranks, ends(value, ranks, length).view(ranks, -1, 1)
        whole = torch.cat([value, value.new_zeros(ranks * length - elements, 1)]).view(ranks, length, 1)
        for rank in range(ranks):
            run = Run(length, rank)
            assert run.joined("end", rows[rank]) is None
            joined = run.joined("chunk", value[rank * chunk : (rank + 1) * chunk])
            assert joined is not None
            assert torch.equal(joined, whole[rank])


def test_a_shard_of_runs_holds_no_memory_of_the_block() -> None:
    steps = (("flatten", ("a", "b"), 5, 5), ("shard", ("a",), 0), ("shard", ("b",), 0))
    assert all(run.untyped_storage().nbytes() == 5 * 8 for run in runs(steps, BucketSizes(), []))


@pytest.mark.parametrize(
    ("steps", "want"),
    [
        ((), 0),
        ((("all_reduce", "a"),), 64),
        ((("reduce_scatter", "b", 0),), 256),
        ((("reduce_scatter", "b", 0), ("all_reduce", "a")), 256 + 64),
        ((("shard", "b", 0), ("all_reduce", "a")), 64),
        ((("all_reduce", "a"), ("shard", "b", 0)), 256),
        ((("reduce_scatter", "b", 0), ("all_gather", "a", 0)), 128),
        ((("all_reduce", "one"),), 0),
    ],
)
def test_bytes_in_buckets_follow_the_steps_back_from_the_shard(steps, want):
    assert bytes_in_buckets(64, steps, lambda axes: SIZES.get(axes, 1)) == want


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2)])
def test_what_a_step_sends_is_known_before_it(monkeypatch, dp, tp, zero):
    """All that goes into buckets, but for the loss, which goes with the first."""
    known: list[tuple[int, int]] = []
    clear = Buckets.clear

    def noted(buckets: Buckets) -> None:
        assert buckets.sizes.step is not None
        known.append((buckets.sizes.step, buckets._sent))
        clear(buckets)

    monkeypatch.setattr(Buckets, "clear", noted)
    program = stages.mlp(dp, tp, zero)
    run_threads(dp * tp, program.mesh, lambda comm: train(comm, program, 2), timeout_s=60)
    assert known
    for step, sent in known:
        assert step > 0
        assert 0 <= sent - step <= LOSS_BYTES


@pytest.mark.parametrize(
    ("mesh", "steps"),
    [
        ({"dp": Shares((2, 1))}, [(("all_reduce", ("dp",)), ("shard", ("dp",), 0))]),
        ({"dp": 2, "tp": Shares((5, 1))}, [(("all_reduce", ("dp",)),), (("all_reduce", ("tp",)),)]),
    ],
    ids=["shards of unequal length", "blocks of unequal length, and what is owed along their axis"],
)
def test_ranks_with_unequal_parts_send_the_same_buckets(mesh, steps):
    """A message of one rank would meet a longer one else. The second mesh has blocks of 5 and of 1 row over tp, whose messages
    come between those of whole values."""
    rows, columns = 6, 4096
    specs = {("dp",): (("dp",), ()) if len(steps[0]) > 1 else (("tp",), ()), ("tp",): ((), ())}
    values = [(f"p{i}", (rows, columns), specs[one[0][1]], 4, one) for i, one in enumerate(12 * steps)]

    def run(comm):
        sizes = replace(BucketSizes.of(values, comm.mesh), full=1 << 20, first=1 << 18, direct=1 << 30, least=1 << 16)
        store = GradStore(comm, {name: GradEntry(1, one) for name, *_, one in values}, sizes=sizes)
        for name, _, spec, _, one in values:
            axes = () if len(one) > 1 else spec[0]
            start, stop = interval(rows, axes, comm.mesh, comm.position)
            store.add(name, torch.ones(stop - start, columns), True)
        sums = store.finish()
        return all((sums[name] == comm.axis_size(one[0][1])).all() for name, *_, one in values)

    assert all(run_threads(math.prod(mesh.values()), mesh, run, timeout_s=30))
