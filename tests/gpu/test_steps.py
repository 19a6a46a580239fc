"""On a GPU: steps of one-GPU programs against eager PyTorch and torch.compile, in numbers, seconds and bytes."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch

import autopar
from autopar.costmodel.calibrate import calibrate
from autopar.proof.casts import DividedAs
from autopar.proof.reference import eager_values
from benchmarks.harness import take_turns
from benchmarks.one_rank import MODELS
from tests.gpu import one_gpu
from tests.gpu.one_gpu import Beside, beside

pytestmark = pytest.mark.gpu
FEW = 1 << 20
"""Bytes that the allocator rounds up, over all tensors of such a step."""


@pytest.mark.parametrize("name", one_gpu.NO_DROPOUT)
def test_a_step_in_float64_is_that_of_eager_on_a_cpu(name: str) -> None:
    both = beside(name)
    session = both.session(torch.float64)
    with DividedAs(torch.float64):
        loss = session.train_step(both.batch(0, torch.float64))
        found = {"loss/0": loss, **{f"grad/{name}": grad for name, grad in session.full_grads().items()}}
    expected = eager_values(both.program, both.eager, both.batch_of(0), 1, torch.float64, 0)
    assert set(found) <= set(expected)
    for value, other in ((value.cpu(), expected[name]) for name, value in found.items()):
        assert float((value - other).abs().max()) <= 1e-9 * float(other.abs().max())


@pytest.mark.parametrize("name", one_gpu.NO_DROPOUT)
def test_compiled_steps_in_float64_are_those_that_are_written(name: str) -> None:
    both = beside(name)
    sessions = [both.session(torch.float64, compiler) for compiler in ("none", "auto")]
    written, compiled = (
        [float(session.train_step(both.batch(step, torch.float64))) for step in range(3)] for session in sessions
    )
    regions = [region for stage in sessions[1].stages.values() for region in stage.regions]
    assert regions
    assert not any(region.given_up for region in regions)
    assert compiled == pytest.approx(written, rel=1e-9)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_takes_no_longer_than_eagers(
    name: str, precision: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    both = beside(name, precision)
    session, compiled = both.session(), both.session(compiler="auto")
    programs = {
        "autopar": lambda batch: float(session.train_step(batch)),
        "autopar, compiled": lambda batch: float(compiled.train_step(batch)),
        "eager": both.eager_step(),
        "torch.compile": both.eager_step(compiled=True),
    }
    turns = take_turns(programs, both.batch, steps=20, warmup=5, barrier=torch.cuda.synchronize)
    with capsys.disabled():
        print(f"\n{name}, {precision or 'float32'}: {turns.summary()['median_ms']}")
    assert turns.ratios("autopar", "eager")["ratio_of_medians"] < 1.05
    if "dropout" not in name:
        assert turns.losses["autopar"] == pytest.approx(turns.losses["eager"], rel=0.02)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_predicted_peak_bytes_are_the_allocators(name: str, precision: str | None) -> None:
    both = beside(name, precision)
    gc.collect()  # of what tests before this one have left
    torch.mm(*(torch.ones(64, 64, device=one_gpu.DEVICE) for _ in range(2)))  # libraries take their workspace
    before = torch.cuda.memory_allocated()
    session = both.session()
    session.train_step(both.batch(0))
    batch = both.batch(1)
    batch_bytes = sum(x.nbytes for x in batch)
    torch.cuda.reset_peak_memory_stats()
    session.train_step(batch)
    measured = torch.cuda.max_memory_allocated() - before - batch_bytes
    predicted = both.program.predicted.peak_bytes
    assert 0.95 * measured - FEW <= predicted <= 1.10 * measured + FEW


def test_seconds_predicted_from_a_calibration_are_those_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = calibrate(quick=True, ranks=1, say=lambda text: None)
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    cluster = autopar.ClusterSpec.from_dict(
        {"nodes": 1, "devices_per_node": 1, "device": profile["base"], "profile": str(tmp_path / "profile.json")}
    )
    for name in MODELS:
        both = beside(name, cluster=cluster)
        measured = measured_s(both)
        with capsys.disabled():
            print(f"\n{name}: predicted {both.program.predicted.step_time_s:.4f} s, measured {measured:.4f} s")
        assert both.program.predicted.step_time_s == pytest.approx(measured, rel=0.5)


def measured_s(both: Beside) -> float:
    """The median of some steps."""
    session = both.session()
    step = {"autopar": lambda batch: float(session.train_step(batch))}
    return take_turns(step, both.batch, steps=10, warmup=5, barrier=torch.cuda.synchronize).median_s("autopar")
