"""The threaded backend: collectives over named axes, and the ways ranks can fail to agree."""

from __future__ import annotations

import threading

import pytest
import torch

from autopar.runtime import CollectiveMismatch, CollectiveTimeout, Comm, RuntimeProgramError, run_threads
from autopar.runtime.comm.comm import group_ranks
from autopar.runtime.comm.mesh import mesh_index
from tests.runtime.scenarios import receive, send

MESH = {"a": 2, "b": 2, "c": 2}


def value(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


@pytest.mark.parametrize("axes", ["a", "b", "c", ("a", "c"), ("c", "a"), ("b", "c", "a")])
def test_collectives_follow_the_order_in_which_axes_are_named(axes):
    names = (axes,) if isinstance(axes, str) else axes

    def ranks_of(rank):
        return group_ranks(MESH, rank, names)

    def body(comm):
        x = value(comm.rank, 8, 8)
        return {
            "sum": comm.all_reduce(x, axes),
            "max": comm.all_reduce(x, axes, op="max"),
            "gather": comm.all_gather(x, 1, axes),
            "scatter": comm.reduce_scatter(x, 1, axes),
            "scatter_min": comm.reduce_scatter(x, -2, axes, op="min"),
            "shard": comm.shard(x, 0, axes),
            "swap": comm.all_to_all(x, 0, 1, axes),
            "first": comm.broadcast(x, axes, index=1),
        }

    results = run_threads(8, MESH, body, timeout_s=30)
    for rank, got in enumerate(results):
        members = ranks_of(rank)
        n, me = len(members), members.index(rank)
        inputs = [value(r, 8, 8) for r in members]
        total = torch.stack(inputs).sum(0)
        torch.testing.assert_close(got["sum"], total, rtol=1e-14, atol=1e-14)
        assert torch.equal(got["max"], torch.stack(inputs).amax(0))
        assert torch.equal(got["gather"], torch.cat(inputs, 1))
        torch.testing.assert_close(got["scatter"], total.chunk(n, 1)[me], rtol=1e-14, atol=1e-14)
        assert torch.equal(got["scatter_min"], torch.stack(inputs).amin(0).chunk(n, 0)[me])
        assert torch.equal(got["shard"], inputs[me].chunk(n, 0)[me])
        assert torch.equal(got["swap"], torch.cat([x.chunk(n, 0)[me] for x in inputs], 1))
        assert torch.equal(got["first"], inputs[1])
        assert all(t.is_contiguous() for t in got.values())


def test_inputs_stay_untouched_and_results_are_nobody_elses():
    def body(comm):
        x = value(comm.rank, 4)
        kept = x.clone()
        y = comm.all_reduce(x, ("a", "b", "c"))
        y.mul_(comm.rank)
        comm.barrier()
        return torch.equal(x, kept), y / max(comm.rank, 1)

    results = run_threads(8, MESH, body, timeout_s=30)
    assert all(same for same, _ in results)
    for _, y in results[1:]:
        torch.testing.assert_close(y, results[1][1])


def test_a_shift_brings_what_the_rank_before_has():
    def body(comm):
        return [comm.start_shift(torch.tensor([comm.axis_index("b")]), "b", by).wait().item() for by in (0, 1, -1, 3)]

    size = MESH["b"]
    for rank, got in enumerate(run_threads(8, MESH, body, timeout_s=30)):
        index = mesh_index(MESH, rank)["b"]
        assert got == [(index - by) % size for by in (0, 1, -1, 3)]


def test_an_exchange_sends_as_many_rows_as_it_is_told():
    def body(comm):
        me, n = comm.rank, comm.world_size
        rows = torch.cat([torch.full((me + to, 1), 10.0 * me + to) for to in range(n)])
        return comm.start_exchange(rows, [me + to for to in range(n)], [who + me for who in range(n)], "a").wait()

    for me, got in enumerate(run_threads(3, {"a": 3}, body, timeout_s=30)):
        assert got[:, 0].tolist() == [10.0 * who + me for who in range(3) for _ in range(who + me)]


def test_an_exchange_that_does_not_add_up_is_refused():
    with pytest.raises(RuntimeProgramError, match="exchange of 3 rows"):
        run_threads(2, {"a": 2}, lambda comm: comm.start_exchange(torch.ones(3, 1), [1, 1], [1, 1], "a"), timeout_s=30)


def test_an_axis_of_size_one_costs_nothing():
    def body(comm):
        x = value(0, 4)
        return comm.all_reduce(x, "a") is x and comm.all_gather(x, 0, ("a",)) is x and comm.shard(x, 0, "a") is x

    assert run_threads(2, {"a": 1, "b": 2}, body, timeout_s=30) == [True, True]


def test_started_collectives_may_be_waited_for_in_any_order():
    def body(comm):
        handles = [comm.start_all_reduce(torch.full((2,), float(i)), ("a", "b", "c")) for i in range(10)]
        return [handle.wait()[0].item() for handle in reversed(handles)]

    assert run_threads(8, MESH, body, timeout_s=30) == [[8.0 * i for i in range(9, -1, -1)]] * 8


def test_messages_of_a_sender_and_tag_arrive_in_order():
    def body(comm):
        peer = 1 - comm.rank
        for i in range(3):
            send(comm, torch.tensor([i, comm.rank]), peer, tag=5)
        send(comm, torch.tensor([9, 9]), peer, tag=6)
        tagged, *others = (receive(comm, torch.empty(2, dtype=torch.int64), peer, tag).tolist() for tag in (6, 5, 5, 5))
        return [*others, tagged]

    assert run_threads(2, {"a": 2}, body, timeout_s=30)[0] == [[0, 1], [1, 1], [2, 1], [9, 9]]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda comm, x: comm.all_gather(x, 0, "a", site="B.py:7"), ["all_gather", "B.py:7"]),
        (lambda comm, x: comm.all_reduce(x[:2], "a", site="B.py:7"), ["[2]", "[4]"]),
        (lambda comm, x: comm.all_reduce(x.float(), "a"), ["float32", "float64"]),
        (lambda comm, x: comm.all_reduce(x, "a", op="max"), ["[max]", "[sum]"]),
    ],
)
def test_different_collectives_of_one_group_are_reported_with_both_ranks(wrong, words):
    def body(comm):
        x = value(0, 4)
        comm.all_reduce(x, "a")
        return wrong(comm, x) if comm.rank == 1 else comm.all_reduce(x, "a", site="A.py:3")

    with pytest.raises(CollectiveMismatch) as caught:
        run_threads(2, {"a": 2}, body, timeout_s=30)
    message = str(caught.value)
    for word in [*words, "A.py:3", "rank 0", "rank 1", "#1", "over a (ranks 0, 1)"]:
        assert word in message


