"""Advice: limits are told from what a run did, causes before all, and every suggestion is what compiling with it gives."""

from __future__ import annotations

import functools
import json
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch
from torch import nn

import autopar
from autopar.cli.doctor import main as doctor
from autopar.costmodel.bill import call_seconds
from autopar.costmodel.by_node import gloo_time_s
from autopar.costmodel.compute import kernel_seconds
from autopar.errors import InputError
from autopar.passes.account.limits import LIMITS
from autopar.passes.price.pricer import Pricers
from autopar.passes.price.roofline import calls_roofline
from autopar.report.advice.levers import Lever, levers
from autopar.report.advice.limits import predicted_limits
from autopar.report.advice.mismatch import as_measured, mismatches
from autopar.report.advice.planned import WORTH, limits_of, planned, saved_advice
from autopar.report.advice.replanned import Replanner
from autopar.report.advice.scaling import Bases, Scaling, measured_scaling
from autopar.report.facts import facts
from autopar.report.predicted_vs_measured import Profile
from autopar.report.program_facts import ProgramFacts
from autopar.runtime.comm.recorder import Recorder, Sent, Span, StepRecord
from tests.test_house import ROOT
from tests.warm import torchrun

SGD = functools.partial(torch.optim.SGD, lr=0.1)
LOCAL = autopar.ClusterSpec.local


class Layers(nn.Module):
    """The loss of layers that are alike, backward too: the first one's input has a gradient."""

    def __init__(self, layers: int = 2, width: int = 16) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.shift
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


def compiled(ranks: int, rows: int = 8, width: int = 16, layers: int = 2, **options: object) -> autopar.ParallelProgram:
    with torch.device("meta"):
        model, x = Layers(layers, width), torch.empty(rows, width)
    return autopar.compile(model, LOCAL(ranks), (x,), optimizer=SGD, options=autopar.Options(**options))


@pytest.fixture(scope="module")
def sharded() -> autopar.ParallelProgram:
    return compiled(2, mesh={"dp": 2}, strategy="zero3")


@pytest.fixture(scope="module")
def pipeline() -> autopar.ParallelProgram:
    return compiled(2, 64, 512, pp=2, microbatches=2, schedule="1f1b", strategy="dp")


@pytest.fixture(scope="module")
def known(pipeline: autopar.ParallelProgram) -> ProgramFacts:
    return facts(pipeline)


# ---- limits


def test_predicted_limits_add_up_to_the_step_and_to_the_prices_of_ops(
    sharded: autopar.ParallelProgram, pipeline: autopar.ParallelProgram
):
    for program in (sharded, pipeline):
        for own in predicted_limits(program):
            assert set(own.seconds) == set(LIMITS) - {"input"}
            assert min(own.seconds.values()) >= 0
            assert sum(own.seconds.values()) == pytest.approx(program.account.step_time_s, rel=1e-12)
        pricers, software = Pricers(program.cluster), program.account.software
        for stage, plan, counted in zip(program.stages, program.plan.stages, program.account.stages, strict=True):
            roofline = calls_roofline(stage, plan, program.ir.templates, pricers[stage.mesh], program.rules)
            _, *calls = counted.bill.calls
            read = [(call_seconds(call, software), times) for call, times in calls]
            ops_s = sum(times * (one.total_s - sum(one.non_overlapped_s.values())) for one, times in read)
            assert roofline.seconds == pytest.approx(ops_s, rel=1e-12)
            assert min(roofline.compute_s, roofline.memory_s, roofline.launch_s) > 0


@pytest.mark.parametrize(
    ("module", "limit", "other"),
    [(nn.Linear(1024, 1024, bias=False), "compute", "memory"), (nn.Tanh(), "memory", "compute")],
)
def test_an_op_is_on_the_side_of_the_roofline_that_takes_longer(module: nn.Module, limit: str, other: str):
    program = autopar.compile(module, LOCAL(1), (torch.empty(4096, 1024, device="meta"),))
    ((own,),) = (group.stages for group in predicted_limits(program))
    assert own[limit] > 1e-4
    assert own[other] == pytest.approx(0, abs=1e-12)
    moved = {"flops": 1e6, "dtype": "float32", "kind": "matmul", "shape": (64, 64, 64)}
    bounds = [kernel_seconds(program.cluster.device(0), nbytes=nbytes, **moved).memory_bound for nbytes in (1.0, 1e9)]
    assert bounds == [False, True]


