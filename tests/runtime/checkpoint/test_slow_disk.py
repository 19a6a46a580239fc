"""Files that take longer than `--hang` says: everybody waits, and nobody is named."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from autopar.runtime.checkpoint.run_directory import RunDirectory
from tests.at_once import at_once
from tests.runtime.run.test_faults import DATA, RANKS, out, stage  # noqa: F401
from tests.runtime.staged import run as run_ranks

SLOW_S, HANG_S = 7.0, 1.5
"""Seconds: beyond the limit, its grace, and two readings of beats."""
HARM = f"""
SLOW_S = {SLOW_S}

def slowly(owner, name, rank, call):
    "One call of a function, counted from 1, takes long on one rank."
    def change(function):
        calls = [0]
        def run(*args, **more):
            calls[0] += 1
            if (RANK, calls[0]) == (rank, call):
                time.sleep(SLOW_S)
                print(f"slow {{name}}", flush=True)
            return function(*args, **more)
        return run
    patched(owner, name, change)

def paced(harm=lambda n, b: None):
    "The watch is to have seen steps before something is slow."
    def change(n, b):
        time.sleep(0.05)
        return harm(n, b)
    return batches(change)

def saving():
    slowly(runtime("checkpoint.checkpoint_files").RankFile, "write", 1, 2)
    slowly(runtime("checkpoint.run_directory").RunDirectory, "complete", 0, 3)
    return paced()

def reporting():
    slowly(runtime("run.metrics").JsonLines, "__call__", 0, 6)
    slowly(runtime("run.saving").Saving, "_say_lost", 0, 2)
    return paced()

def going_back():
    slowly(runtime("checkpoint.run_directory").RunDirectory, "check", 2, 1)
    slowly(runtime("checkpoint.checkpoint_reader").DataReader, "read_data", 1, 1)
    return paced(lambda n, b: [b[0] * float("nan"), b[1]] if n == 9 else None)

def looking():
    "What is around the going back: the list of steps, the first files of one, and the log."
    slowly(runtime("checkpoint.run_directory").RunDirectory, "steps", 3, 1)
    slowly(runtime("checkpoint.checkpoint_reader").DataReader, "__init__", 2, 1)
    slowly(type(sys.stdout), "_put", 0, 12)  # steps 1 to 9, and what rank 0 said before them
    return paced(lambda n, b: [b[0] * float("nan"), b[1]] if n == 9 else None)

def replacing():
    slowly(runtime("checkpoint.checkpoint"), "begin", 0, 2)
    slowly(runtime("checkpoint.checkpoint"), "_write_own", 3, 3)
    slowly(runtime("checkpoint.checkpoint"), "_complete", 0, 4)
    return paced()
"""


@pytest.fixture(scope="module", autouse=True)
def harmful(out: Path) -> None:  # noqa: F811
    (out / "data.py").write_text(DATA + HARM)


CASES = {
    "saving --synchronous": ("write", "complete"),
    "saving": ("write", "complete"),
    "reporting": ("__call__", "_say_lost"),
    "going_back --on-nan rewind": ("check", "read_data"),
}


def look(out: Path, run: Path, what: str, slow: tuple[str, ...]) -> None:  # noqa: F811
    done = stage(out, run, *what.split(), "--steps", 14, "--save-every", 4, "--hang", HANG_S)
    assert done.codes == [0] * RANKS, done.said
    assert all(f"slow {name}" in done.said for name in slow), done.said
    assert "hang" not in done.said
    assert not (done.run / "failures.jsonl").exists()
    assert RunDirectory(done.run).steps()[0] == 14


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_nobody_is_named_where_files_of_a_run_are_slow(out, tmp_path):  # noqa: F811
    at_once({what: functools.partial(look, out, tmp_path / what, what, slow) for what, slow in CASES.items()})


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_nobody_is_named_where_looking_for_a_step_to_go_back_to_is_slow(out, tmp_path):  # noqa: F811
    look(out, tmp_path / "looking", "looking --on-nan rewind", ("steps", "__init__", "_put"))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_nobody_is_named_where_a_checkpoint_is_replaced_slowly(out, tmp_path):  # noqa: F811
    own = ["--steps", 20, "--save", tmp_path / "saved", "--save-every", 4, "--hang", HANG_S, "--timeout", 60]
    codes, said = run_ranks(out, [*own, "--data", f"{out / 'data.py'}:replacing"], RANKS, tmp_path / "log")
    assert codes == [0] * RANKS, said
    assert all(f"slow {name}" in said for name in ("begin", "_write_own", "_complete")), said
    assert "hang" not in said
