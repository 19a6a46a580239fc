"""`run.py --run-dir`: whatever ends a run, the same command goes on, and its weights are those of a run that nothing ended."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autopar.runtime import Comm, RuntimeProgramError, run_threads
from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.checkpoint.run_directory import RunDirectory, StepRecord
from autopar.runtime.data.whole_files import COMPLETE, file_facts
from autopar.runtime.program.arguments import parser
from autopar.runtime.program.batches import BatchInput, random_batches
from autopar.runtime.run import directory_run
from tests.runtime import stages
from tests.runtime.run.test_launch import emitted  # noqa: F401
from tests.runtime.scenarios import session_of
from tests.warm import TORCHRUN, python, torchrun

STEPS, SAVE_EVERY = 24, 4
DATA = """import os, resource, signal, sys, time
from pathlib import Path
from programs import stages

HERE = Path(__file__).parent

def once(name):
    "Whether this is the first time, in all processes."
    try:
        (HERE / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def batches(harm=lambda n: None):
    for n, batch in enumerate(stages.batches(40)):
        yield harm(n) or batch

def dying():
    def harm(n):
        if os.environ["RANK"] == str(n % int(os.environ["WORLD_SIZE"])) and n in (13, 14) and once(f"died{n}"):
            os.kill(os.getpid(), signal.SIGKILL)
    return batches(harm)

def slow():
    return batches(lambda n: time.sleep(0.05))

def slower():
    return batches(lambda n: time.sleep(1 if n > 6 else 0))

def slow_until_told():
    return batches(lambda n: None if (HERE / "told").exists() else time.sleep(0.05))

def poisoned():
    return batches(lambda n: [t * float("nan") for t in stages.batches(1)[0]] if n == 9 else None)

def hopeless():
    return batches(lambda n: [t * float("nan") for t in stages.batches(1)[0]] if n >= 9 else None)

def other():
    return batches(lambda n: [t + 1 for t in stages.batches(1)[0]] if os.environ["RANK"] == "1" else None)

def deleted():
    def harm(n):
        if n == 6 and os.environ["RANK"] == "0":
            run = sys.argv[sys.argv.index("--run-dir") + 1]
            os.rename(run, run + "-gone")
    return batches(harm)

def full():
    def harm(n):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 if 5 <= n < 9 else -1, -1))
    return batches(harm)
"""


@pytest.fixture(scope="module")
def out(emitted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    copy = tmp_path_factory.mktemp("staying") / "out"
    shutil.copytree(emitted, copy, ignore=shutil.ignore_patterns("saved", "__pycache__"))
    (copy / "data.py").write_text(DATA)
    return copy


@pytest.fixture(scope="module")
def out_of_four(out: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model for two data-parallel ranks times two tensor-parallel ones."""
    copy = tmp_path_factory.mktemp("four") / "out"
    shutil.copytree(out, copy, ignore=shutil.ignore_patterns("__pycache__", "died*"))
    for path in (copy / "stages" / "stage_0.py", copy / "pipeline.py"):
        path.write_text(path.read_text().replace("mlp(2, 1", "mlp(2, 2"))
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"world_size": 4, "placement": [2, 0, 3, 1]}))
    return copy


def command(out: Path, run: Path, data: str = "batches", *more: str) -> list[str]:
    own = ["--run-dir", str(run), "--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--timeout", "20"]
    return [str(out / "run.py"), *own, "--data", f"{out / 'data.py'}:{data}", *more]