def one_step(known: ProgramFacts, limit: str, rank: int) -> StepRecord:
    """Ten actions of 10 ms, and beside them one wait of 200 ms, by what it is for."""
    wait_s, end_s = 0.2, 0.1
    spans = [Span(f"{'FB'[n % 2]}{n // 2}.{rank}", 0.01 * n, 0.01 * (n + 1)) for n in range(10)]
    messages = []
    kind = {"message": "all_reduce", "bubble": "recv"}.get(limit)
    if kind is not None:
        spans.append(Span(f"B5.{rank}", end_s, end_s + wait_s))
        messages.append(Sent(kind, "dp", 64, "", "", end_s, end_s, end_s + wait_s))
        end_s += wait_s
    host_s = {"host": end_s, "compute": 0.01, "memory": 0.01}.get(limit)
    return StepRecord(end_s, tuple(spans), tuple(messages), wait_s if limit == "input" else 0.0, host_s)


@pytest.mark.parametrize("limit", ["compute", "memory", "message", "bubble", "input", "host"])
def test_each_limit_is_found_in_a_run_that_has_it(known: ProgramFacts, limit: str):
    own = {"compute": 0.004, "memory": 0.001, "host": 0.001, "tiers": 0.0}
    if limit == "memory":
        own |= {"compute": 0.001, "memory": 0.004}
    expected = tuple(replace(group, stages=(own,)) for group in known.limits)
    profile = Profile(tuple((one_step(known, limit, rank),) * 3 for rank in range(2)))
    for found in limits_of(replace(known, limits=expected), profile):
        assert found.limit == limit
        assert found.step_s == pytest.approx(0.1 if limit in ("compute", "memory", "host") else 0.3)
        if limit in ("message", "bubble", "input"):
            assert found.seconds[limit] == pytest.approx(0.2)
        assert f"limited by {limit}" in str(found)


def test_a_rank_that_is_done_early_waits_for_the_others(known: ProgramFacts):
    early, late = (StepRecord(end, (Span(f"F0.{r}", 0.0, end),), ()) for r, end in enumerate((0.1, 0.3)))
    first, last = limits_of(known, Profile(((early,), (late,))))
    assert first.seconds["bubble"] == pytest.approx(0.2)
    assert last.seconds["bubble"] == 0


def test_a_wait_for_input_that_nobody_noted_is_no_zero(known: ProgramFacts):
    step = replace(one_step(known, "compute", 0), input_s=None)
    profile = Profile(((step,), (step,)))
    assert profile.input_s is None
    assert "input" not in limits_of(known, profile)[0].seconds
    assert Profile(((step,), (replace(step, input_s=0.1),))).input_s is None


def test_a_record_has_the_wait_for_its_own_batch_and_the_host_where_a_device_works_behind_it():
    recorder = Recorder(torch.device("cpu"))
    recorder.input_s = 0.5
    for behind in (False, True):
        device = types.SimpleNamespace(
            is_host=not behind,
            module=types.SimpleNamespace(synchronize=lambda _: time.sleep(0.05)),
            seconds=lambda a, b: b - a,
        )
        recorder._backend = device
        with recorder.step():
            pass
    on_host, on_device = recorder.steps
    assert (on_host.input_s, on_host.host_s) == (0.5, None)
    assert on_device.input_s is None
    assert on_device.host_s is not None
    assert on_device.host_s < 0.05


def test_a_profile_of_other_ranks_is_refused(pipeline: autopar.ParallelProgram):
    with pytest.raises(InputError, match="this profile is of 1 ranks, the program has 2"):
        pipeline.advice(Profile(((StepRecord(1.0, (), ()),),)))


