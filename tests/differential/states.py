"""Layers that change buffers, which the next step reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.differential.modules import Layer


def _decaying(m: Any, x: Tensor) -> Tensor:
    m.decay.mul_(0.9)
    return x * m.decay


def _averaged(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x


def _counting(m: Any, x: Tensor) -> Tensor:
    m.count.add_(1)
    return x * m.count


def _both(m: Any, x: Tensor) -> Tensor:
    before = m.decay.clone()
    m.decay.add_(1.0)
    return x * before + m.decay


STATES: dict[str, Layer] = {
    "spectral norm": lambda m, x: m.spectral(x),
    "weight norm": lambda m, x: m.weight_normed(x),
    "decaying buffer": lambda m, x: _decaying(m, x),
    "averaged buffer": lambda m, x: _averaged(m, x),
    "counting buffer": lambda m, x: _counting(m, x),
    "buffer read before and after": lambda m, x: _both(m, x),
}
