"""Cross entropy over a sharded vocabulary never gathers the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

BATCH, SEQ, WIDTH, VOCABULARY = 3, 11, 16, 32768  # rows that four ranks cannot share, so the vocabulary is shared


class Head(nn.Module):
    """The end of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(tokens)))


WEIGHT = torch.rand(VOCABULARY) + 0.5


def _loss(**options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def _of_probabilities(logits: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1), WEIGHT, label_smoothing=0.1)


LOSSES = {
    "plain": _loss(),
    "smoothed": _loss(label_smoothing=0.1),
    "weighted and smoothed": _loss(label_smoothing=0.1, weight=WEIGHT, ignore_index=-100),
    "sum": _loss(label_smoothing=0.2, reduction="sum"),
    "of probabilities": _of_probabilities,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LOSSES)
def test_vocabulary_parallel_cross_entropy_never_gathers_the_logits(name: str) -> None:
    torch.manual_seed(0)
    model, token_loss = Head(), LOSSES[name]
    tokens, labels = (torch.randint(0, VOCABULARY, (BATCH, SEQ)) for _ in range(2))
    labels[0, :3] = -100
    if name == "of probabilities":
        labels = torch.rand(BATCH, SEQ, VOCABULARY).softmax(-1)
    options = autopar.Options(mesh={"tp": 4}, constraints={"head.weight": "[@tp, .]"})
    program = autopar.compile(
        model, autopar.ClusterSpec.local(4), (tokens, labels), loss_fn=token_loss, options=options
    )
    logits_bytes = BATCH * SEQ * VOCABULARY * 4
    moved = program.account.collectives
    assert moved, "a sharded vocabulary owes at least the sums of the loss"
    gathered = [c for c in moved if c.kind in ("all_gather", "all_to_all") and c.nbytes >= logits_bytes / 4]
    assert not gathered, gathered
    assert max(c.nbytes for c in moved) < logits_bytes / 4, moved
    assert any("f32[3, 11, 32768@tp]" in line for line in program.source(0).splitlines()), "the logits are not sharded"
    assert autopar.verify(program, model, (tokens, labels)).max_error <= 1e-9
