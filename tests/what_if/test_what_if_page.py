"""The commands of docs/what_if.md run as they are printed, on a small model."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import jsonschema
import pytest

from autopar.cli.main import main
from tests.test_house import ROOT

PLAN_SCHEMA = json.loads((ROOT / "docs" / "schemas" / "plan.json").read_text())
PAGE = (ROOT / "docs" / "what_if.md").read_text()
COMMANDS = re.findall(r"\| `(autopar plan [^`]*)` \|", PAGE)
MODEL = """
import functools

import torch
from torch import nn

import autopar


def step():
    x = torch.zeros(64, 128)
    return {
        "model": nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)),
        "example_inputs": (x, x),
        "loss_fn": nn.functional.mse_loss,
        "optimizer": functools.partial(torch.optim.AdamW, lr=1e-3),
    }


def quickly():
    return step() | {"options": autopar.Options(explain_s=0.0)}
"""
SAYS = {
    "--memory-gb": "training on 8 ranks",
    "--mesh": "tp=4",
    "nodes=2": "nodes=2: ",
    "strategy=fsdp": "strategy=fsdp: ",
    "--export": "training on 8 ranks",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the model of the page, in which commands run."""
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    return tmp_path


def test_the_page_has_the_five_questions() -> None:
    assert len(COMMANDS) == 5


QUICK = 2
"""Commands of the page that are run with the quick tests."""
RUN = [
    pytest.param(command, id=word, marks=[] if i < QUICK else [pytest.mark.slow])
    for i, (command, word) in enumerate(zip(COMMANDS, SAYS, strict=False))
]


@pytest.mark.few(1)
@pytest.mark.parametrize("command", RUN)
def test_a_command_of_the_page_answers(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)[1:]) == 0
    said = capsys.readouterr().out
    assert SAYS[next(word for word in SAYS if word in command)] in said
    assert (folder / "launch.sh").exists() == ("launch.sh" in command)


def test_what_does_not_fit_is_answered(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "my_model:quickly", "--cluster", "dgx-h100", "--memory-gb", "1"]) == 1
    answer = capsys.readouterr().out
    assert answer.startswith("does not fit: short by ")
    assert " of 1 GB; devices of about " in answer


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        pytest.param("strategy=fsdp", "This plan beside others", marks=pytest.mark.slow),
        ("memory_gb=0.0001", "does not fit"),
    ],
)
def test_the_answer_stands_on_the_page(
    changes: str, answer: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "my_model:quickly", "--cluster", "dgx-h100", "--compare", "best", changes, "--html", "plan.html"]
    assert main(words) == 0
    page = (folder / "plan.html").read_text()
    assert capsys.readouterr().out.splitlines()[0] in page
    assert answer in page
    assert main([*words[:7], "--json"]) == 0
    jsonschema.validate(json.loads(capsys.readouterr().out), PLAN_SCHEMA)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "asked", [[], ["--memory-gb", "0.0001"], ["--pareto", "--halvings", "0"]], ids=["plan", "no fit", "pareto"]
)
def test_json_is_as_its_schema_says(asked: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "my_model:quickly", "--cluster", "dgx-h100", *asked, "--json"])
    jsonschema.validate(json.loads(capsys.readouterr().out), PLAN_SCHEMA)
