"""Staged faults in real processes: the run, and `autopar-doctor` afterwards, name the rank that is to blame.

Four ranks, dp 2 × tp 2. A fault is a function of (number of the batch, batch) in the ranks' data source.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from autopar import runtime
from autopar.cli.doctor import conclusion, read_flights
from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.checkpoint.run_directory import RunDirectory
from tests.at_once import at_once
from tests.runtime import stages
from tests.runtime.run.test_launch import PIPELINE, RUN, STAGE
from tests.runtime.staged import run as run_ranks

RANKS, STEPS, SAVE_EVERY, HANG_S = 4, 55, 20, 4.0
DATA = """import gc, os, signal, sys, time
import torch
from programs import stages

RANK = int(os.environ["RANK"])

def batches(harm):
    for n, batch in enumerate(stages.batches(100)):
        yield harm(n, batch) or batch

def patched(owner, name, change):
    setattr(owner, name, change(getattr(owner, name)))

def runtime(name):
    return sys.modules["autopar_runtime." + name]

def running():
    return gc.get_objects()

def session():
    return next(one for one in running() if type(one).__name__ == "Loop").program.session

def nothing():
    return batches(lambda n, b: None)

def stopped():
    return batches(lambda n, b: os.kill(os.getpid(), signal.SIGSTOP) if (RANK, n) == (2, 7) else None)

def looping():
    def harm(n, batch):
        while (RANK, n) == (1, 7):
            pass  # for ever
    return batches(harm)

def asleep():
    return batches(lambda n, b: time.sleep(1000) if (RANK, n) == (3, 7) else None)

def failing():
    return batches(lambda n, b: [][1] if (RANK, n) == (1, 7) else None)

def killed():
    return batches(lambda n, b: os.kill(os.getpid(), signal.SIGKILL) if (RANK, n) == (2, 7) else None)

def out_of_memory():
    def harm(n, batch):
        if (RANK, n) == (3, 7):
            raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
    return batches(harm)

def other_at_once():
    return batches(lambda n, b: [t + 1 for t in b] if RANK == 2 else None)

def other_later():
    return batches(lambda n, b: [t + 1 for t in b] if RANK == 2 and n > 7 else None)

def not_a_number():
    return batches(lambda n, b: [b[0].clone().fill_(float("nan")), b[1]] if (RANK, n) == (1, 7) else None)

def wrong_numbers():
    "Batches that are the same, wrong, on all ranks: no numbers, and then one that is far above the usual."
    wrong = {7: float("nan"), 9: float("inf"), 30: 30.0}
    return batches(lambda n, b: [b[0] * wrong[n], b[1]] if n in wrong else None)

def no_numbers():
    return batches(lambda n, b: [b[0] * float("nan"), b[1]] if n >= 25 else None)

def spoiled():
    "A rank whose numbers go bad between two steps."
    def harm(n, batch):
        if (RANK, n) == (2, 7):
            session().rt.params["w1"].fill_(float("nan"))
    return batches(harm)

def flipped():
    "One bit of one number of a copy of a parameter is another, on one rank of four."
    def harm(n, batch):
        if (RANK, n) == (2, 9):
            session().rt.params["b2"].view(torch.int64)[3] ^= 1
    return batches(harm)

def other_weights():
    def harm(n, batch):
        if (RANK, n) == (3, 0):
            for name in ("w1", "b2"):
                session().rt.params[name].mul_(1.5)
    return batches(harm)

def other_seed():
    if RANK == 1:
        session().rt.seed += 1
    return nothing()

def slow():
    return batches(lambda n, b: time.sleep(0.03) if RANK == 2 else None)

def path(change):
    "Rank 3 sends otherwise from batch 7 on."
    def harm(n, batch):
        if (RANK, n) == (3, 7):
            patched(runtime("comm.comm").Comm, "all_reduce", change)
        time.sleep(0.01)
    return batches(harm)

def left_out():
    def change(reduce):
        def run(self, x, axes, op="sum", site=""):
            return x if site == "mlp.seen" else reduce(self, x, axes, op, site)
        return run
    return path(change)

def other_shape():
    def change(reduce):
        def run(self, x, axes, op="sum", site=""):
            return reduce(self, x.repeat(2), axes, op, site)[:8] if site == "mlp.seen" else reduce(self, x, axes, op, site)
        return run
    return path(change)

def other_site():
    "Messages fit, and nothing hangs."
    return path(lambda reduce: lambda self, x, axes, op="sum", site="": reduce(self, x, axes, op, site and "elsewhere"))

def lost():
    "A message of rank 0 to rank 2 never leaves."
    def harm(n, batch):
        if (RANK, n) == (0, 7):
            dist = torch.distributed
            patched(dist, "isend", lambda send: lambda x, to, **more: None if to == 2 else send(x, to, **more))
    return batches(harm)

def stuck_in_saving():
    if RANK == 1:
        patched(runtime("checkpoint.saver"), "file_facts", lambda facts: lambda path: time.sleep(1000))
    return nothing()