# ---- a run beside its prediction


def as_predicted(known: ProgramFacts, factors: dict[int, float]) -> Profile:
    """A run whose actions take what was predicted, those of some ranks so many times as long."""
    ranks = []
    for rank, actions in enumerate(known.schedule.table):
        spans, at_s = [], 0.0
        for action in actions:
            taken_s = factors.get(rank, 1.0) * known.schedule.seconds[action.stage, action.kind]
            spans.append(Span(f"{action.kind}{action.microbatch}.{action.stage}", at_s, at_s + taken_s))
            at_s += taken_s
        ranks.append((StepRecord(at_s, tuple(spans), ()),))
    return Profile(tuple(ranks))


def test_a_slow_stage_is_named_and_is_in_the_cluster_as_measured(
    pipeline: autopar.ParallelProgram, known: ProgramFacts
):
    cluster = pipeline.cluster
    assert mismatches(known, cluster, as_predicted(known, {})) == ()
    (slow,) = mismatches(known, cluster, as_predicted(known, {1: 1.4}))
    assert slow.ratio == pytest.approx(1.4)
    assert "stage 1 (rank 1)" in str(slow)
    measured = as_measured(cluster, pipeline.plan, (slow,))
    assert measured.device(0) == cluster.device(0)
    assert measured.device(1).peak("float32") == pytest.approx(cluster.device(1).peak("float32") / 1.4)
    (both,) = mismatches(known, cluster, as_predicted(known, {0: 2.0, 1: 2.0}))
    assert both.what == "all devices"
    assert as_measured(cluster, pipeline.plan, (both,)).device(0).peak("float32") == pytest.approx(
        cluster.device(0).peak("float32") / 2
    )


def test_a_link_at_half_its_bandwidth_is_named(sharded: autopar.ParallelProgram):
    known, cluster = facts(sharded), sharded.cluster
    (level,) = cluster.levels
    half = replace(cluster, levels=(replace(level, bandwidth_Bps=level.bandwidth_Bps / 2),))

    def run(on: autopar.ClusterSpec) -> Profile:
        """Messages of 100 MB on these links; the first rank comes 1 s before the other."""
        taken_s = gloo_time_s(on, "all_gather", 1e8, (0, 1))
        steps = [
            StepRecord(9.0, (), (Sent("all_gather", "dp", int(1e8), "", "", 0.0, 0.0, taken_s + late_s),))
            for late_s in (1.0, 0.0)
        ]
        return Profile(tuple((step,) * 3 for step in steps))

    assert mismatches(known, cluster, run(cluster)) == ()
    (slow,) = mismatches(known, cluster, run(half))
    assert slow.ratio == pytest.approx(2.0, rel=0.05)
    assert gloo_time_s(as_measured(cluster, sharded.plan, (slow,)), "all_gather", 1e8, (0, 1)) == pytest.approx(
        gloo_time_s(half, "all_gather", 1e8, (0, 1)), rel=0.05
    )


# ---- what to change


def test_more_microbatches_make_the_bubble_of_the_closed_form(pipeline: autopar.ParallelProgram):
    """(p - 1) / (m + p - 1) of the schedule is idle: 1/3 with 2 microbatches of 2 stages, 1/5 with 4."""
    (_, own), m = predicted_limits(pipeline), 2
    span_s = pipeline.account.step.span_s
    assert own.seconds["bubble"] / span_s == pytest.approx(1 / (m + 1), rel=0.03)
    lever = next(one for one in levers(pipeline) if one.times == 2)
    assert (lever.text, lever.options) == ("accumulate 4", {"microbatches": 4})
    again = Replanner(pipeline, pipeline.compile_again)
    (found,), left_out = planned(again, [(lever, "bubble")], Bases(again), float("inf"))
    assert left_out == ()
    assert (found.batch_before, found.batch_after) == (64, 128)
    actions = found.gain * (2 * m + 1) / (2 * m) / ((m + 1) / m)
    assert actions == pytest.approx(1.0, rel=0.05)
    assert "needs global batch 128, which changes what is computed" in str(found)
    assert (found.efficiency_before, found.efficiency_after) == (None, None)
    fresh = compiled(2, 128, 512, pp=2, microbatches=4, schedule="1f1b", strategy="dp")
    assert found.step_after_s == fresh.predicted.step_time_s
    assert found.step_before_s == pipeline.predicted.step_time_s


