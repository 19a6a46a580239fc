"""Gradients are accumulated, bucketed and reduced to the same sums whatever the bucket sizes."""

from __future__ import annotations

import pytest
import torch

from autopar.counter import ByteCounter
from autopar.runtime import GradEntry, GradStore, RuntimeProgramError, run_threads
from autopar.runtime.gradients.bucket_sizes import BucketSizes
from tests.runtime import scenarios, stages


def test_bucket_sizes_do_not_change_results():
    runs = [
        run_threads(4, scenarios.MESH, lambda comm, b=b, d=d: scenarios.gradients(comm, b, d), timeout_s=60)
        for b, d in [(1, 1 << 30), (1 << 12, 1 << 14), (1 << 30, 1 << 30), (1 << 12, 1)]
    ]
    for other in runs[1:]:
        for left, right in zip(runs[0], other, strict=True):
            assert left.keys() == right.keys()
            assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_gradient_is_the_sum_over_ranks_contributions_and_microbatches():
    got = run_threads(4, scenarios.MESH, scenarios.gradients, timeout_s=60)
    names = [f"{kind}{i}" for i in range(6) for kind in ("reduce", "scatter", "both", "local", "cut")]

    def total(rank, name, step):
        index, size = names.index(name), 64 if names.index(name) % 3 == 0 else 8
        parts = 2 if name.startswith("reduce") and int(name[-1]) % 2 else 1
        seeds = [rank + 10 * index + 1000 * m + 5 * p + step for m in range(2) for p in range(parts)]
        return sum(scenarios.value(seed, size, size) for seed in seeds)

    def check(rank, name, want):
        torch.testing.assert_close(got[rank][f"{name} 1"], want, rtol=1e-12, atol=1e-12)

    for rank in range(4):
        a, b = divmod(rank, 2)
        over_a = lambda name, b=b: total(b, name, 1) + total(2 + b, name, 1)  # noqa: E731
        over_b = lambda name, a=a: total(2 * a, name, 1) + total(2 * a + 1, name, 1)  # noqa: E731
        everyone = lambda name: sum(total(r, name, 1) for r in range(4))  # noqa: E731
        for i in range(6):
            check(rank, f"reduce{i}", over_a(f"reduce{i}"))
            check(rank, f"scatter{i}", over_b(f"scatter{i}").chunk(2, i % 2)[b])
            check(rank, f"both{i}", everyone(f"both{i}").chunk(2, 1)[b])
            check(rank, f"local{i}", total(rank, f"local{i}", 1))
            check(rank, f"cut{i}", over_a(f"cut{i}").chunk(2, 0)[b])


def test_a_flush_may_land_values_that_fill_a_bucket_it_has_yet_to_issue():
    """Two scatters are under way when a third is issued: the oldest lands and fills the open bucket of its second step."""

    def body(comm):
        both = (("reduce_scatter", "a", 0), ("all_reduce", "b"))
        table = {f"g{i}": GradEntry(1, both) for i in range(3)} | {"late": GradEntry(1, (("all_reduce", "b"),))}
        store = GradStore(comm, table, sizes=BucketSizes(full=64, first=64, direct=1 << 20))
        store.add("g0", torch.full((16,), 1.0))
        store.add("g1", torch.full((16,), 2.0))
        store.add("g2", torch.full((8,), 4.0))
        store.add("late", torch.full((8,), 8.0))
        store.flush()
        return {name: grad.clone() for name, grad in store.finish().items()}

    for grads in run_threads(4, scenarios.MESH, body, timeout_s=60):
        assert {name: grad.unique().tolist() for name, grad in grads.items()} == {
            "g0": [4.0],
            "g1": [8.0],
            "g2": [16.0],
            "late": [16.0],
        }


def test_tensors_that_were_not_given_away_stay_as_they_are():
    def body(comm):
        store = GradStore(
            comm, {"x": GradEntry(1, (("all_reduce", "a"),)), "y": GradEntry(2)}, sizes=BucketSizes(direct=1)
        )
        g = torch.ones(4)
        store.add("x", g)
        store.add("y", g)
        store.add("y", g)
        grads = store.finish()
        return g.tolist(), grads["x"].tolist(), grads["y"].tolist()

    for kept, x, y in run_threads(2, {"a": 2}, body, timeout_s=30):
        assert kept == [1.0] * 4
        assert x == y == [2.0] * 4


