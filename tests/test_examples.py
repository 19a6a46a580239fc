"""Each example and benchmark runs as it stands, from any folder."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.warm import python

ROOT = Path(__file__).parent.parent


def run_script(script: str, *args: str, cwd: Path) -> str:
    command = [python(), str(ROOT / script), *args]
    ran = subprocess.run(command, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    return ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", ["quickstart.py", "plan_by_hand.py", "custom_op.py", "branches.py"])
def test_example_runs(script: str, tmp_path: Path) -> None:
    assert run_script(f"examples/{script}", cwd=tmp_path)


def test_demo_trains_on_two_processes_and_equals_one_device(tmp_path: Path) -> None:
    said = run_script("examples/train_gpt.py", "--ranks", "2", "--steps", "4", cwd=tmp_path)
    assert "check: equal to one device" in said
    assert (tmp_path / "out" / "gpt" / "run.py").exists()


@pytest.mark.slow
def test_peers_benchmark_compares_equal_computations(tmp_path: Path) -> None:
    said = run_script("benchmarks/peers.py", "--steps", "4", "--warmup", "1", cwd=tmp_path)
    cases = json.loads(said)["cases"]
    assert set(cases) == {f"{model}_{kind}" for model in ("gpt", "llama") for kind in ("dp", "zero3", "tp", "1f1b")}
    assert all(case["losses_agree"] for case in cases.values())


@pytest.mark.slow
def test_guards_benchmark_finds_them_cheap(tmp_path: Path) -> None:
    result = json.loads(run_script("benchmarks/guards.py", "--steps", "4", "--warmup", "1", cwd=tmp_path))
    assert result["losses_agree"]
    assert len(result["guards"]) == 2


@pytest.mark.slow
def test_odd_shapes_benchmark_reports_a_case(tmp_path: Path) -> None:
    (case,) = json.loads(run_script("benchmarks/odd_shapes.py", "--case", "Linear", cwd=tmp_path))["results"]
    assert case["predicted_peak_gb"] < 80
    assert {"capture_s", "plan_s", "lower_s", "emit_s"} < set(case)


@pytest.mark.slow
def test_compile_time_benchmark_reports_every_case(tmp_path: Path) -> None:
    results = json.loads(run_script("benchmarks/compile_time.py", "--quick", cwd=tmp_path))["results"]
    assert len(results) == 3
    assert not any("error" in case for case in results), results
