"""`autopar plan`: reports and plans of models that are named on a command line."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cli.main import main

HERE = "tests.cli.test_plan"
CLUSTER = ["--cluster", "dgx-h100"]


def mlp() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), (torch.randn(16, 64),)


def trained() -> dict[str, Any]:
    model, (x,) = mlp()
    options = autopar.Options(strategy="dp")
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
    return {
        "model": model,
        "example_inputs": (x, x),
        "loss_fn": nn.functional.mse_loss,
        "optimizer": adamw,
        "options": options,
    }


def a_number() -> int:
    return 3


def misspelt() -> dict[str, Any]:
    return {"optimiser" if key == "optimizer" else key: value for key, value in trained().items()}


def test_a_function_is_planned_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{HERE}:mlp", *CLUSTER]) == 0
    assert "inference" in capsys.readouterr().out


def test_facts_and_plan_are_those_of_compile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", f"{HERE}:trained", *CLUSTER, "--json", "--out", str(path)]) == 0
    facts = json.loads(capsys.readouterr().out)
    program = autopar.compile(cluster="dgx-h100", **trained())
    assert facts["step_time_s"] == program.predicted.step_time_s
    assert facts["peak_bytes"] == program.predicted.peak_bytes
    assert facts["plan"] == "dp=8"
    again = autopar.compile(cluster="dgx-h100", plan=path, **trained())
    assert again.plan.stages == program.plan.stages


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("nothing", "neither module:function nor a config.json"),
        ("no.such.module:f", "No module named"),
        (f"{HERE}:nothing", "has no function nothing"),
        (f"{HERE}:a_number", "returned int; return (model, example_inputs)"),
        (
            f"{HERE}:misspelt",
            "'optimiser', which is no argument of autopar.compile beside the cluster; did you mean 'op",
        ),
        ("missing/config.json", "config.json"),
    ],
)
def test_what_is_no_model_is_said_in_a_line(model: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, *CLUSTER]) == 2
    assert said in capsys.readouterr().err


def test_options_are_given_in_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{HERE}:trained", *CLUSTER, "--strategy", "zero3"]) == 2
    assert "leave out --strategy" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_configuration_of_transformers_is_planned(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "dtype": dtype, **sizes, **heads}))
    assert (
        main(["plan", str(path), *CLUSTER, "--batch", "16", "--sequence", "32", "--precision", "bf16", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["ranks"] == 8