def test_named_stages_keep_their_groups_under_any_schedule():
    named = ["layers.1", "layers.2", "layers.3"]
    program = compiled(2, layers=4, stage_boundaries=named, chunks=2, schedule="interleaved", microbatches=2)
    [lever] = (one for one in levers(program) if one.text == 'schedule="auto"')
    assert replace(program.options, **lever.options).chunks == 2
    assert len(program.plan.stages) == 4


def test_levers_are_what_the_request_forces(sharded: autopar.ParallelProgram, pipeline: autopar.ParallelProgram):
    def texts(program: autopar.ParallelProgram) -> set[str]:
        return {one.text for one in levers(program) if one.times == 1}

    assert texts(sharded) == {
        'strategy="auto", without mesh',
        "mesh, strategy and stages left to the search",
        'gradient_compression="bf16"',
    }
    assert {"pp=None", 'schedule="auto"', "microbatches=None", "accumulate 1", "accumulate 4", "accumulate 8"} < texts(
        pipeline
    )
    assert all(one.alters for one in levers(sharded) if one.times > 1 or "bf16" in one.text)
    replaced = sharded.with_plan(sharded.plan)
    assert replaced.request.plan is None or "no plan=: the plan that is searched for" in texts(replaced)


def test_nothing_is_said_that_is_not_better(pipeline: autopar.ParallelProgram):
    same = Lever("the same", ("compute",))
    again = Replanner(pipeline, pipeline.compile_again)
    found, _ = planned(again, [(same, "compute")], Bases(again), float("inf"))
    assert found == ()
    found, left_out = planned(again, [(same, "compute")], Bases(again), 0.0)
    assert (found, left_out) == ((), ("the same",))


def test_a_step_with_nothing_to_gain_gets_no_advice():
    with torch.device("meta"):
        model, x = Layers(1, 64), torch.empty(1 << 15, 64)
    program = autopar.compile(model, LOCAL(1), (x,), optimizer=SGD)
    found = program.advice()
    assert found.suggestions == ()
    assert found.scaling is None
    assert found.unscaled == "one device is its own base"


def test_scaling_is_throughput_of_a_device_over_that_of_the_base(sharded: autopar.ParallelProgram):
    found = Bases(Replanner(sharded, sharded.compile_again)).scaling(sharded)
    assert isinstance(found, Scaling)
    one = compiled(1, 4)
    expected = (8 / sharded.predicted.step_time_s / 2) / (4 / one.predicted.step_time_s)
    assert found.efficiency == pytest.approx(expected, rel=1e-12)
    assert (found.devices, found.base_devices, found.measured) == (2, 1, False)


def test_devices_that_are_faster_than_their_base_have_no_efficiency():
    """Four devices divide more than what two samples on each of them take."""
    program = compiled(4, 8, 2048)
    found = Bases(Replanner(program, program.compile_again)).scaling(program)
    assert isinstance(found, Scaling)
    assert found.ratio > 2
    assert found.efficiency is None
    assert "%" not in str(found)
    assert "as one of 1, which divide less" in str(found)


def test_a_measured_base_has_as_many_samples_on_a_device(sharded: autopar.ParallelProgram):
    one = compiled(1, 4)
    assert measured_scaling(sharded, 2.0, one, 1.0).ratio == pytest.approx(0.5)
    with pytest.raises(InputError, match=r"a batch of 8 on 1 devices; .* which are 4 here"):
        measured_scaling(sharded, 2.0, compiled(1, 8), 1.0)


