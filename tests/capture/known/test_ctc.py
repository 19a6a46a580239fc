"""Connectionist temporal classification equals eager, however lengths and targets are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.capture.equal import Net, assert_equal_to_eager, compiled, square

FRAMES = torch.randn(4, 6, 8)
TARGETS = torch.tensor([[1, 2, 3], [4, 4, 0], [5, 0, 0], [7, 6, 7]])
LENGTHS = torch.tensor([3, 2, 1, 3])
FRAME_COUNTS = torch.tensor([6, 5, 6, 4])
IN_ONE_DIM = torch.cat([row[:n] for row, n in zip(TARGETS, LENGTHS.tolist(), strict=True)])
MASKED = torch.where(torch.arange(3) < LENGTHS[:, None], TARGETS, -100)


def scores(net: Net, x: Tensor) -> Tensor:
    """(time, batch, classes)."""
    return net.first(x).log_softmax(-1).transpose(0, 1)


def _masked(net: Any, x: Tensor, labels: Tensor) -> Tensor:
    """The loss with masked labels, as Hugging Face's models have it."""
    mask = labels >= 0
    flat = labels.masked_select(mask)
    return F.ctc_loss(scores(net, x), flat, torch.full((x.shape[0],), 6), mask.sum(-1), reduction="sum")


Forward = Callable[..., Tensor]
CASES: dict[str, tuple[Forward, tuple[Tensor, ...]]] = {
    "rows and tensors": (
        lambda m, x, t, a, b: F.ctc_loss(scores(m, x), t, a, b),
        (FRAMES, TARGETS, FRAME_COUNTS, LENGTHS),
    ),
    "rows and numbers": (
        lambda m, x, t: F.ctc_loss(scores(m, x), t, (6, 6, 5, 4), (3, 2, 1, 3), reduction="sum"),
        (FRAMES, TARGETS),
    ),
    "one dim and tensors": (
        lambda m, x, t, a, b: F.ctc_loss(scores(m, x), t, a, b),
        (FRAMES, IN_ONE_DIM, FRAME_COUNTS, LENGTHS),
    ),
    "one dim and numbers": (
        lambda m, x, t: F.ctc_loss(scores(m, x), t, (6, 6, 5, 4), (3, 2, 1, 3), blank=0),
        (FRAMES, IN_ONE_DIM),
    ),
    "selected by a mask, numbers": (
        lambda m, x, t: F.ctc_loss(scores(m, x), t[t >= 0], (6, 6, 5, 4), (3, 2, 1, 3)),
        (FRAMES, MASKED),
    ),
    "selected by a mask": (_masked, (FRAMES, MASKED)),
    "per sample, another blank": (
        lambda m, x, t, a, b: square(F.ctc_loss(scores(m, x), t, a, b, blank=3, reduction="none")),
        (FRAMES, TARGETS.clamp(max=2), FRAME_COUNTS, LENGTHS),
    ),
    "too short for its labels": (
        lambda m, x, t, a, b: F.ctc_loss(scores(m, x), t, a, b, zero_infinity=True),
        (FRAMES, TARGETS, torch.tensor([2, 6, 6, 1]), LENGTHS),
    ),
    "no logarithms": (
        lambda m, x, t, a, b: F.ctc_loss(m.first(x).transpose(0, 1), t, a, b),
        (FRAMES, TARGETS, FRAME_COUNTS, LENGTHS),
    ),
    "one sample": (
        lambda m, x, t: F.ctc_loss(m.first(x[0]).log_softmax(-1), t[0], torch.tensor(6), torch.tensor(3)),
        (FRAMES, TARGETS),
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_the_loss_equals_eager(name: str) -> None:
    forward, batch = CASES[name]
    assert_equal_to_eager(Net(forward), batch, ranks=4, seeds=(0, 1))


def test_the_batch_shards() -> None:
    forward, batch = CASES["rows and tensors"]
    model = Net(forward)
    options = autopar.Options(mesh={"dp": 4}, strategy="dp")
    program = autopar.compile(model, autopar.ClusterSpec.local(4), batch, options=options)
    gathered = [c for c in program.account.collectives if c.kind in ("all_gather", "all_to_all")]
    assert not gathered, gathered
    assert autopar.verify(program, model, batch).max_error <= 1e-9


def test_as_a_module_of_the_loss() -> None:
    def loss(out: Tensor, targets: Tensor) -> Tensor:
        return nn.CTCLoss()(out, targets, torch.full((4,), 6), torch.full((4,), 3))

    assert_equal_to_eager(Net(scores), (FRAMES, TARGETS), loss)


def test_lengths_that_are_not_those_of_the_mask_stop_the_program() -> None:
    def other(net: Any, x: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        return F.ctc_loss(scores(net, x), labels[labels >= 0], torch.full((4,), 6), lengths)

    model = Net(other)
    program = compiled(model, (FRAMES, MASKED, LENGTHS))
    assert autopar.verify(program, model, (FRAMES, MASKED, LENGTHS)).max_error <= 1e-9
    with pytest.raises(autopar.GuardError):
        program.run([(FRAMES, MASKED, LENGTHS - 1)])
