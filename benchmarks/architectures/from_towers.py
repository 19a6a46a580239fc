"""Towers whose outputs meet in the loss, and recommenders with many tables, tiny."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case

BATCH, TABLES = 8, 100
Made = tuple[nn.Module, Any]


def cases() -> list[Case]:
    """Sentence towers by their loss, and recommenders."""
    return [
        Case("sentence tower, ranking in batch", "towers", _pairs),
        Case("sentence tower, triplets", "towers", _triplets),
        Case("sentence tower, cosine", "towers", _cosine),
        Case("image and text", "towers", _contrastive),
        Case("two towers with logQ", "recommenders", _two_towers),
        Case("DLRM with 100 tables", "recommenders", _dlrm, F.binary_cross_entropy_with_logits),
        Case("DCN", "recommenders", lambda: (Cross(low_rank=0), _clicks()), F.binary_cross_entropy_with_logits),
        Case(
            "DCN-V2 mixed", "recommenders", lambda: (Cross(low_rank=4), _clicks()), F.binary_cross_entropy_with_logits
        ),
        Case("bags of histories", "recommenders", _bags, F.binary_cross_entropy_with_logits),
    ]


class Sentence(nn.Module):
    """An encoder whose tokens are averaged where the mask is one, and scaled to length one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32, padding_idx=0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        mask = ids != 0
        tokens = self.layers(self.embed(ids), src_key_padding_mask=~mask)
        wide = mask.unsqueeze(-1).expand(tokens.size()).to(tokens.dtype)
        pooled = torch.sum(tokens * wide, 1) / torch.clamp(wide.sum(1), min=1e-9)
        return F.normalize(pooled, p=2, dim=1)


