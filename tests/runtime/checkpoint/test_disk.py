"""Files of a run that cannot be written, for a while or for good: it goes on, or ends by name; the last good step is whole."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.checkpoint.run_directory import RunDirectory
from tests.runtime.run.test_faults import DATA, RANKS, out, staged  # noqa: F401
from tests.runtime.staged import run as run_ranks

HARM = """
import errno, shutil, subprocess

WHILE = range(5, 9)  # batches: the steps 6 and 8 are to be saved then

def directory():
    return next(one for one in running() if type(one).__name__ == "Run").directory.root

def writing(number):
    "Writing a step raises this error, on one rank."
    def change(write):
        def run(*args, **more):
            if RANK == 2 and now[0] in WHILE:
                raise OSError(number, os.strerror(number), str(directory_[0]))
            return write(*args, **more)
        return run
    now, directory_ = [0], [directory()]
    patched(runtime("checkpoint.checkpoint_files").RankFile, "write", change)
    return batches(lambda n, b: now.__setitem__(0, n))

def no_space():
    return writing(errno.ENOSPC)

def read_only():
    return writing(errno.EROFS)

def quota():
    "The quota is found out as a file is written."
    return writing(errno.EDQUOT)

def quota_at_the_end():
    "The quota is found out as files are made durable, which some file systems do."
    def change(sync):
        def run(handle):
            if RANK == 2 and now[0] in WHILE:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            return sync(handle)
        return run
    now = [0]
    patched(os, "fsync", change)
    return batches(lambda n, b: now.__setitem__(0, n))

def limited():
    "No file of rank 0 may grow, those of its log, its metrics and its steps among them."
    import resource
    def harm(n, b):
        if RANK == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100 if n in WHILE else -1, -1))
    return batches(harm)

def for_good():
    global WHILE
    WHILE = range(5, 1000)
    return writing(errno.ENOSPC)

def mounted(harm, mend):
    root = directory()
    def change(n, batch):
        if RANK == 0 and n in (5, 9):
            (harm if n == 5 else mend)(root)
    return batches(change)

def really_full():
    def fill(root):
        with open(root / "filler", "wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 12)):
                    pass
            except OSError:
                pass
    return mounted(fill, lambda root: (root / "filler").unlink())

def really_read_only():
    "A second mount of it, as the first one has an open file that is written to."
    def mount(*how):
        subprocess.run([*how], check=True)
    def harm(root):
        mount("mount", "--bind", root, root)
        mount("mount", "-o", "remount,bind,ro", root)
    return mounted(harm, lambda root: mount("umount", root))

def vanishing():
    "The files of a step are gone before they are all written."
    def change(facts):
        def run(path):
            if RANK == 1 and now[0] in WHILE:
                shutil.rmtree(path.parent, ignore_errors=True)
            return facts(path)
        return run
    now = [0]
    patched(runtime("checkpoint.saver"), "file_facts", change)
    return batches(lambda n, b: now.__setitem__(0, n))

def vanished():
    "All of the directory is gone, between two steps that are saved."
    return batches(lambda n, b: shutil.rmtree(directory()) if (RANK, n) == (1, 6) else None)

def in_turn():
    "No space for step 4, then a directory that is gone, then files of rank 0 that may not grow, step 10 among them."
    global WHILE
    import resource
    WHILE = range(3, 4)
    for n, batch in enumerate(writing(errno.ENOSPC)):
        if (RANK, n) == (1, 6):
            shutil.rmtree(directory())
        if RANK == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100 if n in range(9, 11) else -1, -1))
        yield batch
