"""`autopar-doctor` says who kept a run, from the files that its ranks left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.cli.doctor import main
from autopar.runtime.flight import Flight

ALL = (0, 1, 2)


def leave(folder: Path, rank: int, messages: int, waits: bool) -> None:
    """The file of a rank that has started so many messages, and waits for the last, or for nothing."""
    flight = Flight(rank, 3)
    flight.step, flight.action = 4, "B1.0"
    for n in range(messages):
        entry = flight.start(
            n, "dp (0, 1, 2)", ALL, ("all_reduce", n), f"all_reduce of float32[{n}] at layer {n}".__str__
        )
        flight.wait(entry)
        if not (waits and n == messages - 1):
            flight.end(entry)
    folder.mkdir(exist_ok=True)
    (folder / f"rank_{rank}.json").write_text(json.dumps(flight.as_data(flight.beat())))


def test_the_rank_that_others_wait_for_is_named_with_its_last_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for rank in (0, 2):
        leave(tmp_path / "flight", rank, 6, waits=True)
    leave(tmp_path / "flight", 1, 5, waits=False)
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("rank 1 is not waiting for anybody; it is at step 4, action B1.0")
    assert "ranks 0, 2 wait" in out
    assert "all_reduce of float32[4] at layer 4 over dp (0, 1, 2)" in out
    assert main([str(tmp_path / "flight"), "--rank", "2"]) == 0
    assert "#5      waited for all_reduce of float32[5]" in capsys.readouterr().out


def test_a_rank_that_left_nothing_is_the_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    leave(tmp_path / "flight", 0, 6, waits=True)
    leave(tmp_path / "flight", 1, 6, waits=True)
    assert main([str(tmp_path)]) == 0
    assert "rank 2 left nothing" in capsys.readouterr().out
    assert main([str(tmp_path), "--rank", "2"]) == 2
    assert "ranks that did: 0, 1" in capsys.readouterr().err


def test_where_there_is_nothing_to_look_at_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path)]) == 2
    assert "has no files of ranks" in capsys.readouterr().err
    (tmp_path / "rank_0.json").write_text('{"autopar_flight": 1, "ranks": 2}')
    assert main([str(tmp_path)]) == 2
    assert "is damaged" in capsys.readouterr().err
