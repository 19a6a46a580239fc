"""Sums of compressed gradients: against a twin that rounds number by number, and against what nobody may lose."""

from __future__ import annotations

import math
import random

import pytest
import torch

from autopar.runtime import GradEntry, GradStore, run_threads
from autopar.runtime.gradients.bucket_sizes import BucketSizes
from autopar.runtime.gradients.compression import CODECS
from tests.runtime.scenarios import MESH, value

SUMS = {
    "g0": (("all_reduce", "a"),),
    "g1": (("all_reduce", ("a", "b")),),
    "g2": (("reduce_scatter", "a", 0),),
    "g3": (("reduce_scatter", "b", 1),),
    "g4": (("reduce_scatter", ("a", "b"), 1), ("all_gather", ("a", "b"), 1)),
    "g5": (("reduce_scatter", "a", 1), ("all_reduce", "b")),
}
SHAPES = {"g0": (30, 20), "g1": (7,), "g2": (32, 9), "g3": (3, 16), "g4": (5, 64), "g5": (33, 18)}


def coded(name, x):
    """(x as the codec's receiver has it, what was lost) of a flat tensor."""
    codec = CODECS[name]
    kept = torch.zeros(codec.padded(x.numel()), dtype=x.dtype)
    kept[: x.numel()] = x
    wire = torch.empty(codec.wire_bytes(kept.numel()), dtype=torch.int8)
    codec.encode(kept, wire)
    received = torch.empty_like(kept)
    codec.decode(wire, received)
    return received[: x.numel()], kept[: x.numel()]


def by_hand(x):
    """int8 of a list of at most 256 numbers, one by one."""
    largest = max(map(abs, x), default=0.0)
    scale = 2.0 ** math.frexp(largest / 127)[1] if largest else 1.0
    return [round(v / scale) * scale for v in x]


# --- codecs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 5000])
def test_what_int8_sends_and_what_it_loses_are_exactly_what_there_was(numel, dtype):
    make = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=make, dtype=dtype) * torch.exp2(
        torch.randint(-40, 40, (numel,), generator=make).to(dtype)
    )
    x[::7] = 0
    sent, lost = coded("int8", x)
    assert torch.equal(sent + lost, x)
    for block, got in zip(x.split(256), sent.split(256), strict=True):
        largest = block.abs().max()
        assert (block - got).abs().max() <= largest / 127
        if dtype == torch.float64:
            assert got.tolist() == by_hand(block.tolist())


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-38, 127.0, 128.0, 1e30, 8e37])
def test_int8_of_extreme_numbers(largest):
    x = torch.linspace(-1, 1, 256) * largest
    sent, lost = coded("int8", x)
    assert torch.equal(sent + lost, x)
    assert sent.abs().max() <= max(largest * 128 / 127, 2.0**-126)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_stays_none(name, bad):
    x = torch.ones(600)
    x[300] = bad
    sent, _ = coded(name, x)
    assert not sent[300].isfinite()
    assert sent[:256].isfinite().all()
    assert sent[512:].isfinite().all()


def test_bf16_is_rounded_once():
    x = torch.randn(1000)
    assert torch.equal(coded("bf16", x)[0], x.bfloat16().float())


# --- sums


def table_of(name, sums=SUMS):
    return {g: GradEntry(1, tuple(steps), None, name) for g, steps in sums.items()}


def summed(comm, name, steps, make, sizes=None, sums=SUMS):
    """Results of every step by name, and what is unsent after the last one."""
    store = GradStore(comm, table_of(name, sums), sizes=sizes or BucketSizes(1 << 12, 1 << 10))
    results = []
    for step in range(steps):
        for index, g in enumerate(sums):
            store.add(g, make(comm.rank, index, step, SHAPES[g]))
        results.append({g: grad.clone() for g, grad in store.finish().items()})
    return results, dict(store.unsent.values)


def whole_numbers(rank, index, step, shape):
    """Numbers whose sums are exact in float64."""
    make = torch.Generator().manual_seed(1000 * rank + 10 * index + step)
    return torch.randint(-(1 << 20), 1 << 20, shape, generator=make).double() / 1024


