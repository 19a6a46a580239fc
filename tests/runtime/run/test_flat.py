"""A run that goes on and on takes no more memory, files, threads and descriptors than after its first steps."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import warnings

import pytest

from autopar.runtime import run_threads
from autopar.runtime.checkpoint import checkpoint
from tests.runtime import stages
from tests.runtime.run.test_launch import emitted  # noqa: F401
from tests.runtime.scenarios import session_of
from tests.warm import torchrun

FEW, QUICK, LONG = 120, 240, 10_000
MARKS = (pytest.param(QUICK), pytest.param(LONG, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]))
MOST_BYTES = 24 << 20
"""The most bytes that memory may grow by between the first fifth of a run and its end: of 8,000 steps, 3 KB each."""
MOST_OBJECTS = 1000
"""The most objects that may be left by the same steps: what is kept of the last ones is bounded, and full after some."""
MOST_BLOCKS = 8000
"""The most blocks of memory that Python's objects may take more: those too that no collector of garbage looks at, such as text
and tuples of text."""
TAKEN = """import gc, os, sys

def taken():
    gc.collect()
    pages = int(open("/proc/self/statm").read().split()[1])
    return {
        "bytes": pages * os.sysconf("SC_PAGESIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "objects": len(gc.get_objects()),
        "blocks": sys.getallocatedblocks(),
    }
"""
DATA = (
    TAKEN
    + """import itertools, json, pathlib, threading
from programs import stages

def batches():
    steps, known = int(os.environ["STEPS"]), stages.batches(8)
    for n, batch in enumerate(itertools.cycle(known)):
        if n in (steps // 5, steps - 1):
            for thread in threading.enumerate():
                if thread.name.startswith("saving step"):
                    thread.join()  # it has files open
            with open(pathlib.Path(__file__).parent / f"taken_{os.environ['RANK']}.jsonl", "a") as file:
                file.write(json.dumps(taken()) + "\\n")
        yield batch
"""
)
exec(TAKEN)


def flat(first: dict[str, int], last: dict[str, int], steps: int) -> None:
    """Objects: of 8,000 steps less than one in eight leaves any; blocks: less than one a step. Memory is looked at after many
    steps: of few, what a process that has run other tests gives back is more."""
    assert steps < LONG or last["bytes"] - first["bytes"] < MOST_BYTES, (first, last)
    assert last["descriptors"] <= first["descriptors"], (first, last)
    assert last["threads"] <= first["threads"], (first, last)
    assert last["objects"] - first["objects"] < MOST_OBJECTS, (first, last)
    assert last["blocks"] - first["blocks"] < MOST_BLOCKS, (first, last)


@pytest.fixture
def nothing_kept():
    """pytest keeps what is logged and warned of."""
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("steps", MARKS)
def test_eight_ranks_as_threads(steps, tmp_path, nothing_kept):
    program, every = stages.mlp(4, 2, 1), max(steps // 200, 12)
    known, measured = stages.batches(8), []

    def body(comm):
        session = session_of(program, comm)
        session.load_weights(stages.weights())
        for step in range(steps):
            session.train_step(known[step % 8])
            if step % every == 0:
                checkpoint.save(tmp_path / "saved", session)
            if step in (steps // 5, steps - 1):
                comm.barrier()
                if comm.rank == 0:
                    measured.append(taken())  # noqa: F821
                comm.barrier()
        return len(list((tmp_path / "saved").iterdir()))

    before = threading.active_count()
    files = run_threads(8, program.mesh, body, timeout_s=1500)
    assert files[0] <= 4
    assert threading.active_count() == before
    flat(*measured, steps)


def test_a_step_leaves_nothing(nothing_kept):
    """Less than one object in two steps of two ranks. What is kept of the last steps is full by the middle, and what tests before
    left behind is gone."""
    program, known, measured = stages.mlp(2, 1, 1), stages.batches(8), []

    def body(comm):
        session = session_of(program, comm)
        session.load_weights(stages.weights())
        for step in range(FEW):
            session.train_step(known[step % 8])
            if step in (FEW // 4, FEW // 3, FEW // 2, FEW - 1):
                comm.barrier()
                if comm.rank == 0:
                    measured.append(taken())  # noqa: F821
                comm.barrier()

    run_threads(2, program.mesh, body)
    *_, first, last = measured
    flat(first, last, FEW)
    assert last["objects"] - first["objects"] < FEW // 4, (first, last)


@pytest.mark.slow
@pytest.mark.parametrize("steps", MARKS)
def test_two_processes_with_a_run_directory(steps, emitted, tmp_path, monkeypatch):  # noqa: F811
    out = tmp_path / "out"
    shutil.copytree(emitted, out, ignore=shutil.ignore_patterns("saved", "__pycache__"))
    (out / "data.py").write_text(DATA)
    monkeypatch.setenv("STEPS", str(steps))
    own = ["--run-dir", tmp_path / "run", "--steps", steps, "--save-every", max(steps // 200, 12), "--keep", "2"]
    done = torchrun(2, out / "run.py", *own, "--data", f"{out / 'data.py'}:batches", timeout=1500)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "run" / "steps").iterdir())) == 2
    assert len(os.listdir(tmp_path / "run")) <= 4
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == steps
    for rank in range(2):
        rows = [json.loads(line) for line in (out / f"taken_{rank}.jsonl").read_text().splitlines()]
        flat(*rows, steps)
