"""Lifts of what tracing leaves behind: views, functional copies, random numbers drawn in place.

A traced `view` may not fit the strides of the real value, so it becomes `reshape`; `copy` is what an assignment to a
slice becomes when it is made functional; every random draw goes through the counter-based numbers of the dialect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autopar.ops import dialect as d
from autopar.ops import wrappers as w
from autopar.ops.lift import lifts

Tensor = torch.Tensor
aten = torch.ops.aten


@lifts(aten.view.default, aten._unsafe_view.default)
def _view(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.reshape(shape)


@lifts(aten.copy.default)
def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return source.to(x.dtype).expand(x.shape)


def _uniform(x: Tensor) -> Tensor:
    return d.random_uniform(list(x.shape), x.dtype, w.next_site())


@lifts(aten.uniform.default)
def _uniform_between(x: Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> Tensor:
    return _uniform(x) * (high - low) + low


@lifts(aten.normal_functional.default)
def _normal(x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return d.random_normal(list(x.shape), x.dtype, w.next_site()) * std + mean


@lifts(aten.exponential.default)
def _exponential(x: Tensor, rate: float = 1.0, **_: Any) -> Tensor:
    """By inversion, away from 0 so that a logarithm of it stays finite."""
    return (-torch.log1p(-_uniform(x))).clamp(min=torch.finfo(x.dtype).tiny) / rate


@lifts(aten.bernoulli.Tensor)
def _bernoulli(x: Tensor, p: Tensor, **_: Any) -> Tensor:
    return (_uniform(p) < p).to(x.dtype).expand(x.shape)


@lifts(aten.randint.default)
def _randint(high: int, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _randint_between(0, high, size, dtype=dtype)


@lifts(aten.randint.low)
def _randint_between(low: int, high: int, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    numbers = d.random_uniform(list(size), torch.float64, w.next_site())
    return (numbers * (high - low)).floor().to(dtype or torch.int64) + low


@lifts(aten.geometric.default)
def _geometric(x: Tensor, p: float, **_: Any) -> Tensor:
    return (torch.log1p(-_uniform(x)) / math.log1p(-p)).floor() + 1


@lifts(aten.alpha_dropout.default)
def _alpha_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return _selu_dropout(x, x.shape, p) if train and p > 0 else x


@lifts(aten.feature_alpha_dropout.default)
def _feature_alpha_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return _selu_dropout(x, [*x.shape[:2], *([1] * (x.ndim - 2))], p) if train and p > 0 else x


def _selu_dropout(x: Tensor, shape: Sequence[int], p: float) -> Tensor:
    """Dropped values become the limit of selu; mean and variance stay."""
    alpha = 1.7580993408473766
    scale = 1 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
    kept = (d.random_uniform(list(shape), x.dtype, w.next_site()) < 1 - p).to(x.dtype)
    return x * kept * scale + ((kept - 1) + p) * (alpha * scale)


@lifts(aten.rrelu.default)
def _rrelu(x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, **_: Any) -> Tensor:
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    slope = _uniform(x) * (upper - lower) + lower
    return torch.where(x < 0, x * slope, x)
