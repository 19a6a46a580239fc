"""The loss of connectionist temporal classification, forward and backward.

Which alignments there are is summed over in torch's kernels, whose table has a column for every target of the longest
sequence: data, so the table never leaves these functions, and the backward makes it again.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor
_aten = torch.ops.aten


def ctc(log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero_infinity: bool) -> Tensor:
    """log_probs: (time, batch, classes), targets: (batch, labels), inputs, lengths: (batch) -> loss: (batch)."""
    loss = _forward(log_probs, targets, inputs, lengths, blank, zero_infinity)[0]
    return loss.masked_fill_(loss == float("inf"), 0.0) if zero_infinity else loss


def ctc_grad(
    g: Tensor, log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """Gradient of log_probs; g: (batch)."""
    loss, table = _forward(log_probs, targets, inputs, lengths, blank, zero_infinity)
    if log_probs.is_meta:
        grad, _way_back = log_probs.new_empty(log_probs.shape), torch.empty_like(table)
        return grad
    return _aten._ctc_loss_backward.Tensor(g, log_probs, targets, inputs, lengths, loss, table, blank, zero_infinity)


def _forward(
    log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """The loss per sample, and the table (batch, time, 2 · labels + 1); without data one for the most labels."""
    if log_probs.is_meta:
        time, batch, _ = log_probs.shape
        return log_probs.new_empty(batch), log_probs.new_empty(batch, time, 2 * targets.shape[1] + 1)
    loss, table = _aten._ctc_loss.Tensor(log_probs, targets, inputs, lengths, blank, zero_infinity)
    return loss, table