def final(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last step."""
    directory = RunDirectory(run)
    step = directory.steps()[0]
    assert step == STEPS
    found = directory.read(step)
    assert directory.check(found, found.files) == ""
    source = checkpoint.TensorSource(directory.folder(step))
    return {name: source.read(name) for name, kind in source.signatures.items() if kind is not None}


def undisturbed(out: Path, run: Path, ranks: int) -> Path:
    """The directory of a run that nothing ended."""
    done = torchrun(ranks, *command(out, run))
    assert done.returncode == 0, done.stderr
    assert f"saved step {STEPS}" in done.stdout
    return run


@pytest.fixture(scope="module")
def whole_run(out: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(out, tmp_path_factory.mktemp("wanted") / "run", 2)


@pytest.fixture(scope="module")
def wanted(whole_run: Path) -> dict[str, torch.Tensor]:
    return final(whole_run)


@pytest.fixture(scope="module")
def wanted_of_four(out_of_four: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return final(undisturbed(out_of_four, tmp_path_factory.mktemp("wanted") / "four", 4))


def same(run: Path, wanted: dict[str, torch.Tensor]) -> bool:
    have = final(run)
    return have.keys() == wanted.keys() and all(torch.equal(have[name], wanted[name]) for name in wanted)


def start(
    out: Path, arguments: list[str], restarts: int = 0, ranks: int = 2, executable: str = ""
) -> subprocess.Popen[str]:
    launcher = [executable or python(), *TORCHRUN, f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*launcher, f"--max-restarts={restarts}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def signalled(process: subprocess.Popen[str], number: int, *at: str) -> str:
    """The output of a run to which a signal is sent at each of these beginnings of lines."""
    lines, waited_for = [], list(at)
    for line in process.stdout or ():
        lines.append(line)
        if line.startswith(waited_for[0]):
            process.send_signal(number)
            if not (waited_for := waited_for[1:]):
                break
    return "".join(lines) + process.communicate(timeout=60)[0]


@pytest.mark.timeout(300)
def test_signals_save_and_end_killed_ranks_are_started_again_and_the_same_command_goes_on(out, wanted, tmp_path):
    """One run: Ctrl-C, SIGTERM, two ranks that are killed, and the end of a run that nothing ended."""
    run, never = tmp_path / "run", ("--save-every", "100")
    said = signalled(start(out, command(out, run, "slow", *never)), signal.SIGINT, "step 4 ")
    (first, *_) = RunDirectory(run).steps()
    assert 4 <= first < 12, said[-3000:]
    assert said.count(f"all ranks save after step {first} and end") == 1
    assert f"stopped by a signal after step {first}; the same command goes on" in said
    assert "KeyboardInterrupt" not in said

    said = signalled(start(out, command(out, run, "slow", *never)), signal.SIGTERM, f"step {first + 1} ")
    (last, *_) = RunDirectory(run).steps()
    assert first < last < STEPS, said[-3000:]
    assert f"steps {first + 1} to {STEPS}" in said
    assert f"stopped by a signal after step {last}" in said

    process = start(out, command(out, run, "dying"), restarts=2)
    said, _ = process.communicate(timeout=180)
    assert process.returncode == 0, said[-4000:]
    assert f"steps {last + 1} to {STEPS}" in said
    assert all((out / f"died{n}").exists() for n in (13, 14))
    assert same(run, wanted)


@pytest.mark.timeout(100)
def test_ctrl_c_ends_at_once_the_second_time(out, tmp_path):
    process = start(out, command(out, tmp_path / "run", "slower", "--save-every", "100"))
    said = signalled(process, signal.SIGINT, "step 6 ", "all ranks save after step")
    assert RunDirectory(tmp_path / "run").steps() == []
    assert "stopped" not in said


@pytest.mark.timeout(200)
def test_a_damaged_step_is_named_and_the_one_before_is_taken(out, whole_run, wanted, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    before = RunDirectory(run).steps()[1]
    path = next(RunDirectory(run).folder(STEPS).glob("__1_*"))
    path.write_bytes(path.read_bytes()[:-5])
    done = torchrun(2, *command(out, run))
    assert done.returncode == 0, done.stderr
    assert f"damaged: step {STEPS}: {path} is not what was written" in done.stderr
    assert f"steps {before + 1} to {STEPS}" in done.stdout
    assert same(run, wanted)
    for step in RunDirectory(run).steps():
        (RunDirectory(run).folder(step) / "complete.json").unlink()
    done = torchrun(2, *command(out, run))
    assert done.returncode == 1
    assert "no step is whole" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_loss_that_is_no_number_ends_the_run_or_takes_it_back(out, tmp_path):
    done = torchrun(2, *command(out, tmp_path / "stop", "poisoned"))
    assert done.returncode == 1
    assert "the loss of step 10 is nan; the last saved step is 8" in done.stderr
    assert RunDirectory(tmp_path / "stop").steps() == [8, 4]
    done = torchrun(2, *command(out, tmp_path / "back", "poisoned", "--on-nan", "rewind"))
    assert done.returncode == 0, done.stderr
    assert "step 10: the loss is nan; back to step 8, past the batches since" in done.stdout
    found = RunDirectory(tmp_path / "back").read(STEPS)
    assert found.position == STEPS + 2  # batches 9 and 10 count for nothing
    assert all(bool(t.isfinite().all()) for t in final(tmp_path / "back").values() if t.is_floating_point())


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_run_whose_losses_stay_no_numbers_ends_however_often_it_saves(out, tmp_path):
    """A step that was taken back is not saved, so it is no new step that other rewinds count from."""
    done = torchrun(2, *command(out, tmp_path / "run", "hopeless", "--on-nan", "rewind", "--save-every", "1"))
    assert done.returncode == 1
    assert "the loss of step 10 is nan, after 3 rewinds since the last saved step (9)" in done.stderr
    assert RunDirectory(tmp_path / "run").steps()[0] == 9


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_step_that_cannot_be_written_does_not_end_the_run(out, wanted, tmp_path):
    done = torchrun(2, *command(out, tmp_path / "run", "full", "--synchronous"))
    assert done.returncode == 0, done.stderr
    assert "step 8 was not saved" in done.stderr
    assert "the last saved step is 4" in done.stderr
    assert RunDirectory(tmp_path / "run").steps() == [24, 20, 16]
    assert same(tmp_path / "run", wanted)


def test_a_run_goes_on_with_the_seed_that_it_was_started_with(tmp_path, monkeypatch):
    """The seed draws the batches, where there is no data, and what the model draws."""
    program = stages.mlp(1, 1)
    inputs = [BatchInput(shape=row["shape"], dtype=row["dtype"]) for row in program.pipeline.INPUTS]
    shown = types.SimpleNamespace(seed=5, save_every=1, plan_hash="a plan", worlds={}, inputs=inputs)
    monkeypatch.setattr(directory_run, "Stop", lambda *_: None)  # its signals are the process's
    monkeypatch.setattr(directory_run, "Metrics", lambda *_: None)
    monkeypatch.setattr(directory_run.Run, "_say_changes", lambda _: None)  # there are no files of a program
    monkeypatch.setattr(
        directory_run,
        "Saver",
        lambda folders, session, seed, *_: types.SimpleNamespace(directory=folders, seed=seed, saved=None),
    )

    def started(comm: Comm, *more: str) -> directory_run.Run:
        session = session_of(program, comm)
        session.load_weights(stages.weights())
        own = types.SimpleNamespace(
            session=session,
            manifest=shown,
            own_rows=False,
            resume=lambda step, **how: checkpoint.load(step, session, **how),
        )
        return directory_run.Run(own, parser().parse_args(["--run-dir", str(tmp_path), *more]), None)

    def save(run: directory_run.Run) -> None:
        folder = run.directory.partial(1)
        checkpoint.save(folder, run.program.session)
        files = {path.name: file_facts(path) for path in folder.iterdir() if path.name != COMPLETE}
        run.directory.complete(StepRecord(1, 3, run.saver.seed, 1, "a plan", files))

    def body(comm: Comm) -> None:
        first = started(comm, "--seed", "7")
        batches = list(itertools.islice(random_batches(shown.inputs, 7), 4))
        assert all(map(torch.equal, first.loop.batches.take(more=False)[0], batches[0]))
        first.program.session.train_step(batches[0])
        save(first)
        with pytest.raises(RuntimeProgramError, match="was started with --seed 7, not 8"):
            started(comm, "--seed", "8")
        for again in (started(comm), started(comm, "--seed", "7")):
            assert (again.seed, again.saver.seed, again.program.session.rt.seed) == (7, 7, 7)
            assert (again.loop.step, again.loop.position) == (1, 3)
            assert all(map(torch.equal, again.loop.batches.take(more=False)[0], batches[3]))

    run_threads(1, program.mesh, body, timeout_s=30)


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_run_directory_that_somebody_deletes_is_said_and_the_run_goes_on(out, wanted, tmp_path):
    done = torchrun(2, *command(out, tmp_path / "run", "deleted", "--synchronous"))
    assert done.returncode == 0, done.stderr
    assert (
        done.stderr.count(
            f"{tmp_path / 'run' / 'steps' / '0000000004'} is gone; the run goes on, and saves there again"
        )
        == 1
    )
    assert done.stderr.count("metrics.jsonl: step ") == 1
    assert same(tmp_path / "run", wanted)


@pytest.mark.timeout(100)
def test_what_cannot_work_is_refused_before_training(out, tmp_path):
    (tmp_path / "file").write_text("")
    done = torchrun(2, *command(out, tmp_path / "file"))
    assert done.returncode == 1
    assert "give a directory that every rank can write to" in done.stderr
    assert "step 1" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_ranks_that_are_given_other_data_are_named(out, tmp_path):
    done = torchrun(2, *command(out, tmp_path / "run", "other"))
    assert done.returncode == 1
    assert "step 1: rank 1" in done.stderr or "step 1: rank 0" in done.stderr
    assert "got another batch than the others" in done.stderr
    assert RunDirectory(tmp_path / "run").steps() == []


def workers(pid: int) -> list[int]:
    """Processes that torchrun started."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        return [int(word) for word in children.read_text().split()]
    except OSError:
        return []


def moments(seed: int) -> Iterator[float]:
    """Seconds between kills: some at once, some while steps run or are saved."""
    draw = random.Random(seed)
    while True:
        yield draw.choice((draw.uniform(0.0, 1.0), draw.uniform(2.0, 6.0), draw.uniform(4.0, 8.0)))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ranks", [2, 4])
def test_kills_at_random_moments_lose_nothing(request, tmp_path, ranks, seed):
    """Three kills -9 of one rank, or all, a run; torchrun starts them again."""
    of = {2: "", 4: "_of_four"}[ranks]
    out, wanted = request.getfixturevalue(f"out{of}"), request.getfixturevalue(f"wanted{of}")
    draw, run = random.Random(seed), tmp_path / "run"
    process = start(out, command(out, run, "slow"), restarts=12, ranks=ranks, executable=sys.executable)
    kills = 0
    try:
        for wait_s in moments(seed):
            if kills == 3 or process.poll() is not None:
                break
            time.sleep(wait_s)
            found = workers(process.pid)
            for pid in found if draw.random() < 0.3 else draw.sample(found, min(1, len(found))):
                os.kill(pid, signal.SIGKILL)
            kills += bool(found)
        said, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said[-4000:]
    assert same(run, wanted)