def test_every_gradient_arrives_but_what_is_unsent():
    """Sums over steps: what ranks gave, less what they hold back, exactly; the same bits wherever a sum is whole."""
    steps = 5
    ranks = run_threads(4, MESH, lambda comm: summed(comm, "int8", steps, whole_numbers), timeout_s=60)
    given = [
        {g: sum(whole_numbers(rank, i, s, SHAPES[g]) for s in range(steps)) for i, g in enumerate(SUMS)}
        for rank in range(4)
    ]
    arrived = [{g: sum(result[g] for result in results) for g in SUMS} for results, _ in ranks]
    unsent = [values for _, values in ranks]
    everyone = range(4)

    def check(got, want):
        assert torch.equal(got, want)

    for a, b in ((0, 0), (0, 1), (1, 0), (1, 1)):
        me, along_a, along_b = 2 * a + b, (b, 2 + b), (2 * a, 2 * a + 1)
        check(arrived[me]["g0"], sum(given[r]["g0"] - unsent[r]["g0", 0] for r in along_a))
        check(arrived[me]["g1"], sum(given[r]["g1"] - unsent[r]["g1", 0] for r in everyone))
        owed = sum(given[r]["g2"] - unsent[r]["g2", 0].flatten(0, 1) for r in along_a)
        check(arrived[me]["g2"], owed.chunk(2)[a])
        owed = sum(given[r]["g3"].chunk(2, 1)[b] - unsent[r]["g3", 0][b] for r in along_b)
        check(arrived[me]["g3"], owed)
        owed = [sum(given[r]["g4"].chunk(4, 1)[k] - unsent[r]["g4", 1][k] for r in everyone) for k in everyone]
        check(arrived[me]["g4"], torch.cat(owed, 1))
        first = [sum(given[r]["g5"].chunk(2, 1)[a] - unsent[r]["g5", 1][a] for r in (k, 2 + k)) for k in (0, 1)]
        check(arrived[me]["g5"], sum(first[k] - unsent[2 * a + k]["g5", 0] for k in (0, 1)))
    for g, equal in {"g0": ((0, 2), (1, 3)), "g1": ((0, 1), (2, 3), (1, 2)), "g4": ((0, 1), (0, 2), (0, 3))}.items():
        for r, s in equal:
            assert all(torch.equal(x[g], y[g]) for x, y in zip(ranks[r][0], ranks[s][0], strict=True))
    assert any(values.any() for values in unsent[0].values())


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_a_bucket_is_the_twins(kind):
    """Three gradients in one bucket over two ranks, three steps: every number rounded by hand, in rows and blocks."""
    shapes = {"x": (40, 8), "y": (6,), "z": (2, 100)}  # each in blocks of its own
    step = (kind, "a") if kind == "all_reduce" else (kind, "a", 0)
    sizes = [math.prod(shape) // (1 if kind == "all_reduce" else 2) for shape in shapes.values()]
    used = sum(-(-size // 256) * 256 for size in sizes)
    width = -(-used // 512) * 256 if kind == "all_reduce" else used

    def blocks(part):
        return torch.cat([part.flatten(), torch.zeros(-part.numel() % 256, dtype=torch.float64)])

    def gradient(rank, g, step):
        return value(17 * rank + 5 * step + ord(g), *shapes[g])

    def body(comm):
        store = GradStore(comm, {g: GradEntry(1, (step,), None, "int8") for g in shapes})
        steps = []
        for number in range(3):
            for g in shapes:
                store.add(g, gradient(comm.rank, g, number))
            steps.append({g: grad.clone() for g, grad in store.finish().items()})
        return steps

    def rows_of(rank, number):
        """Rows of a bucket: the flat bucket cut in two, or the halves of every gradient."""
        parts = [gradient(rank, g, number) for g in shapes]
        if kind == "all_reduce":
            flat = torch.cat([*map(blocks, parts), torch.zeros(2 * width - used, dtype=torch.float64)])
            return flat.view(2, width)
        return torch.stack([torch.cat([blocks(part.chunk(2)[k]) for part in parts]) for k in range(2)])

    def rounded(row):
        return torch.tensor([v for block in row.split(256) for v in by_hand(block.tolist())], dtype=torch.float64)

    unsent = [torch.zeros(2, width, dtype=torch.float64) for _ in range(2)]
    got = run_threads(2, {"a": 2}, body, timeout_s=60)
    for number in range(3):
        owed = [rows_of(rank, number) + unsent[rank] for rank in range(2)]
        sent = [torch.stack([rounded(row) for row in rows]) for rows in owed]
        unsent = [mine - ours for mine, ours in zip(owed, sent, strict=True)]
        sums = [sent[0][k] + sent[1][k] for k in range(2)]
        if kind == "all_reduce":
            whole = [rounded(row) for row in sums]
            for k in range(2):
                unsent[k][k] += sums[k] - whole[k]
            sums = [torch.cat(whole)] * 2
        for rank in range(2):
            start = 0
            for (g, shape), size in zip(shapes.items(), sizes, strict=True):
                want = sums[rank][start : start + size].view(-1, *shape[1:])
                assert torch.equal(got[rank][number][g], want), (number, g)
                start += -(-size // 256) * 256


def test_bf16_adds_in_full_precision():
    def make(rank, index, step, shape):
        return value(100 * rank + 10 * index + step, *shape, dtype=torch.float32)

    ranks = run_threads(4, MESH, lambda comm: summed(comm, "bf16", 2, make), timeout_s=60)
    for rank, (results, unsent) in enumerate(ranks):
        assert not unsent
        a, b = divmod(rank, 2)
        for step, result in enumerate(results):
            low = [[make(r, i, step, SHAPES[g]).bfloat16().float() for i, g in enumerate(SUMS)] for r in range(4)]
            assert torch.equal(result["g0"], (low[b][0] + low[2 + b][0]).bfloat16().float())
            assert torch.equal(result["g2"], (low[b][2] + low[2 + b][2]).chunk(2)[a])
            assert torch.equal(result["g3"], (low[2 * a][3] + low[2 * a + 1][3]).chunk(2, 1)[b])


@pytest.mark.parametrize("name", CODECS)
def test_ranks_send_so_many_bytes(name):
    """An exchange and a gather of a half, or a quarter with a byte for every 256 elements."""
    sent = []

    def body(comm):
        launch = comm._start
        comm._start = lambda call: sent.append((comm.rank, call.kind, call.inp.numel())) or launch(call)
        store = GradStore(comm, {"x": GradEntry(1, (("all_reduce", "a"),), None, name)})
        loss = store.start_sum(torch.tensor(1.5), "a")
        store.add("x", torch.ones(1024, 512))
        return store.finish()["x"].unique().tolist(), loss.wait().item()

    assert run_threads(2, {"a": 2}, body, timeout_s=60) == [([2.0], 3.0)] * 2, "the loss is not compressed"
    row = {"bf16": 1 << 19, "int8": (1 << 18) + (1 << 10)}[name]
    assert [call[1:] for call in sent if call[0] == 0] == [
        ("all_to_all", 2 * row),
        ("all_reduce", 1),
        ("all_gather", row),
    ]


def test_gradients_that_hardly_change_the_scale_still_arrive():
    """A tiny gradient beside a large one is 0 in int8; with feedback its sum over steps is right within one scale."""

    def body(comm):
        store = GradStore(comm, {"x": GradEntry(1, (("all_reduce", "a"),), None, "int8")})
        total = torch.zeros(256)
        for _ in range(200):
            x = torch.full((256,), 0.003)
            x[0] = 1.0
            store.add("x", x)
            total += store.finish()["x"]
        return total

    for total in run_threads(2, {"a": 2}, body, timeout_s=60):
        torch.testing.assert_close(total[1:], torch.full((255,), 1.2), rtol=0, atol=0.1)


@pytest.mark.parametrize("seed", range(6))
def test_random_tables_lose_nothing(seed):
    """Random shapes, sums and sizes of buckets: what arrives in all is what was given, less what is unsent."""
    rng = random.Random(seed)
    sums = {f"g{i}": rng.choice([("all_reduce", "a"), ("reduce_scatter", "a", 0)]) for i in range(6)}
    shapes = {g: (4 * rng.randint(1, 30), rng.randint(1, 40)) for g in sums}
    sizes = BucketSizes(rng.choice([64, 1 << 12, 1 << 20]), rng.choice([64, 1 << 12]))
    steps = 4

    def body(comm):
        store = GradStore(comm, {g: GradEntry(1, (step,), None, "int8") for g, step in sums.items()}, sizes=sizes)
        totals = dict.fromkeys(sums, 0)
        for step in range(steps):
            for index, g in enumerate(sums):
                store.add(g, whole_numbers(comm.rank, index, step, shapes[g]))
            totals = {g: totals[g] + grad for g, grad in store.finish().items()}
        return totals, {g: v for (g, _), v in store.unsent.values.items()}

    ranks = run_threads(4, {"a": 4}, body, timeout_s=60)
    for index, (g, step) in enumerate(sums.items()):
        given = sum(whole_numbers(rank, index, s, shapes[g]) for rank in range(4) for s in range(steps))
        want = given - sum(unsent[g].reshape(shapes[g]) for _, unsent in ranks)
        parts = [totals[g] for totals, _ in ranks]
        assert torch.equal(parts[1] if step[0] == "all_reduce" else torch.cat(parts), want)
