"""Rows that a mask selects: what treats them one by one, adds them up or writes them back equals eager; the rest is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.errors import InputError
from autopar.runtime.errors import GuardError
from tests.capture.equal import SGD, TOLERANCE, Net, assert_equal_to_eager, compiled, square
from tests.capture.nets import capture, refusal

X = torch.randn(4, 6, 8)
LABELS = torch.randint(0, 8, (4, 6))
MASK = torch.zeros(4, 6, dtype=torch.bool)
MASK[0, 2:] = MASK[2] = MASK[3, 1] = True
BATCH = (X, MASK, LABELS)
Forward = Callable[..., Tensor]


def written_back(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    h = m.first(x)
    out = torch.zeros_like(h)
    out[k] = m.mlp(h[k])
    return square(out)


def with_residual(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    h = m.first(x).clone()
    rows = h[k]
    h[k] = rows + m.mlp(rows)
    return square(h) + rows.square().sum()


def unpadded(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    h, places = m.first(x).flatten(0, 1), torch.nonzero(k.flatten(), as_tuple=False).flatten()
    packed = m.mlp(m.norm(h[places]))
    out = torch.zeros(24, 8, dtype=x.dtype)
    out[places] = packed
    return square(out.view(4, 6, 8))


def selected_by_index(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    h, places = m.first(x).flatten(0, 1), k.flatten().nonzero().squeeze(-1)
    rows = m.mlp(h.index_select(0, places))
    return square(torch.zeros(24, 8, dtype=x.dtype).index_add(0, places, rows), h.index_copy(0, places, rows))


def of_coordinates(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    h, (sample, token), places = m.first(x), torch.where(k), torch.argwhere(k)
    out = h.clone()
    out[sample, token] = m.mlp(h[places[:, 0], places[:, 1]])
    return square(out)


def pooled_by_sample(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    h, (sample, token) = m.first(x), torch.where(k)
    rows = m.mlp(h.mean(1)[sample] * m.last(x)[sample, token])
    return square(torch.zeros(4, 8, dtype=x.dtype).index_add_(0, sample, rows))


def scattered(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    h = m.first(x)
    rows = m.mlp(h.masked_select(k.unsqueeze(-1)).view(-1, 8))
    return square(h.masked_scatter(k.unsqueeze(-1).expand_as(h), rows))


def images_among_tokens(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    h, image = m.first(x), m.last(x.flip(0)).flatten(0, 1)
    return square(h.masked_scatter(k.unsqueeze(-1).expand_as(h), image))


def heads_by_task(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    h, task = m.norm(x[:, 0]), t[:, 0] % 2
    parts = [
        F.mse_loss(head(h[task == i]), x[:, 1][task == i], reduction="sum") for i, head in enumerate((m.first, m.last))
    ]
    return (parts[0] + parts[1]) / len(x)


def only_where_finite(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    h = m.first(x)[..., 0]
    k = h.detach() > 0
    logs = (h[k].log() * m.last.weight[0, 0]).mean()
    return logs + (m.last.weight[0, 1] / h[k].sqrt()).sum() + h.masked_fill(~k, torch.nan)[k].mean()


def by_their_number(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    rows = m.first(x)[k]
    n, width = rows.shape
    noise = torch.zeros(n, width, dtype=x.dtype)
    return (m.last(rows + noise).square().sum() / max(n, 1) + rows.sum() / max(rows.numel(), 1)) * 0.5


def in_heads(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    rows = m.first(x)[k]
    parts = F.normalize(rows.view(-1, 2, 4), dim=-1) + rows.view(rows.shape[0], 2, 4).flip(1)
    return square(parts.flatten(1).sum(0), rows.flatten().view(-1, 4).sum(0))


def of_whole_samples(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    k = k[:, 2]
    q = m.first(x)[k].view(-1, 6, 2, 4).transpose(1, 2)
    out = torch.zeros_like(x)
    out[k] = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(-1, 6, 8)
    return square(out)


def written_in_place(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    rows = m.first(x)[k]
    same = rows
    same += 1
    rows.view(-1, 2, 4).mul_(2)
    F.relu(rows, True)
    rough = m.last(x)[k].square().log()
    rough.view(-1, 4).add_(1)
    return square(rows.sum(0), rough.exp().sum(0))


def places_that_moved(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    places = k.flatten().nonzero().flatten()
    places.sub_(places % 2)
    return square(m.first(x).flatten(0, 1)[places].sum(0))


def part_of_them(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    rows, labels = m.first(x)[k], t[k]
    valid = labels != 3
    return F.cross_entropy(m.last(rows[valid]), labels[valid]) + rows[labels > 2].sum()


def tokens_of_their_own(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    h = m.first(x).clone()
    h[k] = m.last.weight[0]
    rest = h.clone().view(-1, 8)
    rest[(~k).flatten().nonzero().flatten()] = 0.5
    h[k] = h[k] + F.embedding(t[k], m.last.weight)
    return square(h, rest)


def along_tokens(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    return square(m.last(m.first(x)[:, k[0]]).square().mean(1), x[:, k[0], 2:].sum(1))


def joined(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    h = m.first(x)
    rows = torch.cat([h[k], h[~k].detach(), x[:, 0]])
    return square(m.last(rows).square().mean(0))


def every_expert(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    h = m.first(x).flatten(0, 1)
    out, chosen = torch.zeros_like(h), torch.softmax(m.last(h)[:, :2], -1)
    for i, expert in enumerate((m.mlp, m.norm)):
        rows = torch.where(t.flatten() % 3 == i)[0]
        out.index_add_(0, rows, expert(h[rows]) * chosen[rows, i, None])
    return square(out)


def expanded(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    rows = m.first(x)[k]
    assert rows.shape[0] == t[k].shape[0]
    query = m.last.weight[0].expand(rows.shape[0], -1)
    best, where = torch.cat([rows, query], -1).max(-1)
    return best.sum() + (where == t[k]).to(x.dtype).mean() * best.mean()


def masked_tokens(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(m.last(F.gelu(m.first(x)[t != 3])), t[t != 3])


def every_loss(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    h, y = m.first(x)[k], m.last(x.flip(0))[k]
    regressions = F.mse_loss(h, y) + F.l1_loss(h, y, reduction="sum") + F.smooth_l1_loss(h, y) + F.huber_loss(h, y)
    given = F.binary_cross_entropy_with_logits(h, y.sigmoid()) + F.poisson_nll_loss(h, y.exp())
    given = given + F.gaussian_nll_loss(h, y, y.square() + 0.1) + F.cosine_embedding_loss(h, y, torch.ones(1))
    logs = F.log_softmax(h, -1)
    divergence = F.kl_div(logs, F.softmax(y, -1), reduction="batchmean") + F.cross_entropy(h, F.softmax(y, -1))
    picked = F.nll_loss(logs, t[k]) - logs.gather(1, t[k][:, None]).squeeze(1).mean()
    return regressions + given + divergence + picked + F.cross_entropy(h, t[k], reduction="none").mean()


def statistics(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    h = m.first(x)[k]
    spread = h.var() + h.std(0).sum() + h.max() + h.amin(0).sum() + h.norm(dim=-1).mean()
    means = h.mean((0, 1)) + h.sum(-1).mean() + h.mean(0, keepdim=True).sum()
    return spread + means + (h > 0).any(0).sum() * h.sum()


def of_a_frozen_head(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    h = m.first(x)
    with torch.no_grad():
        wanted = m.last(h[k]).abs()
    return F.mse_loss(checkpoint(m.mlp, h[k], use_reentrant=False), wanted)


FORMS: dict[str, Forward] = {
    "sum": lambda m, x, k, t: m.first(x)[k].sum(),
    "sum of rows": lambda m, x, k, t: square(m.first(x)[k].sum(0)),
    "mean": lambda m, x, k, t: m.first(x)[k].mean(),
    "mean of rows": lambda m, x, k, t: square(torch.mean(m.first(x)[k], 0)),
    "of single elements": lambda m, x, k, t: m.first(x).square().mean(-1).masked_select(k).mean(),
    "a mask of samples": lambda m, x, k, t: m.first(x)[k[:, 2]].mean(),
    "cross-entropy": lambda m, x, k, t: F.cross_entropy(m.first(x)[k], t[k], label_smoothing=0.1),
    "cross-entropy, sum": lambda m, x, k, t: F.cross_entropy(
        m.first(x)[k], t[k], ignore_index=2, reduction="sum", weight=torch.arange(1.0, 9.0)
    ),
    "infinite where it is not selected": lambda m, x, k, t: m.first(x).masked_fill(~k[..., None], torch.inf)[k].mean(),
    "written back": written_back,
    "with a residual": with_residual,
    "unpadded": unpadded,
    "selected by index": selected_by_index,
    "of coordinates": of_coordinates,
    "pooled by sample": pooled_by_sample,
    "scattered": scattered,
    "images among tokens": images_among_tokens,
    "heads by task": heads_by_task,
    "only where finite": only_where_finite,
    "by their number": by_their_number,
    "in heads": in_heads,
    "of whole samples": of_whole_samples,
    "written in place": written_in_place,
    "places that moved": places_that_moved,
    "part of them": part_of_them,
    "tokens of their own": tokens_of_their_own,
    "along tokens": along_tokens,
    "joined": joined,
    "masked tokens": masked_tokens,
    "every loss": every_loss,
    "every expert": every_expert,
    "expanded": expanded,
    "of a frozen head": of_a_frozen_head,
}
SOME: dict[str, Forward] = {
    "statistics": statistics,
    "batch norm": lambda m, x, k, t: m.bn(m.first(x)[k]).pow(3).mean() + square(m.last(m.bn(x[k])).sum(0)),
}
"""Forms that eager has of one row or more alone."""
REFUSED: dict[str, tuple[Forward, str]] = {
    "among them": (lambda m, x, k, t: F.softmax(m.first(x)[k], 0).square().sum(), "softmax (aten._softmax"),
    "attention": (lambda m, x, k, t: square(F.softmax(m.first(x)[k] @ m.last(x)[k].T, -1).sum(0)), "matmul"),
    "sort": (lambda m, x, k, t: m.first(x)[k].sort(0)[0].cumsum(0).sum(), "sort"),
    "position": (lambda m, x, k, t: m.first(x)[k].tril().sum(), "tril"),
    "one of them": (lambda m, x, k, t: m.first(x)[k][0].sum(), "select"),
    "rows of no mask": (lambda m, x, k, t: (m.first(x)[k] + x.flatten(0, 1)).sum(), "add"),
    "other mask": (lambda m, x, k, t: F.cross_entropy(m.first(x)[k], t[t > 2]), "one and the same mask"),
    "written elsewhere": (
        lambda m, x, k, t: m.first(x).clone().masked_scatter_(~k[..., None], m.last(x)[k]).sum(),
        "of another mask",
    ),
    "values": (lambda m, x, k, t: m.first(x)[k].sum() * t[k].tolist()[0], "the values"),
}


def changed_between(m: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    h, k = m.first(x).clone(), k.clone()
    rows = h[k]
    k[1] = True
    h[k] = rows
    return h.sum()


REFUSED["mask that changed"] = (changed_between, "another index than the mask")


def net(forward: Forward) -> Net:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return Net(forward, mlp=mlp, norm=nn.LayerNorm(8), bn=nn.BatchNorm1d(8))


def holds(forward: Forward, masks: tuple[Tensor, ...]) -> None:
    model = net(forward)
    program = compiled(model, BATCH, ranks=4)
    for plan in (program.plan, autopar.random_plan(program, 0), autopar.random_plan(program, 3)):
        for mask in masks:
            result = autopar.verify(program.with_plan(plan), model, (X, mask, LABELS), steps=2)
            assert result.ok, sorted(result.errors.items(), key=lambda item: -item[1])[:5]
            assert result.max_error <= TOLERANCE


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FORMS)
def test_a_use_of_selected_rows_equals_eager_whatever_the_mask(name: str) -> None:
    holds(FORMS[name], (MASK, torch.ones_like(MASK), torch.zeros_like(MASK)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_what_eager_has_of_some_rows_alone_is_held_to_some(name: str) -> None:
    holds(SOME[name], (MASK, torch.ones_like(MASK)))
    program = compiled(net(SOME[name]), BATCH, ranks=2)
    with pytest.raises(GuardError):
        autopar.verify(program, net(SOME[name]), (X, torch.zeros_like(MASK), LABELS))


class Blocks(nn.Module):
    """Layers on the rows of a mask alone, then a loss of some of these."""

    def __init__(self, loss: Forward) -> None:
        super().__init__()
        parts = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)]
        self.parts, self.head, self.loss = nn.ModuleList(parts), nn.Linear(8, 8), loss

    def forward(self, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
        for part in self.parts:
            out = x.clone()
            out[k] = x[k] + part(x[k])
            x = out
        return self.loss(self.head, x, k, t)


def of_packed(head: Any, x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    places = k.flatten().nonzero().flatten()
    return F.cross_entropy(head(x.view(-1, 8)[places]), t.view(-1)[places])


LOSSES: dict[str, Forward] = {
    "cross-entropy": lambda head, x, k, t: F.cross_entropy(head(x[k]), t[k]),
    "mean": lambda head, x, k, t: F.mse_loss(head(x[k]), F.one_hot(t, 8).to(x.dtype)[k]),
    "by their number": lambda head, x, k, t: head(x[k]).square().sum() / k.sum(),
    "packed": of_packed,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_means_of_microbatches_are_those_of_the_batch(name: str) -> None:
    torch.manual_seed(0)
    model, batch = Blocks(LOSSES[name]), (torch.randn(8, 6, 8), torch.rand(8, 6) < 0.5, torch.randint(0, 8, (8, 6)))
    cluster, options = autopar.ClusterSpec.local(4), autopar.Options(microbatches=2)
    program = autopar.compile(model, cluster, batch, optimizer=SGD, options=options)
    for seed in range(3):
        plan = autopar.random_plan(program, seed, pp=2)
        assert len(plan.stages) > 1
        assert autopar.verify(program.with_plan(plan), model, batch, steps=2).max_error <= TOLERANCE


def test_a_plain_tensor_is_set_row_after_row() -> None:
    def forward(m: Any, x: Tensor, k: Tensor) -> Tensor:
        h = m.first(x).clone()
        h[k] = m.last(x)[:, 0]
        return square(h)

    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[[0, 0, 1, 3], [1, 4, 2, 5]] = True
    program = assert_equal_to_eager(Net(forward), (X, mask), ranks=4)
    with pytest.raises(GuardError):
        autopar.verify(program, Net(forward), (X, MASK))


@pytest.mark.parametrize("name", REFUSED)
def test_what_else_is_asked_of_them_is_named_with_its_line(name: str) -> None:
    forward, what = REFUSED[name]
    text = refusal(net(forward), BATCH, None)
    assert what in text
    assert "test_selected.py" in text
    assert "torch.where(mask, x, 0)" in text


def test_they_are_no_output() -> None:
    model: Any = Net(lambda m, x, k: (m.first(x)[k], x)).eval()
    with pytest.raises(InputError, match="fixed shape"):
        capture(model, (X, MASK), None)
