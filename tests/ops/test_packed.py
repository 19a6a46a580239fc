"""Packed documents: masks that a model makes of document numbers or lengths, with keys whole and with keys sent round."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.measure import measure_peak
from tests.ops.rings import Layer, with_attention

DOCUMENTS = 6
FORMS = ("s", "+s+t")
"""Query rows in blocks with keys whole, and with keys that go round."""
CAUSAL = ("tril", "positions", "")
GIVEN = ("documents", "lengths")


class Packed(nn.Module):
    """Attention of every token to the tokens of its document, and of these to those before it, if causal."""

    def __init__(self, given: str, causal: str, additive: bool = False) -> None:
        super().__init__()
        self.given, self.causal, self.additive = given, causal, additive
        self.layers = nn.ModuleList(Layer(16, 4, 2) for _ in range(2))

    def forward(self, x: Tensor, packed: Tensor) -> Tensor:
        """packed: the document of each token, (batch, length), or the documents' lengths, (batch, documents)."""
        place = torch.arange(x.shape[1])
        if self.given == "lengths":
            packed = (place[:, None] >= packed.cumsum(-1)[:, None, :]).sum(-1)
        seen = packed[:, :, None] == packed[:, None, :]
        if self.causal == "tril":
            seen = seen & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        elif self.causal == "positions":
            seen = seen & (place[:, None] >= place[None, :])
        mask = seen[:, None]
        if self.additive:
            mask = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, -1e9)
        for layer in self.layers:
            x = x + layer(x, mask)
        return x.square().mean()


def batch(given: str, samples: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Documents of any length, whose borders are not those of blocks."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, length, 16, generator=generator)
    documents = torch.randint(0, DOCUMENTS, (samples, length), generator=generator).sort(-1).values
    if given == "documents":
        return x, documents
    return x, torch.stack([torch.bincount(row, minlength=DOCUMENTS) for row in documents])


@functools.lru_cache(maxsize=2)
def compiled(
    given: str, causal: str, additive: bool = False, samples: int = 2, length: int = 32
) -> tuple[autopar.Program, Packed]:
    torch.manual_seed(0)
    model = Packed(given, causal, additive)
    options = autopar.Options(mesh={"cp": 4}, pp=1, microbatches=1)
    batch_ = batch(given, samples, length)
    return autopar.compile(model, autopar.ClusterSpec.local(4), batch_, options=options), model


@pytest.mark.few(1)
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("given", GIVEN)
def test_packed_documents_are_eagers_with_keys_whole_and_in_a_ring(given: str, causal: str, additive: bool) -> None:
    program, model = compiled(given, causal, additive)
    for choice in FORMS:
        form = with_attention(program, cp=choice)
        assert ("along=rt.along('cp')" in form.source(0)) is (choice == "+s+t")
        for seed in (0, 1):
            assert autopar.verify(form, model, batch(given, 2, 32, seed)).max_error <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("given", GIVEN)
def test_random_plans_of_packed_documents_are_eagers(given: str) -> None:
    program, model = compiled(given, "tril")
    for seed in range(6):
        other = program.with_plan(autopar.random_plan(program, seed))
        assert autopar.verify(other, model, batch(given, 2, 32, seed)).max_error <= 1e-9, seed


@pytest.mark.slow
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("given", GIVEN)
def test_a_mask_is_never_whole_where_its_rows_are_in_blocks(given: str, causal: str) -> None:
    """The part of the mask that a rank holds at once in the ring is less than one mask of all rows."""
    length = 1024
    program, _ = compiled(given, causal, samples=1, length=length)
    for choice in FORMS:
        form = with_attention(program, cp=choice)
        types = [line.partition("  # ")[2] for line in form.source(0).splitlines()]
        assert not [one for one in types if f"{length}, {length}]" in one]
        measured = max(measure_peak(form, batch(given, 1, length), steps=1))
        assert 0.98 * measured <= form.account.peaks[0] <= 1.05 * measured
        if choice == "+s+t":
            assert measured < length * length
