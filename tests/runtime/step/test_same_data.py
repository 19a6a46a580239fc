"""Ranks that were given other batches are named before anything is made of them, whatever way a program is run."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autopar.runtime import run_threads
from autopar.runtime.comm.comm import Comm
from autopar.runtime.errors import RankError
from autopar.runtime.step.same_data import MOST_APART, PIECE_BYTES, SameData, checksum, odd_ranks, pieces, steps_apart
from autopar.runtime.step.session import Session
from tests.at_once import at_once
from tests.runtime import stages
from tests.runtime.run.test_launch import emitted  # noqa: F401
from tests.warm import torchrun

BATCH = [torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6), torch.zeros(0)]
LARGE = torch.arange(100_000)


@pytest.mark.parametrize(
    "other",
    [
        [BATCH[0] + 1e-7, *BATCH[1:]],
        [BATCH[0].flip(0), *BATCH[1:]],
        [BATCH[0].view(4, 3), *BATCH[1:]],
        [BATCH[0], BATCH[1].view(2, 3), BATCH[2]],
        [BATCH[0].view(torch.int32), *BATCH[1:]],
        [BATCH[1], BATCH[0], BATCH[2]],
        BATCH[:2],
    ],
)
def test_whatever_differs_changes_the_checksum(other):
    assert checksum(other) != checksum(BATCH)
    assert checksum([t.clone() for t in BATCH]) == checksum(BATCH)
    assert checksum([BATCH[0].t().contiguous().t(), *BATCH[1:]]) == checksum(BATCH)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.int8, torch.complex64])
def test_every_dtype_has_a_checksum(dtype):
    x = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert checksum([x]) == checksum([x.clone()]) != checksum([x.flip(0).roll(1)])


@pytest.mark.parametrize(
    ("batches", "odd"),
    [
        ((7, 7, 7, 7), []),
        ((7, 7, 8, 7), [2]),
        ((8, 7, 7, 7), [0]),
        ((7, 8), [1]),
        ((7, 8, 9, 7), [1, 2]),
        ((5, 6, 6, 5), [1, 2]),
    ],
)
def test_who_got_another_batch_is_named(batches, odd):
    assert odd_ranks(batches) == odd


def test_pieces_of_a_large_tensor_are_others_in_every_turn_and_cover_it():
    most, every = 1 << 16, LARGE.nbytes // PIECE_BYTES
    turns = [pieces(LARGE, most, turn) for turn in range(20)]
    assert all(PIECE_BYTES < part.numel() <= most for part in turns)
    firsts = {int(value) for part in turns for value in part.view(torch.int64)[:: PIECE_BYTES // 8]}
    assert len(firsts) == every
    assert torch.equal(pieces(LARGE, LARGE.nbytes, 3), LARGE.view(torch.uint8))


def test_ranks_compare_as_often_as_it_costs_little():
    assert steps_apart(1e-4, 1.0) == 1
    assert steps_apart(1e-4, 0.05) == 4
    assert steps_apart(1.0, 1e-3) == MOST_APART


def on_threads(body: Callable[[SameData, int], object], ranks: int = 3, **options: bool) -> list[object]:
    """The results of body on every rank."""

    def rank(comm: Comm) -> object:
        return body(SameData(comm, **options), comm.rank)

    return run_threads(ranks, {"rank": ranks}, rank, timeout_s=30)


def given(same: SameData, rank: int, odd_step: int, steps: int = 80, apart: int | None = None) -> None:
    """Rank 1 has another batch at one step."""
    for step in range(1, steps + 1):
        same.take([torch.full((4,), step + 0.5 * (rank == 1 and step == odd_step))], step)
        same.apart = apart or same.apart


@pytest.mark.parametrize("late", [False, True])
def test_other_batches_are_named_in_the_first_step(late):
    with pytest.raises(RankError, match=r"step 1: rank 1 \(.*\) got another batch than the others") as caught:
        on_threads(functools.partial(given, odd_step=1), late=late)
    assert caught.value.ranks == (1,)


@pytest.mark.parametrize("late", [False, True])
def test_what_differed_between_two_comparisons_is_found_at_the_next(late):
    with pytest.raises(RankError, match=r"step 23: rank 1 "):
        on_threads(functools.partial(given, odd_step=23, apart=10), late=late)


def test_a_program_for_several_shapes_compares_every_batch():
    with pytest.raises(RankError, match=r"step 23: rank 1 "):
        on_threads(functools.partial(given, odd_step=23, apart=10), every=True)


def test_the_same_batches_are_never_named():
    assert on_threads(functools.partial(given, odd_step=0)) == [None] * 3
    assert on_threads(functools.partial(given, odd_step=0), late=True) == [None] * 3


def test_batches_are_compared_before_state_is_read():
    def body(same: SameData, rank: int) -> None:
        given(same, rank, odd_step=40, steps=40, apart=4)
        same.settle("saving", 40)

    with pytest.raises(RankError, match=r"step 40: rank 1 .* got another batch"):
        on_threads(body)


@pytest.mark.parametrize("odd", [None, 0, 4])
def test_own_rows_and_global_batches_are_compared_apart(odd):
    """Ranks 0 and 1 take the same rows; rank 2 has others, and at one step rank 1 does not read what rank 0 does."""

    def body(same, rank):
        for step in range(8):
            rows = torch.full((4,), int(rank == 2))
            rows = rows + 1 if step == odd and rank == 1 else rows
            same.take(*((BATCH, step) if step % 3 == 2 else ([rows], step, (0, 0, 1))))
        same.settle("saving", 8)
        taken, checksums, alike = same.uncompared()
        return taken, checksums[None], alike

    if odd is None:
        told = on_threads(body)
        assert told == [told[0]] * 3
        assert told[0][0] == told[0][2] == 8
    else:
        with pytest.raises(RankError, match=r"step \d: ranks? [01] .* got other rows") as error:
            on_threads(body)
        assert error.value.ranks in ((0,), (1,))


@pytest.mark.parametrize("step", [0, 5])
def test_settings_of_an_optimizer_are_part_of_a_batch(step):
    def body(same, rank):
        for n in range(8):
            same.take(BATCH, n, None, [0.1 + (rank == 2 and n >= step)])
        same.settle("saving", 8)

    with pytest.raises(RankError, match="optimizer set otherwise") as error:
        on_threads(body)
    assert error.value.ranks == (2,)


def test_a_rank_whose_data_ended_earlier_is_named():
    def body(same: SameData, rank: int) -> None:
        given(same, rank, odd_step=0, steps=5 if rank == 2 else 8, apart=1)
        same.settle("saving", 5)

    said = r"rank 2 \(.*\) is saving after 5 batches, while the others are taking batch 6 for step 6"
    with pytest.raises(RankError, match=said) as caught:
        on_threads(body)
    assert caught.value.ranks == (2,)


def test_a_batch_that_was_taken_ahead_counts_once():
    def body(same: SameData, rank: int) -> int:
        same.ahead(BATCH, 1)
        same.take(BATCH, 1)
        same.settle("saving", 1)
        return same.taken

    assert on_threads(body) == [1, 1, 1]


@pytest.mark.parametrize("training", [True, False])
def test_a_session_compares_before_its_guards_see_a_batch(training):
    program = stages.mlp(2, 1) if training else stages.inference(2, 1)

    def rank(comm: Comm) -> None:
        session = Session(program.pipeline, program.modules, comm, compare=True)
        batch: list[Tensor] = [
            torch.zeros(like.shape, dtype=like.dtypes[0]) for like in session.taking(False).inputs[0]
        ]
        batch = [leaf[:2] for leaf in batch] if comm.rank else batch
        session.train_step(batch) if training else session.forward(batch)

    with pytest.raises(RankError, match=r"step 1: rank 1 .* got another batch"):
        run_threads(2, program.mesh, rank, timeout_s=30)


def test_a_single_rank_pays_nothing():
    program = stages.mlp(1, 1)
    (same_data,) = run_threads(
        1, program.mesh, lambda comm: Session(program.pipeline, program.modules, comm, compare=True).same_data
    )
    assert same_data is None


DATA = """import os, time
from autopar_runtime.step import same_data
same_data.SHARE = 1.0  # of a step: batches are compared in every one, however slow a loaded machine is
from programs import stages
ODD = os.environ["RANK"] == "1"
def other():
    for n, batch in enumerate(stages.batches(8)):
        yield [t + 1 for t in batch] if ODD and n == 0 else batch
