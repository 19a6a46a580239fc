"""Losses of every form, on a small classifier, a small regression and a small tagger."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.differential.cases import BATCH, Case, draw, ints

CLASSES, SEQ = 5, 4
Loss = Callable[[Tensor, Tensor], Tensor]
WEIGHTS = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)


class Mlp(nn.Module):
    """(batch, 6) -> (batch, out)."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Tagger(nn.Module):
    """(batch, seq) ids -> (batch, seq, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + torch.tanh(self.block(x)))


def _masked(logits: Tensor, labels: Tensor) -> Tensor:
    mask = (labels > 1).to(logits.dtype)
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (each * mask.flatten()).sum() / mask.sum().clamp(min=1)


def _focal(logits: Tensor, labels: Tensor) -> Tensor:
    p = logits.softmax(-1).gather(-1, labels[:, None])[:, 0]
    return (-((1 - p) ** 2) * p.log()).mean()


def _dice(o: Tensor, t: Tensor) -> Tensor:
    p = torch.sigmoid(o)
    return (1 - (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)).mean()


CLASSIFYING: dict[str, Loss] = {
    "cross_entropy": F.cross_entropy,
    "cross_entropy sum": lambda o, t: F.cross_entropy(o, t, reduction="sum"),
    "cross_entropy none": lambda o, t: F.cross_entropy(o, t, reduction="none").mean(),
    "cross_entropy weighted": lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS),
    "cross_entropy weighted sum": lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS, reduction="sum"),
    "cross_entropy smoothed": lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1),
    "cross_entropy smoothed sum": lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1, reduction="sum"),
    "cross_entropy ignoring": lambda o, t: F.cross_entropy(o, t, ignore_index=1),
    "cross_entropy smoothed and ignoring": lambda o, t: F.cross_entropy(o, t, ignore_index=1, label_smoothing=0.2),
    "cross_entropy of probabilities": lambda o, t: F.cross_entropy(o, F.one_hot(t, CLASSES).to(o.dtype)),
    "nll": lambda o, t: F.nll_loss(o.log_softmax(-1), t),
    "nll sum": lambda o, t: F.nll_loss(o.log_softmax(-1), t, reduction="sum"),
    "multi_margin": F.multi_margin_loss,
    "multi_margin weighted": lambda o, t: F.multi_margin_loss(o, t, p=2, margin=0.5, weight=WEIGHTS),
    "focal": _focal,
    "gathered": lambda o, t: -o.log_softmax(-1)[torch.arange(len(t)), t].mean(),
    "one hot": lambda o, t: -(o.log_softmax(-1) * F.one_hot(t, CLASSES)).sum() / len(t),
    "top two": lambda o, t: o.topk(2, -1)[0].mean() + F.cross_entropy(o, t),
}
REGRESSING: dict[str, Loss] = {
    "mse": F.mse_loss,
    "mse sum": lambda o, t: F.mse_loss(o, t, reduction="sum"),
    "half a sum of squares": lambda o, t: 0.5 * ((o - t) ** 2).sum(),
    "a sum over a constant": lambda o, t: ((o - t) ** 2).sum() / 16,
    "a sum and a mean": lambda o, t: ((o - t) ** 2).sum() / 16 + (o - t).abs().mean(),
    "a mean and a sum": lambda o, t: (o - t).pow(2).mean() + 0.01 * o.abs().sum(),
    "a sum over features, a mean over samples": lambda o, t: ((o - t) ** 2).sum(1).mean(),
    "a mean over features, a sum over samples": lambda o, t: ((o - t) ** 2).mean(1).sum(),
    "minus a mean": lambda o, t: -(o * t).mean(),
    "one minus a mean": lambda o, t: 1 - F.cosine_similarity(o, t).mean(),
    "a mean plus a constant": lambda o, t: F.mse_loss(o, t) + 3.0,
    "a mean times a constant": lambda o, t: F.mse_loss(o, t) * 0.1 - 0.5,
    "l1": F.l1_loss,
    "l1 sum": lambda o, t: F.l1_loss(o, t, reduction="sum"),
    "smooth_l1": F.smooth_l1_loss,
    "smooth_l1 beta": lambda o, t: F.smooth_l1_loss(o, t, beta=0.3, reduction="sum"),
    "huber": lambda o, t: F.huber_loss(o, t, delta=0.4),
    "log_cosh": lambda o, t: (o - t).cosh().log().mean(),
    "poisson": lambda o, t: F.poisson_nll_loss(o, t.abs()),
    "gaussian": lambda o, t: F.gaussian_nll_loss(o, t, F.softplus(o) + 0.1),
    "kl": lambda o, t: F.kl_div(o.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
    "kl sum": lambda o, t: F.kl_div(o.log_softmax(-1), t.softmax(-1), reduction="sum"),
    "kl log target": lambda o, t: F.kl_div(o.log_softmax(-1), t.log_softmax(-1), reduction="mean", log_target=True),
    "bce": lambda o, t: F.binary_cross_entropy(torch.sigmoid(o), torch.sigmoid(t)),
    "bce with logits": lambda o, t: F.binary_cross_entropy_with_logits(o, torch.sigmoid(t)),
    "bce with logits, positive weight": lambda o, t: F.binary_cross_entropy_with_logits(
        o, (t > 0).to(o.dtype), pos_weight=WEIGHTS[: o.shape[1]]
    ),
    "hinge": lambda o, t: (1 - o * t.sign()).clamp(min=0).mean(),
    "soft_margin": lambda o, t: F.soft_margin_loss(o, t.sign()),
    "hinge_embedding": lambda o, t: F.hinge_embedding_loss(o, t.sign()),
    "margin_ranking": lambda o, t: F.margin_ranking_loss(o[:, 0], o[:, 1], t[:, 0].sign()),
    "cosine_embedding": lambda o, t: F.cosine_embedding_loss(o, t, t[:, 0].sign()),
    "triplet": lambda o, t: F.triplet_margin_loss(o, t, t.flip(1)),
    "multilabel_soft_margin": lambda o, t: F.multilabel_soft_margin_loss(o, (t > 0).to(o.dtype)),
    "multilabel_margin": lambda o, t: F.multilabel_margin_loss(o, t.argsort(-1)),
    "dice": _dice,
    "quantile": lambda o, t: torch.maximum(0.9 * (t - o), 0.1 * (o - t)).mean(),
    "root of each": lambda o, t: ((o - t).pow(2).sum(1) + 1e-3).sqrt().mean(),
    "norm of each": lambda o, t: (o - t).norm(dim=1).mean(),
    "logsumexp of each": lambda o, t: (o - t).logsumexp(1).mean(),
    "mean of means": lambda o, t: torch.stack([(o - t).pow(2).mean(), o.abs().mean()]).mean(),
    "weighted by the target": lambda o, t: ((o - t).pow(2) * t.abs()).sum() / t.abs().sum(),
}
COUPLED: dict[str, Loss] = {
    "root of a mean": lambda o, t: F.mse_loss(o, t).sqrt(),
    "product of means": lambda o, t: F.mse_loss(o, t) * o.abs().mean(),
    "log of a sum": lambda o, t: (o - t).pow(2).sum().log(),
    "maximum over samples": lambda o, t: (o - t).pow(2).mean(1).max(),
    "median over samples": lambda o, t: (o - t).pow(2).mean(1).median(),
    "a norm of all": lambda o, t: (o - t).norm(),
    "contrastive": lambda o, t: F.cross_entropy(o @ t.t(), torch.arange(len(o))),
    "correlation": lambda o, t: -((o - o.mean(0)) * (t - t.mean(0))).mean(),
    "variance over samples": lambda o, t: F.mse_loss(o, t) - 0.1 * o.var(0).mean(),
    "softmax over samples": lambda o, t: (o.softmax(0) * t).sum(),
    "sorted samples": lambda o, t: F.mse_loss(o.sort(0)[0], t.sort(0)[0]),
    "neighbouring samples": lambda o, t: (o[1:] - o[:-1]).pow(2).mean() + F.mse_loss(o, t),
    "quotient of sums": lambda o, t: (o * t).sum() / o.abs().sum(),
}
TAGGING: dict[str, Loss] = {
    "flattened": lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()),
    "flattened sum": lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="sum"),
    "ignoring": lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(), ignore_index=0),
    "ignoring, weighted": lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(), weight=WEIGHTS, ignore_index=0),
    "classes second": lambda o, t: F.cross_entropy(o.transpose(1, 2), t, ignore_index=2),
    "masked": _masked,
    "shifted": lambda o, t: F.cross_entropy(o[:, :-1].flatten(0, 1), t[:, 1:].flatten()),
    "last token": lambda o, t: F.cross_entropy(o[:, -1], t[:, -1]),
    "mean of a sequence": lambda o, t: F.cross_entropy(o.mean(1), t[:, 0]),
}


def _features(seed: int) -> tuple[Tensor, Tensor]:
    return draw(seed, BATCH, 6), draw(seed + 50, BATCH, 4)


def cases() -> list[Case]:
    """A case per loss."""
    rows = [
        Case(f"loss/{n}", lambda: Mlp(CLASSES), lambda s: (draw(s, BATCH, 6), ints(s, CLASSES, BATCH)), f)
        for n, f in CLASSIFYING.items()
    ]
    rows += [Case(f"loss/{n}", lambda: Mlp(4), _features, f) for n, f in REGRESSING.items()]
    rows += [Case(f"loss/{n}", lambda: Mlp(4), _features, f, coupled=True) for n, f in COUPLED.items()]
    rows += [
        Case(f"loss/{n}", Tagger, lambda s: (ints(s, 9, BATCH, SEQ), ints(s + 1, CLASSES, BATCH, SEQ)), f)
        for n, f in TAGGING.items()
    ]
    return rows
