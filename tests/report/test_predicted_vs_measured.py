"""A recorded run beside its prediction: what was noted is what the program did, and tables say what was noted."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.cli.dump import main
from autopar.cli.saved_profile import read_profile
from autopar.errors import InputError
from autopar.report.predicted_vs_measured import Profile, action_rows, message_rows, waited_s
from autopar.report.recorded import measured_timeline
from autopar.runtime.comm.recorder import Recorder, Sent, Span, StepRecord

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Two(nn.Module):
    """The loss of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


def program(**options: object) -> autopar.ParallelProgram:
    return autopar.compile(
        Two(), autopar.ClusterSpec.local(2), (torch.randn(4, 16),), optimizer=SGD, options=autopar.Options(**options)
    )


@pytest.fixture(scope="module")
def sharded() -> autopar.ParallelProgram:
    return program(mesh={"dp": 2}, strategy="zero3")


@pytest.fixture(scope="module")
def pipeline() -> autopar.ParallelProgram:
    return program(pp=2, microbatches=2, schedule="1f1b")


def test_every_message_that_is_expected_is_seen_with_its_bytes(sharded):
    seen = sharded.run([(torch.randn(4, 16),)], steps=3, profile=True).profile
    assert (len(seen.ranks), seen.steps) == (2, 3)
    rows = message_rows(autopar.report.facts(sharded), seen)
    assert {row.kind for row in rows} >= {"all_gather", "reduce_scatter"}
    for row in rows:
        assert row.predicted is not None
        assert row.measured is not None
        assert row.measured.nbytes == pytest.approx(row.predicted.nbytes)
        assert 0 <= row.measured.waited_s <= row.measured.seconds
    kinds = [row.kind for row in action_rows(autopar.report.facts(sharded), seen)]
    assert kinds == ["F", "B", "once"]


def test_a_run_that_is_not_recorded_leaves_nothing(sharded):
    assert sharded.run([(torch.randn(4, 16),)]).profile is None


def test_losses_and_weights_are_those_of_a_run_that_is_not_recorded(pipeline):
    batch = (torch.randn(4, 16),)
    plain, watched = pipeline.run([batch], steps=3), pipeline.run([batch], steps=3, profile=True)
    assert [float(a) for a in plain] == [float(b) for b in watched]
    assert all(torch.equal(plain.state[name], watched.state[name]) for name in plain.state)
    assert "recv over stages" in pipeline.beside(watched.profile)


def made_up(rank: int) -> StepRecord:
    """F0.0 waits 2 of its 5 ms for a message that came while B1.0 ran."""
    spans = (Span(f"F0.{rank}", 0.001, 0.006), Span(f"F1.{rank}", 0.006, 0.008), Span("update", 0.009, 0.010))
    messages = (
        Sent("recv", "rank 1", 64, "a value", "", 0.0, 0.002, 0.004),
        Sent("all_reduce", "dp", 128, "a loss", f"F0.{rank}", 0.005, 0.007, 0.008),
    )
    return StepRecord(0.010 + rank * 0.002, spans, messages)


def test_what_a_rank_waits_for_others_is_no_part_of_an_action(pipeline):
    facts = autopar.report.facts(pipeline)
    assert waited_s(made_up(0)) == {"F0.0": pytest.approx(0.002)}
    profile = Profile(((made_up(0),), (made_up(1),)))
    assert profile.step_s == pytest.approx(0.012)
    rows = {(row.stage, row.kind): row for row in action_rows(facts, profile)}
    assert rows[0, "F"].measured_s == pytest.approx((0.003 + 0.002) / 2)
    assert rows[1, "once"].measured_s == pytest.approx(0.001)
    assert rows[0, "F"].predicted_s == pytest.approx(pipeline.account.seconds[0, "F"])
    timeline = measured_timeline(facts, profile)
    assert [e.start_s for e in timeline.events if e.name == "F0.1"] == [pytest.approx(0.003)]
    assert timeline.busy_s == (pytest.approx(0.005), pytest.approx(0.005))
    below = pipeline.account.timeline.beside(timeline)
    assert below.rows == ("group 0", "group 1", "rank 0, measured", "rank 1, measured")


def test_files_of_ranks_are_read_as_they_were_written(pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saved = pipeline.save(tmp_path / "out")
    for rank in range(2):
        recorder = Recorder(torch.device("cpu"))
        recorder.steps.append(made_up(rank))
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(recorder.as_data(rank)))
    assert read_profile(tmp_path, 2) == Profile(((made_up(0),), (made_up(1),)))
    for form, shown in (
        ("text", "all_reduce over dp"),
        ("svg", "rank 1, measured"),
        ("chrome-trace", '"cat": "measured"'),
    ):
        assert main([str(saved), "--profile", str(tmp_path), "--format", form]) == 0
        assert shown in capsys.readouterr().out
    assert main([str(saved), "--profile", str(tmp_path), "--format", "dot"]) == 2
    with pytest.raises(InputError, match=r"rank_2\.json cannot be read"):
        read_profile(tmp_path, 3)
    (tmp_path / "rank_0.json").write_text('{"autopar_profile": 1, "rank": 0, "steps": [{"seconds": -1}]}')
    with pytest.raises(InputError, match=r"rank_0\.json is damaged"):
        read_profile(tmp_path, 2)