"""


@dataclass(frozen=True)
class Ended:
    """A run with a fault: exit statuses, what its ranks said, and its directory."""

    codes: list[int]
    said: str
    run: Path

    @property
    def culprits(self) -> tuple[int, ...]:
        return conclusion(read_flights(self.run)).culprits


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("faults")
    (out / "autopar_runtime").symlink_to(Path(runtime.__file__).parent)
    (out / "run.py").write_text(RUN)
    (out / "programs").mkdir()
    for name in ("__init__.py", "stages.py"):
        shutil.copy((Path(__file__).parents[1] / name), out / "programs" / name)
    (out / "stages").mkdir()
    (out / "stages" / "stage_0.py").write_text(STAGE.format(zero=1).replace("mlp(2, 1", "mlp(2, 2"))
    (out / "pipeline.py").write_text(PIPELINE.format(zero=1).replace("mlp(2, 1", "mlp(2, 2"))
    (out / "data.py").write_text(DATA)
    checkpoint.write_full(out / "weights", stages.weights())
    manifest = {
        "world_size": RANKS,
        "pipeline": "pipeline.py",
        "training": True,
        "update": {"optimizer": {"module": "torch.optim", "name": "AdamW", "kwargs": {"lr": 1e-2}}},
        "seed": 3,
        "weights": "weights",
        "inputs": [{"shape": [8, 8], "dtype": "float64"}] * 2,
    }
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out


def stage(out: Path, folder: Path, fault: str, *more: object) -> Ended:
    folder.mkdir(exist_ok=True)
    own = [
        "--run-dir",
        folder / "run",
        "--steps",
        STEPS,
        "--save-every",
        SAVE_EVERY,
        "--hang",
        HANG_S,
        "--timeout",
        300,
    ]
    codes, said = run_ranks(out, [*own, "--data", f"{out / 'data.py'}:{fault}", *more], RANKS, folder / "log")
    return Ended(codes, said, folder / "run")


@pytest.fixture
def staged(out: Path, tmp_path: Path) -> Callable[..., Ended]:
    return functools.partial(stage, out, tmp_path)


@pytest.mark.slow
def test_without_a_fault_a_run_goes_through_and_nobody_is_named(staged):
    done = staged("nothing")
    assert done.codes == [0] * RANKS, done.said
    assert "error" not in done.said
    assert not (done.run / "flight").exists()


FAULTS = [
    ("stopped", (2,), "rank 2 no longer runs (stopped"),
    ("looping", (1,), "rank 1 is not waiting for anybody; it is at step 7 … data.py: … (harm)"),
    ("asleep", (3,), "rank 3 is not waiting for anybody"),
    ("failing", (1,), "IndexError: list index out of range"),
    ("killed", (2,), "rank 2 said nothing"),
    ("out_of_memory", (3,), "OutOfMemoryError: tried to allocate"),
    ("other_at_once", (2,), "step 1: rank 2"),
    ("other_later", (2,), "step 9: rank 2"),
    ("other_weights", (3,), "hold other values than the ranks that have copies"),
    ("other_seed", (1,), "step 1: rank 1 … run another plan, or with another seed, than the others"),
    ("not_a_number", (1,), "step 8: rank 1"),
    ("spoiled --on-nan skip", (2,), "rank 2: w1"),
    ("flipped --recheck 5", (2,), "step 10: rank 2"),
    ("left_out", (3,), "this run hangs: rank 3 sent other messages than the rest: message 1 of group dp (1, 3)"),
    ("other_shape", (3,), ""),
    ("other_site", (3,), "ranks have gone different ways: rank 3 sent other messages than the rest"),
    ("lost", (2,), "so it does not arrive: look at the network of ranks 0, 2"),
    ("stuck_in_saving --timeout 8 --save-every 2", (1,), "all wait for rank 1 (writing its files of step 2)"),
]
SLOW = (
    *(
        "asleep",
        "looping",
        "out_of_memory",
        "failing",
        "other_later",
        "other_seed",
        "flipped",
        "other_shape",
        "other_site",
    ),
    *("lost", "stuck_in_saving", "other_at_once", "not_a_number", "spoiled"),
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_culprit_of_a_staged_fault_is_named(out, tmp_path, slow):
    def look(name: str, fault: str, culprits: tuple[int, ...], said: str) -> None:
        done = stage(out, tmp_path / name, *fault.split())
        assert any(done.codes)
        assert done.culprits == culprits, done.said
        assert all(part in done.said for part in said.split(" … ")), done.said

    cases = {name: row for row in FAULTS for name in [row[0].split()[0]] if (name in SLOW) == slow}
    at_once({name: functools.partial(look, name, *row) for name, row in cases.items()}, most=4)


@pytest.mark.timeout(200)
def test_losses_that_are_no_numbers_are_skipped_and_one_far_above_the_usual_takes_the_run_back(staged):
    done = staged("wrong_numbers", "--on-nan", "skip", "--spike", 5, "--grad-norm")
    assert done.codes == [0] * RANKS, done.said
    assert "the loss of step 8 is nan: its update is skipped, 1 so far" in done.said
    assert "the loss of step 10 is nan: its update is skipped, 2 so far" in done.said  # inf - inf
    assert "  norm " in done.said
    directory = RunDirectory(done.run)
    found = directory.read(20)
    assert (found.step, found.position) == (20, 20), "skipped updates are steps"
    assert "step 31: the loss is " in done.said
    assert "; back to step 20, past the batches since" in done.said
    assert directory.read(STEPS).position == STEPS + 11


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_run_that_skips_every_update_ends_by_name(staged):
    done = staged("no_numbers", "--on-nan", "skip")
    assert done.codes == [1] * RANKS
    assert (
        "the loss of step 36 is nan, after 10 updates in a row that were skipped for this; the last saved step is 20"
        in done.said
    )
    directory = RunDirectory(done.run)
    assert directory.check(directory.read(20), directory.read(20).files) == ""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_slow_rank_is_named_and_the_run_goes_on(staged):
    done = staged("slow")
    assert done.codes == [0] * RANKS
    assert "step 51  slow: rank 2 (" in done.said
    assert "rank 1 (" not in done.said
