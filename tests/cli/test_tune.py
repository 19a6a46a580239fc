"""`autopar-tune`: candidates are programs, the fastest is the one that runs, and runs say what the cluster is like."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.cli import tune
from autopar.report import facts
from autopar.report.candidates import shape_of
from autopar.report.learned import learned, slowness
from autopar.report.predicted_vs_measured import Profile
from autopar.runtime.comm.recorder import Sent, Span, StepRecord
from autopar.runtime.errors import RuntimeProgramError
from autopar.runtime.program.manifest import Manifest
from tests.warm import python, torchrun


class Mlp(nn.Module):
    """The loss of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) * self.scale).square().sum()


BATCH = (torch.randn(8, 32),)


@pytest.fixture(scope="module")
def program() -> autopar.ParallelProgram:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    return autopar.compile(Mlp(), autopar.ClusterSpec.local(2), BATCH, optimizer=sgd)


@pytest.fixture(scope="module")
def saved(program: autopar.ParallelProgram, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program.save(tmp_path_factory.mktemp("tune") / "out", candidates=2)


def test_candidates_are_plans_of_other_shapes(program, saved):
    plans = [
        autopar.Plan.load(folder / "plan.json") for folder in (saved, saved / "candidates/1", saved / "candidates/2")
    ]
    assert plans[0] == program.plan
    assert len({shape_of(plan) for plan in plans}) == 3
    assert not (saved / "candidates/1/weights").exists()


def stages_of(out: Path) -> set[int]:
    """How many stages the plans have that were written."""
    return {len(autopar.Plan.load(path).stages) for path in out.glob("**/plan.json")}


@pytest.mark.slow
def test_a_pipeline_that_the_search_ruled_out_is_a_candidate(program, tmp_path: Path):
    assert all(len(other.plan.stages) == 1 for other in program.alternatives)
    assert stages_of(program.save(tmp_path / "all", candidates=8)) == {1, 2}
    assert stages_of(program.save(tmp_path / "none")) == {1}
    one_mesh = replace(program.options, pp=1)
    without = program.compile_again(replace(program.request, options=one_mesh))
    assert stages_of(without.save(tmp_path / "one mesh", candidates=8)) == {1}


def test_the_candidate_that_is_named_runs_with_the_weights_of_the_directory(program, tmp_path: Path):
    out = program.save(tmp_path / "out", candidates=2)
    own = Manifest.read(out)
    (out / "tuned.json").write_text('{"folder": "candidates/2"}')
    other = Manifest.read(out)
    assert (own.directory, other.directory) == (out, out / "candidates/2")
    assert other.weights_folder == own.weights_folder == out / "weights"
    assert other.constants_folder == own.constants_folder == out / "weights"
    for damage in ('{"folder": "../elsewhere"}', "{", "[]"):
        (out / "tuned.json").write_text(damage)
        with pytest.raises(RuntimeProgramError, match=r"tuned\.json is damaged"):
            Manifest.read(out)
    program.save(out, candidates=1)
    assert not (out / "tuned.json").exists()
    assert not (out / "candidates/2/manifest.json").exists()
    assert Manifest.read(out) == own


def test_one_plan_alone_is_refused(program, tmp_path: Path, capsys):
    assert tune.main([str(program.save(tmp_path / "one"))]) == 2
    assert "candidates=3" in capsys.readouterr().err


def test_a_directory_that_is_not_there_is_said_to_be_none(tmp_path: Path, capsys):
    assert tune.main([str(tmp_path / "gone")]) == 2
    assert "gone is no directory; give one that program.save(…) wrote" in capsys.readouterr().err


@pytest.mark.timeout(300)
def test_plans_take_turns_the_fastest_is_kept_and_what_fails_is_named(saved: Path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "executable", python())
    (saved / "candidates/2/stages/stage_0.py").write_text("raise ValueError('broken')")
    assert tune.main([str(saved), "--rounds", "1", "--steps", "5", "--warmup", "2", "--timeout", "120"]) == 0
    out = capsys.readouterr().out
    tuned = json.loads((saved / "tuned.json").read_text())
    *rows, broken = tuned["measured"]
    assert [row["folder"] for row in rows] == [".", "candidates/1"]
    assert all(row["measured_s"] > 0 and not row["failed"] for row in rows)
    assert (broken["folder"], broken["measured_s"]) == ("candidates/2", None)
    assert "broken" in broken["failed"]
    assert broken["failed"] in out
    fastest = min(rows, key=lambda row: row["measured_s"])
    assert tuned["folder"] == (None if fastest["folder"] == "." else fastest["folder"])
    (chosen,) = (line for line in out.splitlines() if line.startswith("*"))
    assert chosen.split(maxsplit=1)[1].startswith(fastest["plan"])
    assert max(map(len, out.splitlines()[:4])) < 120
    assert autopar.ClusterSpec.from_dict(json.loads((saved / "learned.json").read_text())).size == 2
    (saved / "tuned.json").write_text('{"folder": "candidates/1"}')
    run = torchrun(2, saved / "run.py", "--steps", "1")
    assert "step 1  loss" in run.stdout, run.stderr


def running(out: Path) -> list[str]:
    """Commands of processes that run something of a directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().replace(b"\0", b" ").decode()
            found += [words] if str(out) in words else []
    return found


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_ends_it_ends_its_ranks(saved: Path, number: int):
    command = [sys.executable, "-m", "autopar.cli.tune", str(saved), "--steps", "100000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while sum("run.py" in words and "torch.distributed" not in words for words in running(saved)) < 2:
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    assert running(saved) == []


def test_what_runs_took_becomes_constants(program):
    """Runs of a machine that computes three times as slowly, over a link of which every message takes 1 ms + S / 1 GB/s."""
    plan = program.with_plan(next(a.plan for a in program.alternatives if a.plan.origin == "zero3"))
    known = facts(plan)
    seconds = known.schedule.seconds
    computed_s = seconds[0, "F"] + seconds[0, "B"] - known.schedule.exposed[0]

    def sent(kind: str, nbytes: int, at_s: float) -> Sent:
        crossed = nbytes * (1.0 if kind == "all_reduce" else 0.5)
        return Sent(kind, "dp", nbytes, "", "F0.0", at_s, at_s, at_s + 1e-3 + crossed / 1e9)

    kinds = [(kind, 10**power) for power in (4, 5, 6, 7) for kind in ("all_gather", "all_reduce")]
    messages = tuple(sent(kind, nbytes, n * 0.02) for n, (kind, nbytes) in enumerate(kinds))
    waited_s = sum(m.non_overlapped_s for m in messages)
    spans = (Span("F0.0", 0.0, waited_s + 3 * computed_s), Span("B0.0", 0.5, 0.5), Span("update", 0.6, 0.7))
    runs = [(known, Profile(((StepRecord(0.7, spans, messages),),) * 2))]
    assert slowness(runs) == pytest.approx(3)
    cluster = learned(program.cluster, runs)
    (level,) = cluster.levels
    assert level.bandwidth_Bps == pytest.approx(1e9, rel=1e-6)
    assert level.base_s == pytest.approx(1e-3, rel=1e-6)
    (_, device), (_, before) = cluster.devices[0], program.cluster.devices[0]
    assert device.peak("float32") == pytest.approx(before.peak("float32") / 3)
