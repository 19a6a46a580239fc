"""trl's per-token log-probabilities of a language model, as plain torch: what a capture can follow and a plan can shard.

trl computes them in tiles by a function with a backward of its own, so that logits never are whole. A program has its own ways to
save that memory, and needs the computation itself:

    z = f(hidden @ weight.T + bias)      log p(target) = z[target] - logsumexp(z)      entropy = -sum p log p      …

trl narrows tiles to float32; here what is wider stays so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HOME, NAME = "trl.trainer.utils", "_ChunkedLogProbFunction"


class PlainLogProbs:
    """In place of trl's ChunkedLogProbFunction."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = (),
    ) -> tuple[Tensor | None, ...]:
        """hidden: (tokens, d); weight: (vocabulary, d); targets: (tokens) -> log-probabilities, entropy, logarithm of the sum of
        squared probabilities, mean logit, whether the target is the most likely: (tokens) each, None where not in outputs."""
        logits = F.linear(hidden, weight, bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logits = logits * logit_scale if logit_scale != 1.0 else logits
        logits = softcap * torch.tanh(logits / softcap) if softcap is not None else logits
        logits = logits / temperature if temperature != 1.0 else logits
        log_probs = -F.cross_entropy(logits, targets, reduction="none")
        entropy = None
        if "entropy" in outputs:
            of_all = F.log_softmax(logits, -1)
            entropy = -(of_all.exp() * of_all).sum(-1)
        squared = mean = top = None
        with torch.no_grad():
            if "log_sum_sq_probs" in outputs:
                squared = (2 * F.log_softmax(logits, -1)).exp().sum(-1).log()
            mean = logits.mean(-1) if "mean_logits" in outputs else None
            top = logits.argmax(-1) == targets if "is_top1" in outputs else None
        return log_probs, entropy, squared, mean, top


@contextmanager
def plain_log_probs() -> Iterator[None]:
    """A context in which trl's models compute log-probabilities so; nothing where trl is not imported."""
    home: Any = sys.modules.get(HOME)
    if home is None or not hasattr(home, NAME):
        yield
        return
    before = getattr(home, NAME)
    setattr(home, NAME, PlainLogProbs)
    try:
        yield
    finally:
        setattr(home, NAME, before)
