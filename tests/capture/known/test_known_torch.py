"""Modules of torch that pick rows by what the data say train like any other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.capture.equal import assert_equal_to_eager, compiled

X = torch.randn(8, 16)
CLASSES = torch.tensor([0, 4, 5, 9, 10, 19, 3, 12])


class Classifier(nn.Module):
    def __init__(self, result: str, head_bias: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.last = nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10], div_value=2.0, head_bias=head_bias)
        self.result = result

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return getattr(self.last(self.first(x), y), self.result)


@pytest.mark.few(1)
@pytest.mark.parametrize("head_bias", [False, True])
def test_an_adaptive_softmax_trains_as_in_eager(head_bias: bool) -> None:
    program = assert_equal_to_eager(Classifier("loss", head_bias), (X, CLASSES))
    assert "AdaptiveLogSoftmaxWithLoss" in program.report()


@pytest.mark.slow
def test_the_likelihood_of_every_row_is_as_in_eager() -> None:
    weighted = torch.arange(1.0, 9.0)
    assert_equal_to_eager(Classifier("output"), (X, CLASSES), lambda output: (output * weighted).sum())


@pytest.mark.few(1)
@pytest.mark.parametrize("wrong", [-100, -1, 20])
def test_a_class_that_is_none_stops_the_program(wrong: int) -> None:
    program = compiled(Classifier("loss"), (X, CLASSES))
    with pytest.raises(autopar.GuardError, match="out of range"):
        program.run([(X, torch.where(CLASSES == 9, wrong, CLASSES))])


def test_what_the_module_itself_refuses_keeps_its_words() -> None:
    with pytest.raises(autopar.CaptureError, match="same size in the batch dimension"):
        compiled(Classifier("loss"), (X, CLASSES[:4]))


class Head(nn.Module):
    """Logits that no module has: torch computes the loss in chunks of rows."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.first, self.head, self.reduction = nn.Linear(16, 16), nn.Linear(16, 20, bias=False), reduction

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        chunked = nn.LinearCrossEntropyOptions(batch_chunk_size=4)
        rows = F.linear_cross_entropy(
            self.first(x).tanh(), self.head.weight, y, reduction=self.reduction, options=chunked
        )
        return rows.mean()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_that_torch_computes_in_chunks_is_sharded_as_one_of_logits(reduction: str) -> None:
    program = assert_equal_to_eager(Head(reduction), (X, CLASSES))
    ops = {call.op for template in program.ir.templates.values() for call in template.op_calls.values()}
    assert not any("linear_cross_entropy" in op for op in ops)
