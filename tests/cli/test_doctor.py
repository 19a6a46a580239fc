"""`autopar-doctor` says who kept a run, from the files that its ranks left."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import jsonschema
import pytest
import torch
from torch import nn

import autopar
from autopar.cli.doctor import main
from autopar.runtime.health.flight import Flight
from tests.test_house import ROOT
from tests.warm import python

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


def test_json_of_a_conclusion_is_as_its_schema_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for rank in (0, 2):
        leave(tmp_path / "flight", rank, 6, waits=True)
    leave(tmp_path / "flight", 1, 5, waits=False)
    assert main([str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    jsonschema.validate(said, json.loads((ROOT / "docs/schemas/doctor.json").read_text()))
    assert (said["culprits"], said["ranks"]) == ([1], [0, 1, 2])
    assert said["messages"]["1"][-1]["what"] == "all_reduce of float32[4] at layer 4"


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


def test_before_a_run_it_looks_at_this_machine(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    batch = (torch.zeros(4, 8), torch.zeros(4, 8))
    program = autopar.compile(
        nn.Linear(8, 8),
        autopar.ClusterSpec.local(2),
        batch,
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        options=autopar.Options(mesh={"dp": 2}),
    )
    out = program.save(tmp_path / "out")
    assert main(["--preflight", str(out), "--run-dir", str(tmp_path / "run")]) == 0
    assert "1 came, from 1 machines" in capfd.readouterr().out
    (out / "stages" / "stage_0.py").unlink()
    environment = os.environ | {"PYTHONPATH": str(Path(autopar.__file__).parent.parent)}
    command = [python(), "-m", "autopar.cli.doctor", "--preflight", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 1
    assert "error: missing file: rank 0" in done.stderr
    assert main(["--preflight", str(tmp_path)]) == 2
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--steps", "3"])
