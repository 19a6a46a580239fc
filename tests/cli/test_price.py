"""`autopar price`: configurations of other systems, compiled and priced."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cli.main import main
from autopar.report.answer import work_facts

HERE = "tests.cli.test_price"
CLUSTER = ["--cluster", "dgx-h100"]
CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1},
    "wall_clock_breakdown": True,
}


def step() -> dict[str, Any]:
    x = torch.randn(16, 64)
    return {
        "model": nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)),
        "example_inputs": (x, x),
        "loss_fn": nn.functional.mse_loss,
        "optimizer": functools.partial(torch.optim.AdamW, lr=1e-3),
    }


def answer(path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    path.write_text(json.dumps(config))
    assert main(["price", str(path), "--model", f"{HERE}:step", *CLUSTER, *more]) == 0
    return capsys.readouterr().out


def test_a_configuration_has_the_price_of_its_layout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The prediction is that of `compile` with the same options, microbatches among them."""
    found = json.loads(answer(tmp_path / "ds.json", CONFIG, capsys, "--json"))
    options = autopar.Options(mesh={"dp": 8}, strategy="zero1", microbatches=2)
    program = autopar.compile(cluster="dgx-h100", options=options, **step())
    assert found["step_time_s"] == program.predicted.step_time_s
    assert found["peak_bytes"] == program.predicted.peak_bytes
    assert found["mfu"] == work_facts(program).mfu
    assert found["layout"]["dp"] == "8"
    assert found["layout"]["zero"] == "1"
    assert found["meaningless"] == {"wall_clock_breakdown": "True"}
    nearest, best = found["better"]["nearest"], found["better"]["best"]
    assert best["step_time_s"] <= nearest["step_time_s"] < found["step_time_s"]
    assert len(nearest["changes"]) + len(nearest["also"]) <= len(best["changes"]) + len(best["also"])


def test_the_answer_says_what_is_better_and_what_means_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = answer(tmp_path / "ds.json", CONFIG, capsys)
    assert "means nothing here: wall_clock_breakdown = True" in said
    assert "better" in said
    assert "dp=8" in said
    assert "peak: parameters" in said


def test_a_configuration_without_a_batch_has_the_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    autopar.compile(cluster="dgx-h100", **step()).export("accelerate", path, price=False)
    command = ["price", str(path), "--model", f"{HERE}:step", *CLUSTER, "--alone"]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["global_batch"] == "16"
    assert main([*command, "--batch", "8"]) == 2
    assert "--batch has a global batch of 8, tests.cli.test_price:step one of 16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("model.py", "WIDTH = 8\n", "(WIDTH), so it is no fsdp2 file"),
        ("cluster.yaml", "preset: dgx-h100\n", "(preset), so it is no accelerate file"),
        ("plan.json", '{"ranks": 8}', "(ranks), so it is no tp_plan file"),
    ],
)
def test_a_file_that_says_nothing_of_a_layout_is_no_configuration(
    name: str, text: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["price", str(tmp_path / name), "--model", f"{HERE}:step", *CLUSTER, "--alone"]) == 2
    assert said in capsys.readouterr().err


def test_a_batch_that_is_not_the_models_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG | {"train_batch_size": 8, "gradient_accumulation_steps": 1}))
    assert main(["price", str(path), "--model", f"{HERE}:step", *CLUSTER, "--alone"]) != 0
    assert "global batch of 8" in capsys.readouterr().err