def test_the_doctor_says_the_advice_of_a_saved_program(
    pipeline: autopar.ParallelProgram,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    program = autopar.compile(Layers(), LOCAL(2), (torch.randn(8, 16),), optimizer=SGD, options=pipeline.options)
    saved, known = program.save(tmp_path / "out"), facts(program)
    profile = Profile(tuple((one_step(known, "input", rank),) * 2 for rank in range(2)))
    for rank in range(2):
        recorder = Recorder(torch.device("cpu"))
        recorder.steps.extend(profile.ranks[rank])
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(recorder.as_data(rank)))
    own = saved_advice(known, program.cluster, profile)
    assert doctor([str(saved), "--profile", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{own}\n"
    assert "a loader 2 × as fast" in str(own)
    assert doctor([str(saved), "--profile", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(json.dumps(own.facts()))
    jsonschema.validate(told, json.loads((ROOT / "docs/schemas/doctor.json").read_text()))
    assert doctor([str(saved), "--profile", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    asked = types.ModuleType("asked")
    asked.step = lambda: {
        "model": Layers(),
        "example_inputs": (torch.zeros(8, 16),),
        "optimizer": SGD,
        "options": pipeline.options,
    }
    monkeypatch.setitem(sys.modules, "asked", asked)
    assert doctor([str(saved), "--model", "asked:step", "--seconds", "0", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["predicted_s"] == known.predicted.step_time_s
    assert "pp=None" in said["left_out"]
    assert said["suggestions"] == []


# ---- slow


@pytest.mark.slow
def test_every_suggestion_is_what_compiling_with_it_gives():
    options = {"pp": 2, "microbatches": 2, "schedule": "gpipe", "recompute": "full"}
    program = compiled(4, 64, 256, **options)
    found = program.advice(seconds=600)
    assert found.left_out == ()
    assert len({(one.text, one.batch_after) for one in found.suggestions}) == len(found.suggestions) > 2
    for one in found.suggestions:
        fresh = compiled(4, one.batch_after, 256, **{**options, **one.options})
        assert one.step_after_s == fresh.predicted.step_time_s, one.text
        assert one.step_before_s == program.predicted.step_time_s
        assert one.gain > 1 + WORTH
    json.dumps(found.facts())


@pytest.mark.slow
def test_a_program_that_runs_otherwise_is_planned_for_the_machines_that_are_there(pipeline: autopar.ParallelProgram):
    profile = as_predicted(facts(pipeline), {1: 3.0})
    found = pipeline.advice(profile, seconds=600)
    (slow,) = found.mismatches
    cluster = as_measured(pipeline.request.cluster, pipeline.plan, (slow,))
    again = [one for one in found.suggestions if one.text == "pp=None"]
    assert again
    with torch.device("meta"):
        model, x = Layers(width=512), torch.empty(64, 512)
    options = replace(pipeline.options, **again[0].options)
    fresh = autopar.compile(model, cluster, (x,), optimizer=SGD, options=options)
    assert again[0].step_after_s == fresh.predicted.step_time_s


SLEEPY = """import time, torch

def batches():
    while True:
        time.sleep(0.3)
        yield (torch.ones(8, 16),)
"""


@pytest.mark.slow
def test_a_loader_that_sleeps_is_called_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    program = autopar.compile(Layers(), LOCAL(2), (torch.randn(8, 16),), optimizer=SGD)
    out = program.save(tmp_path / "out")
    (tmp_path / "data.py").write_text(SLEEPY)
    run = ["--steps", 5, "--data", f"{tmp_path / 'data.py'}:batches", "--profile", tmp_path / "profile"]
    done = torchrun(2, out / "run.py", *run)
    assert done.returncode == 0, done.stderr
    assert doctor([str(out), "--profile", str(tmp_path / "profile"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [one["limit"] for one in said["limits"]] == ["input"] * len(said["limits"])
    assert all(0.3 <= one["limit_s"] < 0.4 for one in said["limits"])
    assert any(one["limit"] == "input" for one in said["suggestions"])