def test_owned_large_gradients_are_reduced_where_they_lie():
    def body(comm):
        store = GradStore(comm, {"x": GradEntry(1, (("all_reduce", "a"),))}, sizes=BucketSizes(16))
        g = torch.ones(4)
        store.add("x", g, owned=True)
        return store.finish()["x"].data_ptr() == g.data_ptr()

    assert run_threads(2, {"a": 2}, body, timeout_s=30) == [True, True]


def test_buckets_start_before_the_backward_ends():
    started = []

    def body(comm):
        launch = comm._start
        comm._start = lambda call: started.append(call.kind) or launch(call)
        store = GradStore(
            comm,
            {f"g{i}": GradEntry(1, (("all_reduce", "a"),)) for i in range(8)},
            sizes=BucketSizes(128, direct=1 << 20),
        )
        counts = []
        for i in range(8):
            store.add(f"g{i}", torch.ones(16))
            counts.append(len(started))
        store.finish()
        return counts, len(started)

    assert run_threads(1, {"a": 1}, body)[0] == ([0] * 8, 0)
    counts, total = run_threads(2, {"a": 2}, body, timeout_s=30)[0]
    assert counts[-1] > 0
    assert total == 8


def test_a_loss_travels_with_the_gradients():
    started = []

    def body(comm):
        launch = comm._start
        comm._start = lambda call: started.append(call.kind) or launch(call)
        store = GradStore(comm, {"x": GradEntry(1, (("all_reduce", "a"),))})
        sums = []
        for step in range(2):
            loss = store.start_sum(torch.tensor(1.0 + comm.rank + step), "a")
            store.add("x", torch.ones(4))
            grads = store.finish()
            sums.append((loss.wait(), grads["x"].sum().item()))
        early = store.start_sum(torch.tensor(5.0), "a")
        return [(loss.item(), grad) for loss, grad in sums], early.wait().item()

    for got in run_threads(2, {"a": 2}, body, timeout_s=30):
        assert got == ([(3.0, 8.0), (5.0, 8.0)], 10.0)
    assert started == ["all_reduce"] * 6


def test_messages_of_all_steps_have_the_same_names():
    """A rank keeps what it knows of a message by its name, so names that count steps would fill its memory."""

    def body(comm):
        sites = []
        launch = comm._start
        comm._start = lambda call: sites.append(call.site) or launch(call)
        store = GradStore(comm, {"x": GradEntry(2, (("all_reduce", "a"),))})
        for step in range(3):
            losses = []
            for part in range(2):
                losses.append(store.start_sum(torch.tensor(1.0 + 10 * step + part), "a"))
                store.add("x", torch.ones(4))
            store.finish()
            assert [loss.wait().item() for loss in losses] == [2.0 + 20 * step, 4.0 + 20 * step]
        return sites

    for sites in run_threads(2, {"a": 2}, body, timeout_s=30):
        assert sites
        assert sites == 3 * sites[: len(sites) // 3]


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda store: store.add("z", torch.ones(1)), "no gradient entry for parameter 'z'"),
        (lambda store: [store.add("x", torch.ones(1)) for _ in range(2)], "contribution 2 of 1"),
        (lambda store: store.finish(), "'x': 0 of 1 contributions"),
    ],
)
def test_miscounted_contributions_are_errors(misuse, words):
    with pytest.raises(RuntimeProgramError, match=words):
        run_threads(1, {"a": 1}, lambda comm: misuse(GradStore(comm, {"x": GradEntry(1)})))


def accumulated(parts, owned, compensated):
    """A float32 gradient of many microbatches through a store on one rank."""

    def body(comm):
        store = GradStore(comm, {"w": GradEntry(1)}, len(parts), compensated=compensated)
        for _ in range(2):  # buffers of the first step must not leak into the second
            for k, part in enumerate(parts):
                store.add("w", part.clone() if owned(k) else part, owned=owned(k))
            got = store.finish()["w"].clone()
        return got

    return run_threads(1, {"dp": 1}, body, timeout_s=30)[0]