"""
STEPS = 14
ARGUMENTS = [
    "--steps",
    str(STEPS),
    "--save-every",
    "2",
    "--keep",
    "9",
    "--synchronous",
    "--hang",
    "60",
    "--timeout",
    "30",
]


@pytest.fixture(scope="module", autouse=True)
def harmful(out: Path) -> None:  # noqa: F811
    (out / "data.py").write_text(DATA + HARM)


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """All of a step, which must be whole."""
    directory = RunDirectory(run)
    found = directory.read(step)
    assert directory.check(found, found.files) == ""
    source = checkpoint.TensorSource(directory.folder(step))
    return {name: source.read(name) for name, kind in source.signatures.items() if kind is not None}


@pytest.fixture(scope="module")
def wanted(out, tmp_path_factory) -> dict[str, torch.Tensor]:  # noqa: F811
    folder = tmp_path_factory.mktemp("wanted")
    own = ["--run-dir", folder / "run", *ARGUMENTS, "--data", f"{out / 'data.py'}:nothing"]
    codes, said = run_ranks(out, own, RANKS, folder / "log")
    assert codes == [0] * RANKS, said
    return tensors(folder / "run", STEPS)


def went_on(done, wanted: dict[str, torch.Tensor], steps: list[int]) -> None:
    assert done.codes == [0] * RANKS, done.said
    assert RunDirectory(done.run).steps() == steps
    have = tensors(done.run, STEPS)
    assert have.keys() == wanted.keys()
    assert all(torch.equal(have[name], wanted[name]) for name in wanted)
    assert all(tensors(done.run, step) for step in steps)


def test_a_run_goes_on_without_space_without_its_directory_and_with_a_log_that_may_not_grow(staged, wanted):  # noqa: F811
    """All in one run, one after the other; each for itself is a slow test."""
    done = staged("in_turn", *ARGUMENTS)
    went_on(done, wanted, [14, 12, 8])
    assert "step 4 was not saved" in done.said
    assert "No space left on device" in done.said
    assert "the run goes on, the last saved step is 2" in done.said
    assert "lines are lost here: there was no room]" in done.said
    assert f"saved step {STEPS}" in done.said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("no_space", "No space left on device"),
        ("read_only", "Read-only file system"),
        ("vanishing", "was not saved"),
        ("quota", "quota exceeded"),
        ("quota_at_the_end", "quota exceeded"),
    ],
)
def test_a_step_that_cannot_be_written_is_said_and_the_run_goes_on(staged, wanted, fault, said):  # noqa: F811
    done = staged(fault, *ARGUMENTS)
    went_on(done, wanted, [14, 12, 10, 4, 2])
    for step in (6, 8):
        assert f"step {step} was not saved" in done.said
    assert said in done.said
    assert "the run goes on, the last saved step is 4" in done.said


@pytest.mark.slow
def test_a_log_that_may_not_grow_loses_lines_and_ends_no_run(staged, wanted):  # noqa: F811
    done = staged("limited", *ARGUMENTS)
    went_on(done, wanted, [14, 12, 10, 4, 2])
    assert "lines are lost here: there was no room]" in done.said
    assert f"saved step {STEPS}" in done.said


@pytest.mark.slow
def test_a_directory_that_vanishes_between_two_steps_is_made_again(staged, wanted):  # noqa: F811
    went_on(staged("vanished", *ARGUMENTS), wanted, [14, 12, 10, 8])


def test_a_run_that_can_save_no_longer_ends_by_name_and_its_last_step_is_whole(staged):  # noqa: F811
    done = staged("for_good", *ARGUMENTS)
    assert done.codes == [1] * RANKS
    assert "step 10 was not saved" in done.said
    assert "No space left on device" in done.said
    assert "that is 3 in a row, so the run ends" in done.said
    assert RunDirectory(done.run).steps() == [4, 2]
    assert tensors(done.run, 4)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["really_full", "really_read_only"])
def test_a_file_system_that_is_full_or_read_only_for_a_while(staged, wanted, tmp_path, fault):  # noqa: F811
    run = tmp_path / "run"
    run.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "autopar-test", str(run)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("file systems may not be mounted here")
    try:
        done = staged(fault, *ARGUMENTS)
        went_on(done, wanted, [14, 12, 10, 4, 2])
        assert "the run goes on, the last saved step is 4" in done.said
    finally:
        subprocess.run(["umount", "-l", str(run)], check=True)
