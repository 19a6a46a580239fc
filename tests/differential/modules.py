"""Things that the layers of the differential suite may want beside their input: modules, parameters and buffers, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.differential.cases import BATCH, draw

Layer = Callable[[Any, Tensor], Tensor]
W = 12


def _modules() -> dict[str, Any]:
    """Whatever a layer may want. (Unused ones are parameters without a gradient.)"""
    return {
        "weight": nn.Parameter(draw(1, W, W) / 4),
        "bias": nn.Parameter(draw(2, W) / 4),
        "small": nn.Parameter(draw(3, 6, 6) / 4),
        "small_in": nn.Parameter(draw(4, W, 2)),
        "small_out": nn.Parameter(draw(5, 2, W)),
        "experts": nn.Parameter(draw(6, 2, W, 3)),
        "bilinear": nn.Bilinear(6, 6, 3),
        "tied": nn.Linear(W, W),
        "layer": nn.LayerNorm(W),
        "rms": nn.RMSNorm(W),
        "group": nn.GroupNorm(3, 3),
        "mean": draw(7, W),
        "var": draw(8, W).abs() + 0.5,
        "attention_bias": nn.Parameter(draw(9, 1, 2, 3, 3)),
        "multihead": nn.MultiheadAttention(6, 2, batch_first=True),
        "encoder": nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
        "conv1": nn.Conv1d(2, 3, 3),
        "conv2": nn.Conv2d(3, 4, 3, padding=1),
        "strided": nn.Conv2d(3, 4, 3, 2, 1),
        "grouped": nn.Conv2d(3, 6, 3, groups=3),
        "dilated": nn.Conv2d(3, 2, 2, dilation=2),
        "transposed": nn.ConvTranspose2d(3, 2, 2, 2),
        "conv3": nn.Conv3d(1, 2, 2),
        "table": nn.Embedding(9, 6),
        "padded": nn.Embedding(9, 6, padding_idx=0),
        "bag": nn.EmbeddingBag(9, 6),
        "positions": nn.Embedding(6, 2),
        "learned": nn.Parameter(draw(10, 2, 6)),
        "token": nn.Parameter(draw(11, 1, 1, 6)),
        "spectrum": nn.Parameter(draw(12, 7)),
        "filters": nn.Parameter(draw(15, 2, 4, 2)),
        "rotation": torch.polar(torch.ones(3, dtype=torch.float64), draw(13, 3)),
        "lstm": nn.LSTM(2, 3, batch_first=True),
        "gru": nn.GRU(2, 3, batch_first=True),
        "rnn": nn.RNN(2, 3, batch_first=True),
        "both": nn.LSTM(2, 3, bidirectional=True, batch_first=True),
        "major": nn.GRU(2, 3),
        "projected": nn.LSTM(2, 4, proj_size=3, batch_first=True),
        "cell": nn.LSTMCell(W, 3),
        "gru_cell": nn.GRUCell(W, 3),
        "step": nn.Linear(W, W),
        "batch": nn.BatchNorm1d(W),
        "batch2": nn.BatchNorm2d(3),
        "per_sample": nn.Parameter(draw(14, BATCH, 1)),
        "decay": torch.ones(W, dtype=torch.float64),
        "average": torch.zeros(W, dtype=torch.float64),
        "count": torch.zeros((), dtype=torch.float64),
        "spectral": nn.utils.parametrizations.spectral_norm(nn.Linear(W, W)),
        "weight_normed": nn.utils.parametrizations.weight_norm(nn.Linear(W, W)),
    }


def used(f: Layer) -> dict[str, Any]:
    """The modules that a layer names."""
    names = set(f.__code__.co_names)
    for constant in (*f.__code__.co_consts, *f.__globals__.values()):
        code = getattr(constant, "__code__", None)
        if code is not None and getattr(constant, "__name__", "") in names:
            names |= set(code.co_names)
    return {name: module for name, module in _modules().items() if name in names}
