"""Functions that torch computes otherwise without gradients are refused by name; with gradients they are captured."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.capture.equal import SGD


class Padded(nn.Module):
    def __init__(self, nested: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=mask))


MASK = torch.arange(6).expand(4, 6) >= torch.tensor([[6], [4], [5], [6]])
BATCH = {"x": torch.randn(4, 6, 8), "mask": MASK}
LOCAL = autopar.ClusterSpec.local(2)


def test_an_encoder_that_may_drop_padded_positions_is_refused_and_computes_them_where_it_may_not() -> None:
    model = Padded(nested=True).eval()
    with torch.no_grad():
        dropped = model.encoder(BATCH["x"], src_key_padding_mask=MASK)
    assert (dropped[MASK] == 0).all()
    with pytest.raises(autopar.CaptureError, match=r"TransformerEncoder .*enable_nested_tensor=False"):
        autopar.compile(model, LOCAL, BATCH)
    plain = Padded(nested=False).eval()
    assert autopar.verify(autopar.compile(plain, LOCAL, BATCH), plain, BATCH).ok


@pytest.mark.parametrize("frozen", [False, True])
def test_in_training_only_a_frozen_encoder_may_drop_them(frozen: bool) -> None:
    model = Padded(nested=True).eval()
    model.encoder.requires_grad_(not frozen)
    batch = BATCH | {"y": torch.randn(4, 6, 2)}

    def train() -> autopar.Program:
        return autopar.compile(model, LOCAL, batch, loss_fn=F.mse_loss, optimizer=SGD)

    if not frozen:
        assert autopar.verify(train(), model, batch).ok
    else:
        with pytest.raises(autopar.CaptureError, match="src_key_padding_mask"):
            train()