FOR_EVER_S = 1000.0
"""Far more than a test may take: whoever ends before is not ended by the limit of a run."""


def test_collectives_over_different_axes_are_found_as_a_deadlock_at_once():
    def body(comm):
        return comm.all_reduce(value(0, 4), "a" if comm.rank else "b", site="here")

    with pytest.raises(CollectiveTimeout, match=r"no rank can go on.*rank 0 waits in all_reduce.*over b.*here"):
        run_threads(4, {"a": 2, "b": 2}, body, timeout_s=FOR_EVER_S)


def test_a_rank_that_returns_early_does_not_leave_the_others_waiting():
    def body(comm):
        return None if comm.rank == 0 else receive(comm, torch.empty(1), 0)

    with pytest.raises(CollectiveTimeout, match=r"rank 1 waits in recv from rank 0.*ranks \[0\] have finished"):
        run_threads(2, {"a": 2}, body, timeout_s=30)


def test_a_failing_rank_ends_the_others_and_is_named():
    def body(comm):
        if comm.rank == 5:
            raise ValueError("bad batch")
        comm.all_reduce(value(0, 4), ("a", "b", "c"))

    with pytest.raises(ValueError, match="bad batch") as caught:
        run_threads(8, MESH, body, timeout_s=FOR_EVER_S)
    assert caught.value.__notes__ == ["raised by rank 5 of 8 (a=1, b=0, c=1)"]


def test_a_run_longer_than_its_limit_says_where_it_is():
    release = threading.Event()

    def body(comm):
        if comm.rank == 1:
            release.wait(20)
        comm.all_reduce(value(0, 4), "a")

    with pytest.raises(CollectiveTimeout, match="rank 0 waits in all_reduce"):
        run_threads(2, {"a": 2}, body, timeout_s=0.5)
    release.set()


def test_splits_that_do_not_divide_are_refused_with_the_place():
    def body(comm):
        return comm.reduce_scatter(value(0, 3), 0, "a", site="mlp.py:4")

    with pytest.raises(RuntimeProgramError, match=r"mlp.py:4.*dim 0 of shape \(3,\) cannot be split over a"):
        run_threads(2, {"a": 2}, body, timeout_s=30)


def test_sixty_four_ranks_meet_many_times():
    def body(comm):
        x = torch.ones(16)
        for _ in range(20):
            x = comm.all_reduce(comm.all_gather(x, 0, "tp")[:16], ("dp", "tp")) / 64
        return x.sum().item()

    assert run_threads(64, {"dp": 8, "tp": 8}, body, timeout_s=FOR_EVER_S) == [16.0] * 64


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_a_collective_that_nobody_waits_for_is_named(kind):
    def rank(comm: Comm) -> None:
        x = torch.ones(4)
        kept = comm.start_all_reduce(x, "dp", site="kept")
        if comm.rank == 1 and kind == "all_reduce":
            comm.start_all_reduce(x, "dp", site="dropped")
        elif kind == "all_reduce":
            comm.start_all_reduce(x, "dp", site="dropped").wait()
        else:
            comm.start_all_gather(x, 0, "dp", site="dropped").then(lambda y: y + 1)
        kept.wait()

    with pytest.raises(RuntimeProgramError, match=rf"started 1 collectives .* at first {kind} .* over dp at dropped"):
        run_threads(2, {"dp": 2}, rank)
