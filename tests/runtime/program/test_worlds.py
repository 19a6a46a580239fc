"""A run takes the plan for the number of ranks it finds itself with; ranks beyond it wait."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from autopar.runtime.errors import RuntimeProgramError
from autopar.runtime.program.manifest import Manifest
from autopar.runtime.program.worlds import WrongWorldSize, manifest_for
from autopar.runtime.run.spares import AGAIN, DONE, START_AGAIN, STOPPED, stand_by, tell_spares


def write(folder: Path, ranks: int, **more: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {"world_size": ranks, "pipeline": "pipeline.py", "training": True, "inputs": [], **more}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "pipeline.py").write_text(f'STAGES = [{{"mesh": {{"dp": {ranks}}}, "first_rank": 0}}]')


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A program for 8 ranks, and for 2 and 6."""
    write(tmp_path, 8, weights="weights", worlds=[2, 6])
    for ranks in (2, 6):
        write(tmp_path / "worlds" / str(ranks), ranks)
    return tmp_path


@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (3, 2), (5, 2), (6, 6), (7, 6), (8, 8), (100, 8)])
def test_the_largest_plan_that_is_no_larger_is_taken_where_there_may_be_spares(directory: Path, ranks: int, size: int):
    found = manifest_for(directory, ranks, spares=True)
    assert found.world_size == size
    assert found.directory == (directory if size == 8 else directory / "worlds" / str(size))
    assert found.weights_folder == directory / "weights"
    assert found.worlds == (2, 6)
    if ranks == size:
        assert manifest_for(directory, ranks) == found
        return
    with pytest.raises(WrongWorldSize, match=rf"for 8 ranks .*and for 2, 6, but WORLD_SIZE is {ranks};"):
        manifest_for(directory, ranks)


def test_fewer_ranks_than_any_plan_has_are_refused(directory: Path):
    with pytest.raises(WrongWorldSize, match=r"but WORLD_SIZE is 1; .*program\.save\(…, also=\[…\]\)"):
        manifest_for(directory, 1, spares=True)


def test_the_plan_that_was_tuned_is_that_of_its_own_number_alone(directory: Path):
    write(directory / "candidates" / "1", 8)
    (directory / "tuned.json").write_text('{"folder": "candidates/1"}')
    assert manifest_for(directory, 8).directory == directory / "candidates" / "1"
    assert manifest_for(directory, 6).directory == directory / "worlds" / "6"
    assert manifest_for(directory, 6).weights_folder == directory / "weights"


def test_a_program_for_another_number_than_its_folder_says_is_named(directory: Path):
    write(directory / "worlds" / "6", 5)
    with pytest.raises(RuntimeProgramError, match="holds a program for 5 ranks"):
        manifest_for(directory, 6)


def spare(directory: Path, store: dist.Store, hang_s: float = 0.0) -> list[object]:
    """The outcome of rank 8 of 9, in a list that it comes into."""
    outcome: list[object] = []

    def body() -> None:
        try:
            outcome.append(stand_by(store, Manifest.read(directory), 8, hang_s, timeout_s=30.0))
        except RuntimeProgramError as error:
            outcome.append(error)

    threading.Thread(target=body, daemon=True).start()
    return outcome


def ended(outcome: list[object]) -> object:
    end = time.monotonic() + 100
    while not outcome and time.monotonic() < end:
        time.sleep(0.05)
    return outcome[0]


@pytest.mark.parametrize(("why", "status"), [(DONE, 0), (STOPPED, START_AGAIN), (AGAIN, START_AGAIN)])
def test_a_spare_waits_until_the_run_ends(directory: Path, why: str, status: int):
    store = dist.HashStore()
    outcome = spare(directory, store)
    time.sleep(0.3)
    assert outcome == []
    tell_spares(store, 1, why)
    assert ended(outcome) == status


def test_a_spare_ends_where_the_run_is_no_longer_heard_of(directory: Path):
    store = dist.HashStore()
    outcome = spare(directory, store, hang_s=1.0)
    for n in range(2):
        store.set("beat/0", str(n))
        time.sleep(1.2)
    assert outcome == []
    assert "not been heard of for" in str(ended(outcome))
