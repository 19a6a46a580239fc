"""A program that is compiled again begins with what is known of it, and is the program that a compilation from scratch gives."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.request import Request
from tests.zoo.models import BY_NAME
from tests.zoo.programs import compiled_zoo

CHANGES: dict[str, dict[str, Any]] = {
    "strategy": {"strategy": "zero3"},
    "mesh": {"mesh": {"dp": 2, "tp": 2}},
    "pipeline": {"pp": 2, "microbatches": 4},
    "recompute": {"recompute": "full"},
}


@functools.cache
def llama() -> autopar.Program:
    return compiled_zoo(BY_NAME["llama"], 4)


def perceptron() -> autopar.Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    batch = torch.randn(8, 8), torch.randn(8, 8)
    return autopar.compile(model, autopar.ClusterSpec.local(2), batch, loss_fn=nn.functional.mse_loss)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that are captured while a test runs."""
    captured: list[Request] = []
    capture = Request.capture

    def counted(self: Request, pieces: int = 1) -> Any:
        captured.append(self)
        return capture(self, pieces)

    monkeypatch.setattr(Request, "capture", counted)
    return captured


@pytest.mark.slow
@pytest.mark.parametrize("options", CHANGES.values(), ids=CHANGES)
def test_a_program_compiled_again_is_the_one_from_scratch(options: dict[str, Any]) -> None:
    again = llama().compile_again(replace(llama().request, options=autopar.Options(**options)))
    fresh = compiled_zoo(BY_NAME["llama"], 4, options=autopar.Options(**options))
    assert again.plan == fresh.plan
    assert again.predicted == fresh.predicted
    assert again.sources == fresh.sources


def test_what_is_captured_is_captured_once(captures: list[Request]) -> None:
    program = perceptron()
    again = program.compile_again(replace(program.request, options=autopar.Options(strategy="zero3", overlap=False)))
    assert len(captures) == 1
    again.compile_again(replace(program.request, options=autopar.Options(precision="bf16")))
    assert len(captures) == 2


def test_a_model_that_was_changed_is_captured_again(captures: list[Request]) -> None:
    program = perceptron()
    model = program.model
    assert isinstance(model, nn.Sequential)
    program.compile_again(program.request)
    assert len(captures) == 1
    model[0].weight.requires_grad_(False)
    assert "0.weight" not in program.compile_again(program.request).ir.trained
    assert len(captures) == 2
