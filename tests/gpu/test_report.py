"""The report of a machine with GPUs, rehearsed on processors; its parts end however they end; what comes back is held."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.runtime.kernels import ops
from benchmarks.gpu_report import equality, truths
from benchmarks.gpu_report.__main__ import left_out, told
from benchmarks.gpu_report.machine import Machine
from benchmarks.gpu_report.parts import BY_NAME, PARTS
from benchmarks.gpu_report.separate import ROOT, Outcome, run_command
from benchmarks.gpu_report.suite import files, outcomes
from tests.warm import python

FEW = 1 << 20
"""Bytes that an allocator rounds up, over all tensors of a step."""


def rehearsed(tmp_path: Path, *parts: str) -> tuple[dict[str, Any], str]:
    """The report's file, and what was printed."""
    out = tmp_path / "report.json"
    command = [python(), "-m", "benchmarks.gpu_report", "--rehearse", "--out", str(out), "--parts", *parts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


def same_losses(one: dict[str, Any]) -> bool:
    """Whether programs that took turns trained alike, as far as bf16 says."""
    losses = one["last_loss"].values()
    return max(losses) - min(losses) < 0.02 * min(losses)


@pytest.mark.slow
def test_a_rehearsal_gives_one_file_and_says_which(tmp_path: Path) -> None:
    made, said = rehearsed(tmp_path, "facts")
    assert {name: outcome["state"] for name, outcome in made["parts"].items()} == {"facts": "done"}, said
    assert made["parts"]["facts"]["found"]["software"]["torch"] == torch.__version__
    assert said.splitlines()[-1] == f"The report is whole: please send the file {(tmp_path / 'report.json').resolve()}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_part_can_be_rehearsed(tmp_path: Path) -> None:
    made, said = rehearsed(tmp_path, *BY_NAME)
    assert {name: outcome["state"] for name, outcome in made["parts"].items()} == dict.fromkeys(BY_NAME, "done"), said
    assert "not told" not in said
    found = {name: outcome["found"] for name, outcome in made["parts"].items()}
    assert {name: one["equal"] for name, one in found["equality"].items()} == {"mlp, float32": True, "mlp, bf16": True}
    for one in found["steps"].values():
        assert set(one["median_ms"]) == {"autopar", "eager", "torch.compile"}
        assert same_losses(one)
    assert found["suite"] == {name: {**one, "failed": []} for name, one in found["suite"].items()}
    for one in found["ranks"].values():
        assert "failed" not in one
        assert same_losses(one)
    assert all("no race" in one for name, one in found["races"].items() if name != "planted"), found["races"]
    assert found["hang"]["stopped"]["culprits"] == [1]
    assert found["hang"]["stopped"]["named"]
    truth = truths.truths(made)
    for prediction in truths.predictions(truth):
        assert 0.95 * prediction.measured_bytes - FEW <= prediction.bytes_share * prediction.measured_bytes
        assert prediction.bytes_share <= 1.10 + FEW / prediction.measured_bytes
    assert truth["profile"] == found["calibration"]["profile"]
    assert all(prediction.seconds_share is not None for prediction in truths.predictions(truth))


def ended(tmp_path: Path, text: str, limit_s: float = 60.0) -> tuple[Outcome, list[str]]:
    """The outcome of a part that is this text, and its progress."""
    names: list[str] = []
    path = tmp_path / "part.json"
    body = f"import json, os, pathlib, subprocess, sys, time\npath = pathlib.Path({str(path)!r})\n{text}"
    return run_command([sys.executable, "-c", body], "part", limit_s, tmp_path, names.append), names


def test_what_a_part_found_before_it_fails_stays_and_why_is_said(tmp_path: Path) -> None:
    outcome, names = ended(tmp_path, "path.write_text('{\"first\": 1}')\nraise ValueError('the second is wrong')")
    assert (outcome.state, outcome.found, names) == ("failed", {"first": 1}, ["first"])
    assert "ValueError: the second is wrong" in outcome.why


def test_a_part_that_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    text = (
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "path.write_text(json.dumps({'child': child.pid}))\ntime.sleep(600)"
    )
    start = time.monotonic()
    outcome, _ = ended(tmp_path, text, limit_s=1.5)
    assert outcome.state == "late"
    assert "not done within" in outcome.why
    assert time.monotonic() < start + 60
    assert not Path(f"/proc/{outcome.found['child']}").exists()


def test_a_part_that_is_killed_says_so(tmp_path: Path) -> None:
    outcome, _ = ended(tmp_path, "os.kill(os.getpid(), 9)")
    assert outcome.state == "failed"
    assert "status -9" in outcome.why


def test_parts_for_several_gpus_are_left_out_on_one() -> None:
    assert [part.name for part in PARTS if left_out(part, 1) is not None] == ["ranks", "hang"]
    assert all(left_out(part, 2) is None for part in PARTS)


def test_a_record_that_is_not_whole_is_told_as_far_as_it_goes() -> None:
    outcome = {"state": "late", "seconds": 60.0, "why": "not done within 60 s", "found": {"unexpected": 1}}
    for name in BY_NAME:
        assert "not done within 60 s" in told({"parts": {name: outcome}})


def test_the_suite_is_every_test_of_gpus() -> None:
    assert "tests/gpu/test_steps.py" in files(rehearsal=False)
    assert all((ROOT / file).exists() for file in files(rehearsal=False))


@pytest.mark.slow
def test_outcomes_of_tests_are_read_from_pytests_file(tmp_path: Path) -> None:
    tests = tmp_path / "test_three.py"
    tests.write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='needs a CUDA device')\ndef test_left(): pass\n"
    )
    xml = tmp_path / "outcomes.xml"
    command = [sys.executable, "-m", "pytest", "-q", str(tests), f"--junitxml={xml}", "-p", "no:cacheprovider"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    found = outcomes(xml)
    assert (found["passed"], found["skipped"]) == (1, {"needs a CUDA device": 1})
    (failed,) = found["failed"]
    assert failed["test"].endswith("test_bad")
    assert "assert 1 == 2" in failed["says"]


# ---- what equality calls equal


def judged(ours: Sequence[float], theirs: Sequence[float], elements: int = 1000, longest: int = 100) -> dict[str, Any]:
    return equality.verdict({"w": list(zip(ours, theirs, strict=True))}, {"w": elements}, longest)


def test_errors_like_eagers_are_equal_and_a_lost_percent_is_not() -> None:
    eager = [1e-3] * 8
    assert judged([1.9e-3] * 8, eager)["equal"]
    assert not judged([1e-2] * 8, eager)["equal"]
    assert not judged([float("nan")] * 8, eager)["equal"]


def test_the_limit_of_a_tensor_without_rounding_is_that_of_its_longest_sum() -> None:
    floor = 100**0.5 * 2**-24
    assert judged([0.9 * floor] * 8, [0.0] * 8)["equal"]
    assert not judged([1.1 * floor] * 8, [0.0] * 8)["equal"]


def test_two_draws_of_one_distribution_are_equal_however_few_their_elements() -> None:
    generator = torch.Generator().manual_seed(0)
    for elements in (1, 4, 64):
        draws = torch.randn(2, 2000, equality.DRAWS, elements, generator=generator).square().mean(3).sqrt()
        alarms = [
            not judged(ours.tolist(), theirs.tolist(), elements)["equal"] for ours, theirs in zip(*draws, strict=True)
        ]
        assert not any(alarms)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a program that sees a GPU computes on it")
def test_a_gradient_that_is_off_by_a_hundred_thousandth_is_found_in_float32(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = ops.linear_dw
    monkeypatch.setattr(ops, "linear_dw", lambda g, x: right(g, x) * (1 + 1e-5))
    try:
        found = equality.judged(Machine(tmp_path, rehearsal=True), lambda: equality.zoo_case("mlp"), None)
    finally:
        dist.destroy_process_group()
    assert not found["equal"]
    assert found["worst"].endswith(".weight")


@pytest.mark.parametrize("path", sorted(truths.RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_predictions_are_what_gpus_measured(path: Path) -> None:
    for prediction in truths.predictions(json.loads(path.read_text())):
        assert 0.95 * prediction.measured_bytes - FEW <= prediction.bytes_share * prediction.measured_bytes
        assert prediction.bytes_share <= 1.10 + FEW / prediction.measured_bytes
        assert prediction.seconds_share is None or 0.5 <= prediction.seconds_share <= 1.5
