"""A training loop whose data function takes a shard: every rank reads its rows behind the step before, and trains as with all."""

from __future__ import annotations

import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autopar.runtime.errors import GuardError, RankError, RuntimeProgramError
from autopar.runtime.program.arguments import parser
from autopar.runtime.program.batches import BatchInput, DataFunction
from autopar.runtime.program.rows import DataShard
from autopar.runtime.run.loaded import LoadedProgram
from autopar.runtime.run.read_ahead import ReadAhead
from autopar.runtime.run.sdc_check import recompute
from autopar.runtime.run.train_loop import Done, Listener, Loop
from autopar.runtime.step.session import Session
from tests.test_local_rows import ROWS, own, program_of
from tests.test_local_rows import batches as known

DATA = """
import torch
from torch.utils.data import DataLoader, Dataset
from autopar import DataShard

class Counted(Dataset):
    def __init__(self):
        make = torch.Generator().manual_seed(5)
        self.ids = torch.randint(0, 32, (101, 8), generator=make)
        self.read = []

    def __len__(self):
        return 101

    def __getitem__(self, i):
        self.read.append(i)
        return {"ids": self.ids[i], "labels": self.ids[i].roll(1)}

made = []

def whole(start):
    yield from own(DataShard.whole(24), start)

def own(shard, start):
    made.append((shard, Counted()))
    return DataLoader(made[-1][1], batch_sampler=shard.sampler(made[-1][1], seed=7, start=start))
"""


class Heard(Listener):
    """Losses, and how often a batch was not there when its step began."""

    def __init__(self, awaits: bool) -> None:
        self.losses, self._awaits = list[float](), awaits

    def on_loss(self, loop: Loop, done: Done) -> bool:
        """The step takes until the next batch is read, where one is."""
        assert done.loss is not None
        self.losses.append(done.loss)
        end = time.monotonic() + 30
        while self._awaits and loop.step < loop.last and loop.batches._outcomes.empty():  # type: ignore[union-attr]
            assert time.monotonic() < end, "nothing is read while a step runs"
            time.sleep(0.001)
        return False


