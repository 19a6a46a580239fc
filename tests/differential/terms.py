"""Losses with a term that no sample has a part in: penalties on parameters, and constants.

Every microbatch computes such a term whole, so each may give a part of it alone; where the sum that joins it to the samples'
terms stands (in the model, in the loss, under a mean over samples) decides which slot of which call gives that part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.differential.cases import BATCH, Case, draw

Term = Callable[[Any], Tensor]
"""A number that a model with the linear layers `first` and `last` makes of its parameters."""
Join = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The loss, of an output, its target and a term."""

TERMS: dict[str, Term] = {
    "squares": lambda m: m.first.weight.pow(2).sum(),
    "absolute": lambda m: m.last.bias.abs().sum(),
    "norm": lambda m: m.first.weight.norm(),
    "norm of all": lambda m: torch.stack([p.norm() for p in (*m.first.parameters(), *m.last.parameters())]).norm(),
    "mean": lambda m: m.first.weight.mean(),
    "sum": lambda m: m.last.weight.sum(),
    "constant": lambda m: torch.full((), 3.0, dtype=m.first.weight.dtype),
    "a bias and a constant": lambda m: m.first.bias.sum() + 2.0,
    "largest": lambda m: m.first.weight.abs().amax(),
    "spread": lambda m: m.last.weight.var(),
    "logsumexp": lambda m: m.last.weight.logsumexp(1).mean(),
    "entropy": lambda m: (m.last.weight.softmax(1) * m.last.weight.log_softmax(1)).sum(),
    "orthogonal": lambda m: (m.first.weight.t() @ m.first.weight - torch.eye(m.first.weight.shape[1])).pow(2).mean(),
    "of two layers": lambda m: (m.last.weight @ m.first.weight).abs().sum(),
    "one twice": lambda m: m.first.bias.pow(2).sum() + m.first.bias.pow(2).sum(),
    "every parameter": lambda m: sum(p.pow(2).sum() for p in (*m.first.parameters(), *m.last.parameters())),  # type: ignore[return-value, arg-type]
    "detached": lambda m: m.first.weight.detach().abs().sum() + m.last.bias.sum(),
    "kept above": lambda m: F.relu(m.first.weight.norm(dim=1) - 0.5).sum(),
}
JOINS: dict[str, Join] = {
    "plus": lambda o, t, term: F.mse_loss(o, t) + 0.1 * term,
    "before": lambda o, t, term: term + F.mse_loss(o, t),
    "minus": lambda o, t, term: 0.5 * F.mse_loss(o, t, reduction="sum") - 0.01 * term,
    "under the mean": lambda o, t, term: (F.mse_loss(o, t, reduction="none") + 0.1 * term).mean(),
    "of each sample": lambda o, t, term: ((o - t).pow(2).sum(1) + term).sum(),
    "mean of both": lambda o, t, term: torch.stack([F.mse_loss(o, t), term]).mean(),
    "twice": lambda o, t, term: F.mse_loss(o, t) + 0.1 * term + F.l1_loss(o, t) - 0.3 * term,
    "halved": lambda o, t, term: (F.smooth_l1_loss(o, t) + term) / 2 + 1.0,
}


class Penalized(nn.Module):
    """(batch, 6) -> (batch, 4) with a term; given a target, the loss."""

    def __init__(self, term: Term, join: Join | None = None) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.term, self.join = term, join

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        out = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        if target is None or self.join is None:
            return out, self.term(self)
        return self.join(out, target, self.term(self))


def loss_of(join: Join) -> Callable[[tuple[Tensor, Tensor], Tensor], Tensor]:
    """The same as a function of what a model without targets gives."""
    return lambda out, target: join(out[0], target, out[1])


def cases() -> list[Case]:
    """A case per term and join, in the model and in the loss by turns, and both for plain sums."""

    def batch(seed: int) -> tuple[Tensor, Tensor]:
        return draw(seed, BATCH, 6), draw(seed + 50, BATCH, 4)

    def inside(term: Term, join: Join) -> Callable[[], nn.Module]:
        return lambda: Penalized(term, join)

    def outside(term: Term) -> Callable[[], nn.Module]:
        return lambda: Penalized(term)

    rows: list[Case] = []
    for k, (name, term) in enumerate(TERMS.items()):
        for j, (how, join) in enumerate(JOINS.items()):
            if how == "plus" or (k + j) % 2:
                rows.append(Case(f"term/{name}, {how}, in the model", inside(term, join), batch))
            if how == "plus" or not (k + j) % 2:
                rows.append(Case(f"term/{name}, {how}, in the loss", outside(term), batch, loss_of(join)))
    return rows