@pytest.mark.parametrize(
    "owned", [lambda k: True, lambda k: False, lambda k: k % 2 == 0], ids=["owned", "lent", "mixed"]
)
def test_compensated_sums_come_closer_to_float64(owned):
    make = torch.Generator().manual_seed(1)
    parts = [torch.randn(500, generator=make) + 10 for _ in range(256)]
    kept = [part.clone() for part in parts]
    want = torch.stack(parts).double().sum(0)
    plain, better = (accumulated(parts, owned, compensated) for compensated in (False, True))
    assert (better - want).abs().max() <= torch.finfo(torch.float32).eps * want.abs().max()  # one rounding
    assert (better - want).norm() < 0.2 * (plain - want).norm()
    assert all(torch.equal(part, own) for part, own in zip(parts, kept, strict=True)), "a lent gradient was written"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_compensated_sums_of_few_microbatches(count):
    parts = [torch.full((4,), float(k + 1)) for k in range(count)]
    assert torch.equal(accumulated(parts, lambda k: True, True), torch.full((4,), float(sum(range(1, count + 1)))))


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_are_reduced_once_per_step_however_many_microbatches(zero):
    """The messages of an optimizer step, counted: those of two microbatches are those of one, and equally long."""

    def sent(microbatches):
        program = stages.mlp(4, 1, zero, microbatches)

        def body(comm):
            session = scenarios.session_of(program, comm)
            session.load_weights(stages.weights())
            session.train_step(stages.batches(1)[0])
            calls, start = [], session.rt.comm._start
            session.rt.comm._start = lambda call: calls.append((call.kind, call.inp.numel(), call.site)) or start(call)
            session.train_step(stages.batches(1)[0])
            return [(kind, numel) for kind, numel, site in calls if site.startswith("gradients of")], len(calls)

        return run_threads(4, program.mesh, body, timeout_s=30)[0]

    (one, all_one), (two, all_two) = sent(1), sent(2)
    assert all_two > all_one, "other messages are sent by every microbatch"
    assert len(one) == len(two)
    assert (
        sum(numel for _, numel in two) <= sum(numel for _, numel in one) + 1
    )  # the loss of the second microbatch rides along


def test_the_third_addend_is_where_compensation_begins():
    """Half a unit of the last place, twice: lost where the sum is rounded after each."""
    parts = [torch.full((4,), value) for value in (1.0, 2.0**-24, 2.0**-24)]
    assert torch.equal(accumulated(parts, lambda k: True, False), torch.ones(4))
    assert torch.equal(accumulated(parts, lambda k: True, True), torch.full((4,), 1 + 2.0**-23))


def test_lent_gradients_are_summed_in_one_tensor_of_the_stores_own():
    parts = [torch.full((1 << 12,), float(k)) for k in range(6)]

    def body(comm):
        store = GradStore(comm, {"w": GradEntry(1)}, len(parts))
        with ByteCounter() as counter:
            for part in parts:
                store.add("w", part)
            got = store.finish()["w"]
        assert torch.equal(got, torch.full((1 << 12,), 15.0))
        return counter.peak

    assert run_threads(1, {"dp": 1}, body, timeout_s=30) == [4 << 12]


def test_gradients_that_others_may_hold_are_told_and_those_of_a_step_alone():
    """One tensor may be the gradient of two parameters: whoever scales it in place would do so twice."""
    local, summed = GradEntry(1), GradEntry(1, (("all_reduce", ("a",)),))

    def body(comm):
        store = GradStore(comm, {"x": local, "y": local, "z": local, "sum": summed})
        shared, told = torch.ones(3), []
        for lent in (("x", "y"), ("z",), ()):
            for name in ("x", "y", "z", "sum"):
                store.add(name, shared if name in (*lent, "sum") else torch.ones(3), owned=name not in (*lent, "sum"))
            store.finish()
            told.append(set(store.borrowed))
        return told

    for told in run_threads(2, {"a": 2}, body, timeout_s=30):
        assert told == [{"x", "y"}, {"z"}, set()]


