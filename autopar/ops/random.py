"""Randomness: dropout and random tensors, whose numbers follow the global position of an element.

A random op of a template has a *site*, its number among them; in an emitted program the site becomes a key of the step,
the microbatch and the call. Whatever the sharding, an element meets the same number, so every dim may be sharded. All of
ATen's random draws become one of the three ops here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from autopar.ir.call import OpCall
from autopar.ir.rule import Rule
from autopar.ops.dialect import empty_like, graph_op, lifts
from autopar.ops.labels import Maker
from autopar.ops.registry import Block, define, named, resized
from autopar.runtime.kernels import ops as local

Tensor = torch.Tensor
aten = torch.ops.aten
_sites = itertools.count()

define(*named("dropout native_dropout feature_dropout"), precision="follow")
define("aten.bernoulli", precision="keep")


def reset_sites() -> None:
    """Start numbering random sites anew (once per template, so that equal templates trace equal graphs)."""
    global _sites
    _sites = itertools.count()


def next_site() -> int:
    """A number for one random op of the template being traced."""
    return next(_sites)


def _dropped(block: Block) -> dict[str, Any]:
    labels = block.rule.results[0]
    type_ = block.call.results[0]
    assert labels is not None
    assert type_ is not None
    return {"shape": type_.shape, "offsets": block.offsets(labels)}


@graph_op(
    "dropout(Tensor x, float p, int site) -> Tensor",
    local.dropout,
    empty_like,
    localize=_dropped,
    random=True,
    key_argument=2,
)
def dropout(call: OpCall) -> Rule:
    """Random numbers follow the global position, so every dim passes; linear in its input."""
    make = Maker()
    labels = make.dims(call.shapes[0])
    return make.rule([labels], [labels], [{0}])


_RANDOM: dict[str, Any] = {
    **resized("size"),
    "localize": lambda block: {"size": block.result_shape(), **_dropped(block)},
    "random": True,
    "factory": True,
    "key_argument": 2,
}


def _empty(size: Sequence[int], dtype: torch.dtype, site: int) -> Tensor:
    return torch.empty(size, dtype=dtype)


def _every_dim(call: OpCall) -> Rule:
    make, out = Maker(), call.out_shape
    return make.rule([], [make.dims(out)])


@graph_op(
    "random_uniform(SymInt[] size, ScalarType dtype, int site) -> Tensor", local.random_uniform, _empty, **_RANDOM
)
def random_uniform(call: OpCall) -> Rule:
    """Uniform numbers in [0, 1)."""
    return _every_dim(call)


@graph_op("random_normal(SymInt[] size, ScalarType dtype, int site) -> Tensor", local.random_normal, _empty, **_RANDOM)
def random_normal(call: OpCall) -> Rule:
    """Standard normal numbers."""
    return _every_dim(call)


class Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, site: int) -> Tensor:
        ctx.p, ctx.site = p, site
        return dropout(x, p, site)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return dropout(g, ctx.p, ctx.site), None, None


# --- what ATen's dropouts become


@lifts(aten.dropout.default)
def lift_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return Dropout.apply(x, p, next_site()) if train and p > 0 else x


@lifts(aten.native_dropout.default)
def _native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Any, ...]:
    return lift_dropout(x, p, train is not False), None


@lifts(aten.feature_dropout.default)
def _feature_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return x
    return x * lift_dropout(x.new_ones([*x.shape[:2], *([1] * (x.ndim - 2))]), p, True)


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
    kept = (random_uniform(list(shape), x.dtype, next_site()) < 1 - p).to(x.dtype)
    return x * kept * scale + ((kept - 1) + p) * (alpha * scale)


@lifts(aten.rrelu.default)
def _rrelu(x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, **_: Any) -> Tensor:
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    slope = _uniform(x) * (upper - lower) + lower
    return torch.where(x <= 0, x * slope, x)


# --- what ATen's draws become


def _random(op: Any, size: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    if not dtype.is_complex:
        return op(list(size), dtype, next_site())
    parts = [op(list(size), dtype.to_real(), next_site()) for _ in range(2)]
    return torch.complex(*parts) * (math.sqrt(0.5) if op is random_normal else 1.0)


@lifts(aten.rand.default)
def _rand(size: list[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _random(random_uniform, size, dtype)


@lifts(aten.randn.default)
def _randn(size: list[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _random(random_normal, size, dtype)


@lifts(aten.rand_like.default)
def _rand_like(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _random(random_uniform, x.shape, dtype or x.dtype)


@lifts(aten.randn_like.default)
def _randn_like(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _random(random_normal, x.shape, dtype or x.dtype)


@lifts(aten.bernoulli.default)
def _bernoulli(x: Tensor, **_: Any) -> Tensor:
    return (_random(random_uniform, x.shape, x.dtype) < x).to(x.dtype)


@lifts(aten.bernoulli.p)
def _bernoulli_p(x: Tensor, p: float, **_: Any) -> Tensor:
    return (_random(random_uniform, x.shape, torch.float32) < p).to(x.dtype)


@lifts(aten.bernoulli.Tensor)
def _bernoulli_of(x: Tensor, p: Tensor, **_: Any) -> Tensor:
    return (_uniform(p) < p).to(x.dtype).expand(x.shape)


def _uniform(x: Tensor) -> Tensor:
    return random_uniform(list(x.shape), x.dtype, next_site())


@lifts(aten.uniform.default)
def _uniform_between(x: Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> Tensor:
    return _uniform(x) * (high - low) + low


@lifts(aten.normal_functional.default)
def _normal(x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return random_normal(list(x.shape), x.dtype, next_site()) * std + mean


@lifts(aten.exponential.default)
def _exponential(x: Tensor, rate: float = 1.0, **_: Any) -> Tensor:
    """Exponential numbers by inversion, away from 0 so that a logarithm of one stays finite."""
    return (-torch.log1p(-_uniform(x))).clamp(min=torch.finfo(x.dtype).tiny) / rate


@lifts(aten.randint.default)
def _randint(high: int, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _randint_between(0, high, size, dtype=dtype)


@lifts(aten.randint.low)
def _randint_between(low: int, high: int, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    numbers = random_uniform(list(size), torch.float64, next_site())
    return (numbers * (high - low)).floor().to(dtype or torch.int64) + low


@lifts(aten.geometric.default)
def _geometric(x: Tensor, p: float, **_: Any) -> Tensor:
    return (torch.log1p(-_uniform(x)) / math.log1p(-p)).floor() + 1
