"""Whatever the default device is around `compile`, the program is the same."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
BATCH = (torch.randint(0, 16, (4, 6)), torch.randint(0, 16, (4, 6)))


class Masked(nn.Module):
    """Makes positions and a causal mask in forward, on no device that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(16, 8), nn.Embedding(16, 8)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1])
        x = self.norm(self.tokens(ids) + self.places(positions)).unsqueeze(1)
        causal = positions[None, :] <= positions[:, None]
        return self.out(F.scaled_dot_product_attention(x, x, x, attn_mask=causal).squeeze(1))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * torch.ones(())


@contextmanager
def around(device: str) -> Iterator[None]:
    with torch.device(device):
        yield


@contextmanager
def once_for_all(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def compiled(model: nn.Module, batch: tuple[Tensor, ...]) -> autopar.Program:
    return autopar.compile(
        model, autopar.ClusterSpec.local(2), batch, loss_fn=loss_fn, optimizer=ADAMW, loss_scaling=True
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("meta_by_default", [around, once_for_all])
def test_a_default_device_changes_nothing_of_a_program_and_its_proofs(meta_by_default) -> None:  # type: ignore[no-untyped-def]
    model = Masked()
    expected = compiled(model, BATCH)
    losses = list(expected.run([BATCH], steps=2))
    with meta_by_default("meta"):
        program = compiled(model, BATCH)
        assert program.sources == expected.sources
        assert program.plan == expected.plan
        assert list(program.run([BATCH], steps=2)) == losses
        for plan in (program.plan, autopar.random_plan(program, 0)):
            assert autopar.verify(program.with_plan(plan), model, BATCH).max_error < 1e-9
        assert autopar.check(program).ok
        assert torch.get_default_device().type == "meta"


def test_a_model_without_memory_is_compiled_where_it_is_made() -> None:
    expected = compiled(Masked(), BATCH)
    with torch.device("meta"):
        program = compiled(Masked(), tuple(torch.empty_like(t, device="meta") for t in BATCH))
    assert program.sources == expected.sources