def trained(case: str, source: str, steps: int, start: int = 0) -> list[tuple[list[float], int]]:
    """The losses of a run on every rank, and its waits for batches."""
    program = program_of(case)
    inputs = [BatchInput(name=name, shape=(ROWS, 8), dtype="int64") for name in ("ids", "labels")]

    def rank(comm: Any) -> tuple[list[float], int]:
        session = program.in_process.session(comm, program.request.update, 0)
        session.load_weights(program.weights())
        loaded = LoadedProgram(types.SimpleNamespace(inputs=inputs, fixed={}, show=lambda: "a program"), session)  # type: ignore[arg-type]
        loop = Loop(loaded, parser().parse_args(["--steps", str(steps), "--data", source]), 0, 0, reads=True)
        heard = Heard(loaded.own_rows)
        loop.go_to(start, start)
        loop.run([heard])
        assert isinstance(loop.batches, ReadAhead) == loaded.own_rows
        waits = loop.batches.waits if isinstance(loop.batches, ReadAhead) else 0
        loop.batches.close()
        return heard.losses, waits

    return program.in_process.run_bare(rank)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file with two data functions over one data set that counts what is read."""
    (tmp_path / "counted_rows.py").write_text(DATA)
    return tmp_path / "counted_rows.py"


@pytest.mark.few(1)
@pytest.mark.parametrize("case", ["dp", "unequal shares", "pipeline"])
def test_ranks_read_their_share_behind_the_step_and_losses_are_those_of_global_batches(case, source, monkeypatch):
    monkeypatch.syspath_prepend(source.parent)
    data = DataFunction("counted_rows:own")
    made = data._function.__globals__["made"]
    made.clear()
    steps = 6  # the fourth batch ends the first epoch of 101 samples
    ours, all_of = trained(case, "counted_rows:own", steps), trained(case, "counted_rows:whole", steps)
    for losses, waits in ours:
        assert losses == pytest.approx(all_of[0][0], rel=1e-9)
        assert waits == 0
    shards = [program_of(case).local_rows(rank) for rank in range(len(ours))]
    for shard in shards:
        assert sum(len(data.read) for own, data in made if own == shard) == steps * shard.count
    for name in ("ids", "labels"):
        epoch = [next(data.read for own, data in made if own == shard) for shard in shards if name in shard.inputs]
        assert len({i for read in epoch for i in read}) == sum(map(len, epoch)) == 4 * ROWS


def test_a_run_that_goes_on_reads_nothing_of_what_was_taken(source, monkeypatch):
    monkeypatch.syspath_prepend(source.parent)
    made = DataFunction("counted_rows:own")._function.__globals__["made"]
    before = trained("dp", "counted_rows:own", 5)
    made.clear()
    trained("dp", "counted_rows:own", 5, start=3)
    assert sum(len(data.read) for _, data in made) == 2 * ROWS
    assert len(before[0][0]) == 5


# ---- who is told what


class Source:
    """Data functions with different arguments."""

    def __init__(self, text: str, folder: Path) -> None:
        path = folder / "data.py"
        path.write_text(text)
        self.function = DataFunction(f"{path}:f")

    def some(self, n: int, first: int = 0, shard: DataShard | None = None) -> list[Any]:
        """The next n batches."""
        stream = self.function.batches(first, shard)
        return [next(stream) for _ in range(n)]


def test_a_data_function_is_given_the_arguments_that_it_has(tmp_path):
    assert Source("def f(): return [1, 2]", tmp_path).some(3, 1) == [2, 1, 2]
    assert Source("def f(start): return [start, start + 1]", tmp_path).some(3, 5) == [5, 6, 7]
    assert Source("def f(*, epoch): return [10 * epoch, 10 * epoch + 1]", tmp_path).some(3, 1) == [1, 10, 11]
    own = DataShard.whole(4)
    assert Source("def f(shard, start=0): return [shard.count + start]", tmp_path).some(2, 3, own) == [7, 8]
    with pytest.raises(
        RuntimeProgramError, match=r"called without arguments: missing .*given those of shard, start, epoch"
    ):
        Source("def f(path): return []", tmp_path)
    with pytest.raises(RuntimeProgramError, match="takes start and epoch"):
        Source("def f(start, epoch): return []", tmp_path)


def test_a_rank_that_takes_no_rows_is_not_asked_for_data(tmp_path):
    none = DataShard(1, 8, ())
    assert Source("def f(shard): raise ValueError", tmp_path).some(3, 2, none) == [None] * 3


def on_ranks(case: str, body: Any) -> list[Any]:
    """The results of body on every rank, with sessions that compare batches."""
    program = program_of(case)

    def rank(comm: Any) -> Any:
        modules = program.in_process
        session = Session(modules.pipeline, modules.stages, comm, program.request.update, compare=True)
        session.load_weights(program.weights())
        return body(session)

    return program.in_process.run_bare(rank)


def test_ranks_that_share_rows_are_compared_with_each_other_alone():
    program = program_of("dp and tp")

    def body(odd_step: int) -> Any:
        def steps(session: Any) -> None:
            for step, batch in enumerate(known(4), 1):
                leaves = own(program, session.comm.rank, batch)
                if step == odd_step and session.comm.rank == 3:
                    leaves = [leaf.flip(0) for leaf in leaves]
                session.train_step(leaves, own_rows=True)
            session.settle("ending")

        return steps

    assert on_ranks("dp and tp", body(0)) == [None] * 4
    for step in (1, 4):
        with pytest.raises(
            RankError, match=rf"step {step}: rank 3 \(.*\) got other rows than the ranks that take the same"
        ):
            on_ranks("dp and tp", body(step))


def test_ranks_that_are_given_rows_and_ranks_that_are_given_all_are_told_apart():
    program = program_of("dp")

    def body(session: Any) -> None:
        rank, (batch,) = session.comm.rank, known(1)
        leaves = [batch["ids"], batch["labels"]] if rank == 2 else own(program, rank, batch)
        session.train_step(leaves, own_rows=rank != 2)

    with pytest.raises(RankError, match=r"rank 2 .*is taking batch 1.*others are taking its rows of batch 1"):
        on_ranks("dp", body)


@pytest.mark.parametrize("case", ["dp", "dp and tp"])
def test_a_rank_recomputes_with_the_rows_of_its_neighbour(case):
    program = program_of(case)

    def body(harm: bool) -> Any:
        def step(session: Any) -> None:
            leaves = own(program, session.comm.rank, known(1)[0])
            if harm and session.comm.rank == 1:
                next(iter(session.stages.values())).rt.params["mix.weight"].view(-1)[0] += 1e-3
            recompute(session, leaves, 1, ["m"] * 4, own_rows=True)

        return step

    assert on_ranks(case, body(False)) == [None] * 4
    with pytest.raises(RankError, match="computed other gradients"):
        on_ranks(case, body(True))


def test_rows_of_another_shape_are_refused_by_name():
    def body(session: Any) -> None:
        session.train_step([x[: 4 if session.comm.rank else 6] for x in known(1)[0].values()], own_rows=True)

    with pytest.raises(
        GuardError, match=r"global shape \(24, 8\), of which this rank takes \(6, 8\); is this the last batch"
    ):
        on_ranks("dp", body)


def test_the_last_batch_of_an_epoch_is_named():
    def body(session: Any) -> None:
        session.train_step([x[:17] for x in known(1)[0].values()])

    with pytest.raises(
        GuardError, match=r"last batch of an epoch, with 17 of 24 rows\? Leave it out .* bucket of that size"
    ):
        on_ranks("dp", body)


def epochs(shards: list[DataShard], length: int, count: int, **how: Any) -> Iterator[list[list[int]]]:
    """The samples of every epoch that each shard reads."""
    samplers = [shard.sampler(length, **how) for shard in shards]
    for _ in range(count):
        yield [[i for batch in sampler for i in batch] for sampler in samplers]


def test_samples_of_an_epoch_are_read_once_by_whoever_takes_them():
    parts = [DataShard(r, 6, ((2 * r, 2 * r + 2),), place=(r, 3), buckets={3: ((r, r + 1),)}) for r in range(3)]
    both = zip(epochs(parts, 27, 3, drop_last=False), epochs([DataShard.whole(6)], 24, 3), strict=True)
    seen = []
    for read, (all_of,) in both:
        assert sorted(i for one in read for i in one) == list(range(27))
        assert sorted(all_of) == list(range(24))
        seen.append(read[0])
    assert seen[0] != seen[1]
    going_on = parts[1].sampler(27, drop_last=False, start=7)
    assert [*going_on] == [*parts[1].sampler(27, drop_last=False, start=5)][2:]
    assert len(going_on) == 5  # the epoch after
    assert [*parts[0].sampler(12, shuffle=False)] == [[0, 1], [6, 7]]


def test_samples_that_fill_no_batch_are_said():
    shard = DataShard.whole(8)
    with pytest.raises(
        RuntimeProgramError, match=r"of the dataset's 27 samples 3 are left over .*drop_last=True.*bucket"
    ):
        shard.sampler(27, drop_last=False)
    with pytest.raises(RuntimeProgramError, match="has 5 samples and a global batch 8 rows"):
        shard.sampler(5)


def test_parts_that_are_not_equal_have_no_index():
    with pytest.raises(RuntimeProgramError, match=r"no equal parts by rank .*shard.sampler"):
        _ = program_of("unequal shares").local_rows(0).replicas
    with pytest.raises(RuntimeProgramError, match="takes no rows of the batch"):
        _ = program_of("three stages").local_rows(1).index
    shard = program_of("pipeline").local_rows(3)
    assert (shard.index, shard.replicas, shard.reader) == (1, 2, 3)
