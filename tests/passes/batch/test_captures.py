"""The programs of one request are captured once per microbatch count."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.cluster import ClusterSpec
from autopar.options import Options
from autopar.passes.batch import captures as module
from autopar.passes.batch.captures import Captures
from autopar.passes.rules.book import RuleBook
from autopar.request import Request, make_request
from autopar.runtime.update_rule import UpdateRule


def request(batch: int = 4) -> Request:
    inputs = (torch.zeros(batch, 8), torch.zeros(batch, 8))
    return make_request(nn.Linear(8, 8), ClusterSpec.local(2), inputs, F.mse_loss, UpdateRule(), Options())


@pytest.fixture
def captured_batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Samples of every batch that is captured."""
    samples: list[int] = []
    real = module.capture_program

    def counting(model: nn.Module, inputs: tuple[torch.Tensor, ...], *rest: object) -> object:
        samples.append(inputs[0].shape[0])
        return real(model, inputs, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "capture_program", counting)
    return samples


def test_each_count_is_captured_once_with_its_share_of_the_batch(captured_batches: list[int]) -> None:
    captures = Captures(request(), RuleBook())
    whole, half = captures.at(1), captures.at(2)
    assert captured_batches == [4, 2]
    assert captures.at(2) is half
    assert captures.at(1) is whole
    assert whole.program.fingerprint != half.program.fingerprint


def test_a_microbatch_of_one_sample_is_read_beside_a_larger_one(captured_batches: list[int]) -> None:
    """In a batch of one nothing tells which dims are the batch's."""
    assert Captures(request(), RuleBook()).at(4).program.loss_kind == "mean"
    assert captured_batches == [1, 2]


def test_seconds_grow_with_what_is_captured_and_not_with_what_is_asked_again() -> None:
    captures = Captures(request(), RuleBook())
    assert captures.seconds == 0.0
    captures.at(1)
    once = captures.seconds
    captures.at(1)
    assert captures.seconds == once > 0
