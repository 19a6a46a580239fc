"""Mixtures that dispatch by one-hot masks and capacities: they have a graph as they are, and are no loops."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.capture.known import expert_forms as forms
from tests.capture.known.expert_forms import EXPERTS, D


class DenseDispatch(forms.Mixture):
    """Two experts a token, each with room for so many rows: a mask (tokens, experts, places) sends rows and sums results."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, D)
        capacity = len(flat) // EXPERTS
        gates = F.softmax(self.gate(flat), dim=1)
        first = F.one_hot(gates.argmax(1), EXPERTS)
        second = F.one_hot(gates.masked_fill(first.bool(), float("-inf")).argmax(1), EXPERTS)
        places = [torch.cumsum(first, 0) - 1, torch.cumsum(second, 0) - 1 + first.sum(0, keepdim=True)]
        balance = EXPERTS * (gates.mean(0) * first.to(gates.dtype).mean(0)).sum()
        kept = [mask * (place < capacity) for mask, place in zip((first, second), places, strict=True)]
        shares = [(gates * mask).sum(1) for mask in kept]
        total = (shares[0] + shares[1]).clamp(min=torch.finfo(gates.dtype).eps)
        combine = torch.zeros(len(flat), EXPERTS, capacity, dtype=x.dtype)
        for mask, place, share in zip(kept, places, shares, strict=True):
            hot = F.one_hot((place * mask).sum(1), capacity).to(x.dtype)
            combine = combine + torch.einsum("s,se,sc->sec", share / total, mask.to(x.dtype), hot)
        rows = torch.einsum("sec,sm->ecm", combine.bool().to(x.dtype), flat)
        y = torch.stack([expert(piece) for expert, piece in zip(self.experts, rows.unbind(0), strict=True)])
        return torch.einsum("sec,ecm->sm", combine, y).view_as(x), balance


class Model(nn.Module):
    """One such mixture around a residual, with its loss beside."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture, self.head = DenseDispatch(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y, balance = self.mixture(x)
        return self.head(x + y) + 0.01 * balance


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["dp", "ep"])
def test_dense_dispatch_trains_as_eager(axis: str) -> None:
    """Some rows have no place, so the capacity is seen."""
    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(8, 4, D, dtype=torch.float64)
    flat = x.reshape(-1, D)
    often = torch.bincount(model.mixture.gate(flat).argmax(1), minlength=EXPERTS)
    assert int(often.max()) > len(flat) // EXPERTS
    options = autopar.Options(mesh={axis: 2}, microbatches=1)
    adamw, batch = functools.partial(torch.optim.AdamW, lr=0.05), (x, torch.zeros_like(x))
    cluster = autopar.ClusterSpec.local(2)
    program = autopar.compile(model, cluster, batch, loss_fn=F.mse_loss, optimizer=adamw, options=options)
    assert not program.captured.exported.known_blocks
    assert autopar.verify(program, model, batch, steps=2).ok
