"""Every rank is given its rows of the batch alone, and computes what it does with the global batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime.comm.mesh import Shares
from autopar.runtime.errors import RankError, RuntimeProgramError

ROWS = 24


class Words(nn.Module):
    """Tokens with a loss that leaves some targets out, so that every rank must know how many count."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix, self.out = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.out(torch.tanh(self.mix(self.tokens(ids))))
        return nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten(), ignore_index=-100)


def batches(n: int, rows: int = ROWS) -> list[dict[str, torch.Tensor]]:
    make = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 32, (rows, 8), generator=make) for _ in range(n)]
    keep = [torch.rand((rows, 8), generator=make) > 0.3 for _ in range(n)]
    return [{"ids": x, "labels": torch.where(k, x.roll(1, 1), -100)} for x, k in zip(ids, keep, strict=True)]


@functools.cache
def program_of(case: str):
    ranks, options = CASES[case]
    return words(ranks, **options)


def words(ranks: int, buckets: dict[str, dict[int, tuple[int, ...]]] | None = None, **options):
    torch.manual_seed(0)
    return autopar.compile(
        Words().double(),
        autopar.ClusterSpec.local(ranks),
        batches(1)[0],
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        options=autopar.Options(**options),
        buckets=buckets,
    )


def own(program, rank: int, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The rows of a batch that a rank takes, of the inputs that it takes."""
    shard = program.local_rows(rank)
    return [batch[name][shard.indices] for name in shard.inputs]


def losses(program, steps: int, with_own: bool) -> list[list[float]]:
    given = batches(steps)

    def body(session):
        rank, order = session.comm.rank, ("ids", "labels")
        said = []
        for batch in given:
            leaves = own(program, rank, batch) if with_own else [batch[name] for name in order]
            said.append(session.train_step(leaves, own_rows=with_own).item())
        return said, {name: session.gather_full(name) for name in program.ir.parameters}

    return program.on_ranks(body)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (4, {"mesh": {"dp": 4}, "strategy": "dp"}),
    "zero3 in microbatches": (4, {"mesh": {"dp": 4}, "strategy": "zero3", "microbatches": 3}),
    "dp and tp": (4, {"mesh": {"dp": 2, "tp": 2}, "strategy": "megatron"}),
    "sequences": (4, {"mesh": {"dp": 2, "cp": 2}}),
    "unequal shares": (3, {"mesh": {"dp": Shares((3, 2, 1))}, "strategy": "dp"}),
    "pipeline": (4, {"pp": 2, "mesh": {"dp": 2}, "strategy": "dp", "microbatches": 3}),
    "three stages": (3, {"pp": 3, "microbatches": 3}),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("case", CASES)
def test_own_rows_train_as_global_batches_do(case):
    program = program_of(case)
    for (own_losses, ours), (all_losses, theirs) in zip(
        losses(program, 2, True), losses(program, 2, False), strict=True
    ):
        assert own_losses == pytest.approx(all_losses, rel=1e-12)
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-9, atol=1e-12)


def rows_of(case: str) -> list[tuple[list[int], tuple[str, ...], tuple[int, ...]]]:
    shards = [program_of(case).local_rows(rank) for rank in range(CASES[case][0])]
    return [(one.indices, one.inputs, one.readers) for one in shards]


def test_rows_follow_shares_microbatches_and_stages():
    both = ("ids", "labels")
    assert rows_of("unequal shares") == [
        ([*range(12)], both, (0,)),
        ([*range(12, 20)], both, (1,)),
        ([*range(20, 24)], both, (2,)),
    ]
    assert rows_of("zero3 in microbatches")[1] == ([2, 3, 10, 11, 18, 19], both, (1,))
    assert rows_of("dp and tp")[3] == ([*range(12, 24)], both, (2, 3))
    stages = rows_of("pipeline")
    assert stages[1] == ([4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23], ("ids",), (1,))
    assert stages[3] == (stages[1][0], ("labels",), (3,))
    assert rows_of("three stages")[1] == ([], (), ())


def test_an_odd_last_batch_is_a_bucket_of_which_every_rank_takes_its_rows():
    program = words(2, {"ids": {0: (24, 6)}, "labels": {0: (24, 6)}}, mesh={"dp": 2}, strategy="dp")
    shards = [program.local_rows(rank) for rank in range(2)]
    sizes = [[*map(len, shard.sampler(54, drop_last=False))] for shard in shards]
    assert sizes == [[12, 12, 3]] * 2
    given = [*batches(2), *batches(1, rows=6)]

    def body(session):
        rows = shards[session.comm.rank]
        own = [[leaf[rows.indices] for leaf in batch.values()] for batch in given[:2]]
        own.append([x[slice(*rows.buckets[6][0])] for x in given[2].values()])
        return [session.train_step(leaves, own_rows=True).item() for leaves in own]

    wanted = [loss.item() for loss in program.run(given).losses]
    for said in program.on_ranks(body):
        assert said == pytest.approx(wanted, rel=1e-9)

    def apart(session):
        session.train_step([x[: 12 if session.comm.rank else 3] for x in given[0].values()], own_rows=True)

    with pytest.raises(RankError, match="ranks 1 were given rows of the shapes of another bucket"):
        program.on_ranks(apart)


def test_rows_that_move_are_given_as_global_batches():
    program = words(2, mesh={"dp": 2}, strategy="dp", rebalance=True)
    with pytest.raises(RuntimeProgramError, match="rows move between ranks"):
        program.on_ranks(lambda session: session.train_step([], own_rows=True))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("stages", [None, 2])
def test_own_rows_train_as_global_batches_do_under_any_plan(seed, stages):
    program = words(4, microbatches=3)
    program = program.with_plan(autopar.random_plan(program, seed, pp=stages))
    for (own_losses, ours), (all_losses, theirs) in zip(
        losses(program, 2, True), losses(program, 2, False), strict=True
    ):
        assert own_losses == pytest.approx(all_losses, rel=1e-12)
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-9, atol=1e-12)