def shuffled():
    yield from stages.batches(8) if not ODD else stages.batches(8)[::-1]
def shorter():
    for batch in stages.batches(3 if ODD else 8):
        time.sleep(0.5)
        yield batch
"""
OWN_LOOP = """import os, sys, torch
sys.path.insert(0, sys.argv[1])
from autopar_runtime.run.launch import load
from programs import stages
how, odd = sys.argv[2], os.environ["RANK"] == "1"
program = load(sys.argv[1], timeout_s=60.0)
data = [torch.utils.data.TensorDataset(*batch)[:] for batch in stages.batches(8)]
torch.manual_seed(int(os.environ["RANK"]))
loader = torch.utils.data.DataLoader(data, batch_size=None, shuffle=how == "shuffled")
for step, batch in enumerate(loader):
    if how.startswith("shorter") and odd and step == 3:
        break
    if how == "quietly other" and odd and step == 7:
        batch = [t + 1 for t in batch]
    sys.stdout.write(f"loss {step + 1} {program(*batch).item()}\\n")  # at once, as other ranks write there too
    sys.stdout.flush()
if "quietly" not in how:
    program.save(sys.argv[3])
print("saved", flush=True)
"""


@pytest.fixture(scope="module")
def out(emitted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    copy = tmp_path_factory.mktemp("same_data") / "out"
    shutil.copytree(emitted, copy, ignore=shutil.ignore_patterns("saved", "__pycache__"))
    (copy / "data.py").write_text(DATA)
    (copy / "own_loop.py").write_text(OWN_LOOP)
    return copy


@pytest.mark.timeout(100)
@pytest.mark.parametrize("how", ["--save", pytest.param("--run-dir", marks=pytest.mark.slow)])
def test_run_py_names_ranks_with_other_data_within_two_steps(out, tmp_path, how):
    def look(data: str, less_than: int, saves: list[object]) -> None:
        own = ["--steps", 8, "--timeout", 60, "--data", f"{out / 'data.py'}:{data}", *saves]
        done = torchrun(2, out / "run.py", *own)
        assert done.returncode == 1
        assert "got another batch than the others" in done.stderr
        shown = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("step ")]
        assert max(shown, default=0) < less_than

    to = {"--run-dir": tmp_path / "run", "--save": tmp_path / "saved"}[how]
    cases = (("other", 1), ("shuffled", 2), ("shorter", 5))
    at_once({data: functools.partial(look, data, less, [how, to / data]) for data, less in cases}, most=3)
    assert not (tmp_path / "saved").exists()


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_an_own_loop_names_ranks_with_other_data_within_two_steps(out, tmp_path):
    def look(how: str, said: str, last: int) -> None:
        done = torchrun(2, out / "own_loop.py", out, how, tmp_path / how)
        losses = [line for line in done.stdout.splitlines() if line.startswith("loss ")]
        assert said in done.stderr, done.stderr
        assert max((int(line.split()[1]) for line in losses), default=0) <= last
        assert (done.returncode == 0) == (tmp_path / how).exists() == (how == "alike"), done.stderr

    cases = [
        ("alike", "", 8),
        ("shuffled", "got another batch than the others", 2),
        ("shorter", "is reading or saving the state after 3 batches, while ", 4),
        ("shorter quietly", "came to the end of its script after 3 batches", 4),
    ]
    at_once({case[0]: functools.partial(look, *case) for case in cases}, most=3)


@pytest.mark.timeout(100)
def test_batches_that_nobody_compared_are_compared_when_a_script_ends(out, tmp_path):
    done = torchrun(2, out / "own_loop.py", out, "quietly other", tmp_path / "saved")
    assert done.returncode == 1
    assert "got another batch than the others" in done.stderr
    assert "rank 1 (" in done.stderr or "rank 0 (" in done.stderr