def test_a_sum_that_was_waited_for_stays_what_it_was():
    def body(comm):
        store = GradStore(comm, {"x": GradEntry(1, (("all_reduce", ("a",)),))})
        losses = []
        for step in range(3):
            handle = store.start_sum(torch.full((), step + 1.0), ("a",))
            store.add("x", torch.ones(4), owned=True)
            grads = store.finish()
            losses.append(handle.wait())
            for grad in grads.values():
                grad.untyped_storage().fill_(0)  # what the update may do with the bucket
        return [loss.item() for loss in losses]

    for losses in run_threads(2, {"a": 2}, body, timeout_s=30):
        assert losses == [2.0, 4.0, 6.0]


@pytest.mark.parametrize(
    "sizes",
    [
        BucketSizes(),
        BucketSizes(1, 1, 1, 1),
        BucketSizes(1 << 30, 1 << 30, 1, 1 << 30),
        BucketSizes(64, 64, 1 << 30, 1),
    ],
    ids=["default", "all direct", "scattered direct", "all packed"],
)
def test_lent_gradients_of_any_layout_stay_as_they_are_in_buckets_of_any_size(sizes):
    """Nothing is reduced into a tensor of somebody else's, nor is its memory taken for what is packed later."""
    steps = {
        "summed": (("all_reduce", "a"),),
        "front": (("reduce_scatter", "a", 0),),
        "back": (("reduce_scatter", "a", -1),),
    }
    table = {f"{kind} {n}": GradEntry(1, way) for n in range(4) for kind, way in steps.items()}

    def body(comm):
        store = GradStore(comm, table, sizes=sizes)
        lent = {name: torch.arange(36.0).view(6, 6) + 100 * n + comm.rank for n, name in enumerate(table)}
        lent = {name: value.t() if name.endswith(("1", "3")) else value for name, value in lent.items()}
        kept = {name: value.clone() for name, value in lent.items()}
        for _ in range(2):
            for name, value in lent.items():
                store.add(name, value)
            got = store.finish()
            assert all(torch.equal(lent[name], kept[name]) for name in table)
            for name in table:
                whole = 2 * kept[name] + (1 - 2 * comm.rank)  # of both ranks
                mine = slice(3 * comm.rank, 3 * comm.rank + 3)
                want = {"summed": whole, "front": whole[mine], "back": whole[:, mine]}[name.split()[0]]
                assert torch.equal(got[name], want), name

    run_threads(2, {"a": 2}, body, timeout_s=30)


def test_shards_of_a_tensor_that_others_hold_are_theirs_too():
    """A shard may be a view of it: two parameters' parts of one gradient are then one memory."""

    def body(comm):
        step = ("shard", "a", 0)
        store = GradStore(comm, {"x": GradEntry(1, (step,)), "y": GradEntry(1, (step,)), "own": GradEntry(1, (step,))})
        shared = torch.ones(4)
        store.add("x", shared)
        store.add("y", shared)
        store.add("own", torch.ones(4), owned=True)
        grads = store.finish()
        assert grads["x"].data_ptr() == grads["y"].data_ptr()
        return set(store.borrowed)

    for borrowed in run_threads(2, {"a": 2}, body, timeout_s=30):
        assert borrowed == {"x", "y"}


def test_what_is_summed_after_a_shard_of_a_tensor_that_others_hold_leaves_it_as_it_is():
    steps = (("shard", "a", 0), ("all_reduce", "b"))

    def body(comm):
        store = GradStore(comm, {"x": GradEntry(1, steps)}, sizes=BucketSizes(1, 1, 1, 1))
        shared = torch.ones(4)
        store.add("x", shared)
        total = store.finish()["x"]
        return total.tolist(), shared.tolist()

    for total, shared in run_threads(4, {"a": 2, "b": 2}, body, timeout_s=30):
        assert (total, shared) == ([2.0, 2.0], [1.0] * 4)