class Trained(nn.Module):
    """A sentence tower with a loss of several sentences."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tower, self.kind, self.scale = Sentence(), kind, 20.0

    def forward(self, *sentences: Tensor) -> Tensor:
        first, *others = [self.tower(ids) for ids in sentences[: 3 if self.kind == "triplet" else 2]]
        if self.kind == "triplet":
            return F.relu((first - others[0]).norm(dim=1) - (first - others[1]).norm(dim=1) + 0.5).mean()
        if self.kind == "cosine":
            return F.mse_loss(F.cosine_similarity(first, others[0]), sentences[2])
        scores = torch.mm(first, torch.cat(others).transpose(0, 1)) * self.scale
        labels = torch.tensor(range(len(scores)), dtype=torch.long, device=scores.device)
        return F.cross_entropy(scores, labels)


def _ids() -> Tensor:
    ids = torch.randint(1, 50, (BATCH, 10))
    lengths = torch.arange(BATCH) % 6 + 5
    return ids.masked_fill(torch.arange(10) >= lengths[:, None], 0)


def _pairs() -> Made:
    return Trained("pairs"), (_ids(), _ids())


def _triplets() -> Made:
    return Trained("triplet"), (_ids(), _ids(), _ids())


def _cosine() -> Made:
    return Trained("cosine"), (_ids(), _ids(), torch.rand(BATCH))


class Contrastive(nn.Module):
    """Images against texts both ways, with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.text = Sentence()
        self.image = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.GELU(), nn.Flatten(), nn.Linear(64, 32))
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        images = self.image(image)
        images = images / images.norm(dim=-1, keepdim=True)
        logits = self.logit_scale.exp().clamp(max=100) * images @ self.text(ids).t()
        labels = torch.arange(logits.shape[0], device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def _contrastive() -> Made:
    return Contrastive(), (torch.randn(BATCH, 3, 8, 8), _ids())


class TwoTowers(nn.Module):
    """Users against the items of the batch, corrected by how often an item is drawn; the same item twice is no negative."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(40, 16), nn.Embedding(30, 16)
        self.user_mlp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.item_mlp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, user: Tensor, item: Tensor, probability: Tensor) -> Tensor:
        scores = self.user_mlp(self.user(user)) @ self.item_mlp(self.item(item)).T
        scores = scores - probability.log().unsqueeze(0)
        same = (item.unsqueeze(0) == item.unsqueeze(1)) & ~torch.eye(len(item), dtype=torch.bool)
        return F.cross_entropy(scores.masked_fill(same, -1e9), torch.arange(len(user)))


def _two_towers() -> Made:
    user, item = torch.randint(0, 40, (BATCH,)), torch.randint(0, 30, (BATCH,))
    return TwoTowers(), (user, item, torch.rand(BATCH) * 0.5 + 0.1)


class Dlrm(nn.Module):
    """A hundred tables of different sizes, dot products of every pair above the diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(8 + i % 7, 8) for i in range(TABLES))
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(nn.Linear(pairs + 8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = torch.stack([x] + [table(ids[:, i]) for i, table in enumerate(self.tables)], dim=1)
        products = torch.bmm(rows, rows.transpose(1, 2))
        above, beside = torch.triu_indices(rows.shape[1], rows.shape[1], offset=1)
        return self.top(torch.cat([x, products[:, above, beside]], dim=1)).squeeze(-1)


def _dlrm() -> Made:
    return Dlrm(), (torch.randn(BATCH, 4), torch.randint(0, 8, (BATCH, TABLES)), torch.rand(BATCH).round())


class Cross(nn.Module):
    """Cross layers x0 * (W x + b) + x beside a deep tower. low_rank: W as mixed experts of that rank, 0: a vector."""

    offsets: Tensor

    def __init__(self, low_rank: int) -> None:
        super().__init__()
        self.table, width = nn.Embedding(60, 4), 6 * 4
        self.low_rank = low_rank
        if low_rank:
            self.u = nn.ParameterList([nn.Parameter(torch.randn(2, width, low_rank) * 0.1) for _ in range(2)])
            self.v = nn.ParameterList([nn.Parameter(torch.randn(2, width, low_rank) * 0.1) for _ in range(2)])
            self.gates = nn.ModuleList(nn.Linear(width, 2) for _ in range(2))
        else:
            self.w = nn.ParameterList([nn.Parameter(torch.randn(width, 1) * 0.1) for _ in range(2)])
        self.b = nn.ParameterList([nn.Parameter(torch.zeros(width)) for _ in range(2)])
        self.deep = nn.Sequential(nn.Linear(width, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
        self.head = nn.Linear(width + 8, 1)
        self.register_buffer("offsets", torch.arange(6) * 10)

    def forward(self, ids: Tensor) -> Tensor:
        x0 = x = self.table(ids + self.offsets).flatten(1)
        for i in range(2):
            if self.low_rank:
                experts = torch.einsum("bk,ekd->bed", torch.tanh(x), self.v[i])
                experts = x0.unsqueeze(1) * (torch.einsum("bek,edk->bed", experts, self.u[i]) + self.b[i])
                x = (experts * self.gates[i](x).softmax(-1).unsqueeze(-1)).sum(1) + x
            else:
                x = x0 * (x @ self.w[i]) + self.b[i] + x
        return self.head(torch.cat([x, self.deep(x0)], dim=-1)).squeeze(-1)


def _clicks() -> Any:
    return torch.randint(0, 10, (BATCH, 6)), torch.rand(BATCH).round()


class Bags(nn.Module):
    """A history of items with weights as a bag, and attention of the candidate over it."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.item = nn.EmbeddingBag(40, 8, mode="sum"), nn.Embedding(40, 8, padding_idx=0)
        self.attend = nn.Sequential(nn.Linear(24, 16), nn.PReLU(), nn.Linear(16, 1))
        self.head = nn.Linear(24, 1)

    def forward(self, history: Tensor, weight: Tensor, candidate: Tensor) -> Tensor:
        rows, wanted = self.item(history), self.item(candidate)
        beside = wanted.unsqueeze(1).expand_as(rows)
        score = self.attend(torch.cat([rows, beside, rows * beside], dim=-1)).squeeze(-1)
        score = torch.where(history != 0, score, torch.full_like(score, -(2**20))).softmax(-1)
        seen = torch.matmul(score.unsqueeze(1), rows).squeeze(1)
        return self.head(torch.cat([self.bag(history, per_sample_weights=weight), seen, wanted], -1)).squeeze(-1)


def _bags() -> Made:
    history = torch.randint(0, 40, (BATCH, 5))
    return Bags(), (history, torch.rand(BATCH, 5), torch.randint(1, 40, (BATCH,)), torch.rand(BATCH).round())
