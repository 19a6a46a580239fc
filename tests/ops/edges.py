"""Where gradients go wrong: functions at their kinks, poles, ties and empty dims, as `EDGES[name] = (function, tensors)`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Edge = tuple[Callable[..., Any], tuple[Tensor, ...]]
EDGES: dict[str, Edge] = {}
INF, NAN = math.inf, math.nan
REDUCTIONS = ("none", "mean")
_generator = torch.Generator().manual_seed(0)


def edge(name: str, function: Callable[..., Any], *tensors: Tensor) -> None:
    assert name not in EDGES
    EDGES[name] = function, tensors


def t(*values: float, grad: bool = True) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).requires_grad_(grad)


def f(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_generator).requires_grad_()


def c(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.complex128, generator=_generator).requires_grad_()


def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(shape, dtype=dtype).requires_grad_()


# --- pointwise --------------------------------------------------------------------------------------------------------

REALS = t(0.0, -0.0, 1, -1, INF, -INF, NAN, 1e-320, 1e300, -1e300, 0.5, -0.5, 6.0, -6, 3, -3)
_ACTIVATIONS = (
    "relu gelu silu logsigmoid softplus elu selu celu leaky_relu relu6 hardtanh hardswish hardsigmoid hardshrink softshrink "
    "tanhshrink softsign mish"
)
_UNARY = (
    "abs sqrt rsqrt log log1p log2 exp expm1 atan asin acos sgn square reciprocal erf erfinv frac sinc logit digamma asinh "
    "acosh atanh nan_to_num sigmoid tanh"
)
for _name in _ACTIVATIONS.split():
    edge(_name, getattr(F, _name), REALS)
for _name in _UNARY.split():
    edge(_name, getattr(torch, _name), REALS)
for _exponent in (0, 0.0, 1, 2, 0.5, -1, 3):
    edge(f"x ** {_exponent!r}", lambda x, e=_exponent: x**e, REALS)
for _low, _high in ((None, 1.0), (-1.0, 1.0), (0.0, None), (-1, 0)):
    edge(f"clamp to {_low}, {_high}", lambda x, a=_low, b=_high: x.clamp(a, b), REALS)
for _name in ["maximum", "minimum", "fmax", "fmin"]:
    edge(_name, getattr(torch, _name), t(0.0, 1, 1, NAN, 2, INF), t(0.0, 1, 2, 1, NAN, INF))
edge("x ** y", torch.pow, t(0.0, 0, 1, 2, -1, -2, 0), t(0.0, 1, 0, 0, 2, 3, -1))
edge("0 ** y", lambda y: 0.0**y, REALS)
edge("atan2", torch.atan2, t(0.0, 0, 1, -1, 0, INF), t(0.0, 1, 0, 0, -1, INF))
edge("hypot", torch.hypot, t(0.0, 0, 1), t(0.0, 1, 0))
edge("xlogy", torch.xlogy, t(0.0, 0, 1, 0), t(0.0, 1, 0, NAN))
edge("where, the other branch is NaN", lambda x: torch.where(x > 0, x.log(), torch.zeros_like(x)), t(-1.0, 0, 1))
edge("rrelu in inference", lambda x: F.rrelu(x, 0.1, 0.3), t(0.0, 1, -1))


# --- along dims: ties, NaN, infinities, constants, empty --------------------------------------------------------------

TIES = torch.tensor([[1.0, 1, 0, 1], [0, 0, 0, 0], [3, 1, 2, 3]], dtype=torch.float64).requires_grad_()
BAD = torch.tensor([[1.0, 1, 0, 1], [NAN, 1, 2, 3], [INF, INF, -INF, 0]], dtype=torch.float64).requires_grad_()
_ONE = "amax amin logsumexp cumsum logcumsumexp nansum prod softmax log_softmax mean var std"
for _label, _x in (("ties", TIES), ("NaN and infinity", BAD)):
    for _name in _ONE.split():
        edge(f"{_name} of {_label}", lambda x, n=_name: getattr(torch, n)(x, -1), _x)
    for _name in ["max", "min", "median", "sort", "mode", "cummax"]:
        edge(f"{_name} of {_label}", lambda x, n=_name: tuple(getattr(torch, n)(x, dim=0)), _x)
    for _p in (0, 1, 2, 3, 0.5, INF, -INF):
        edge(f"{_p}-norm of {_label}", lambda x, p=_p: torch.linalg.vector_norm(x, p, 1), _x)
    for _name in ["max", "min", "amax", "sum", "mean", "var", "std", "median", "norm"]:
        edge(f"{_name} of all, {_label}", getattr(torch, _name), _x)
    edge(f"normalize {_label}", lambda x: F.normalize(x, dim=0), _x)
for _correction in (0, 1):
    edge(f"var of one, correction {_correction}", lambda x, k=_correction: x.var(1, correction=k), f(3, 1))
    edge(f"std of one, correction {_correction}", lambda x, k=_correction: x.std(1, correction=k), f(3, 1))
    edge(f"std of a constant, correction {_correction}", lambda x, k=_correction: x.std(0, correction=k), zeros(4, 4))
edge("variance and mean", lambda x: torch.var_mean(x, 0), f(4, 4))
edge("mean of nothing", lambda x: x.mean(), f(0, 4))
edge("means of nothing", lambda x: x.mean(0), f(0, 4))
edge("variances of nothing", lambda x: x.var(0), f(0, 4))
edge(
    "softmax of a row of -inf", lambda x: x.softmax(-1), torch.full((2, 4), -INF, dtype=torch.float64).requires_grad_()
)


# --- losses -----------------------------------------------------------------------------------------------------------

_ROWS = torch.randn(4, 6, dtype=torch.float64, generator=_generator)
_MASKED = _ROWS.clone().index_put((torch.tensor([0, 1]), torch.tensor([3, 0])), torch.tensor(-INF, dtype=torch.float64))
_BROKEN = torch.cat([torch.full((1, 6), -INF, dtype=torch.float64), _ROWS[1:]])
_WEIGHT = torch.rand(6, dtype=torch.float64, generator=_generator)
_LABELS = {"some ignored": [0, -100, 2, 1], "all ignored": [-100] * 4, "none ignored": [0, 1, 2, 5]}
for _r in REDUCTIONS:
    _pointwise = {
        "mse": F.mse_loss,
        "l1": F.l1_loss,
        "smooth l1": F.smooth_l1_loss,
        "smooth l1 without beta": lambda x, y, reduction: F.smooth_l1_loss(x, y, reduction=reduction, beta=0.0),
        "huber": F.huber_loss,
    }
    for _name, _loss in _pointwise.items():
        _far = t(0.0, 1, -1, 2, INF, -INF, NAN, 1e200)
        edge(f"{_name}, {_r}", lambda x, y, g=_loss, r=_r: g(x, y, reduction=r), _far, zeros(8))
    _probabilities, _hard = t(0.0, 1.0, 0.5, 1e-300, 1 - 1e-16, 0.0, 1.0), t(0.0, 1, 0, 0, 1, 1, 0, grad=False)
    edge(f"bce, {_r}", lambda x, y, r=_r: F.binary_cross_entropy(x, y, reduction=r), _probabilities, _hard)
    _bce = lambda x, y, r=_r: F.binary_cross_entropy_with_logits(x, y, reduction=r)  # noqa: E731
    edge(f"bce with logits, {_r}", _bce, t(0.0, -0.0, 100, -100, 800, -800), t(0, 1, 0.5, 1, 0, 1))
    edge(f"bce with infinite logits, {_r}", _bce, t(INF, -INF, 0), t(1, 0, 1, grad=False))
    edge(
        f"bce with weights, {_r}",
        lambda x, y, w, r=_r: F.binary_cross_entropy_with_logits(x, y, pos_weight=w, weight=w, reduction=r),
        f(3, 4),
        f(3, 4).sigmoid().detach(),
        _WEIGHT[:4],
    )
    edge(f"kl, {_r}", lambda x, y, r=_r: F.kl_div(x, y, reduction=r), t(-1, -2, 0, -INF, -3), t(0, 0.5, 1, 0, 0.2))
    edge(
        f"kl of logs, {_r}",
        lambda x, y, r=_r: F.kl_div(x, y, reduction=r, log_target=True),
        t(-1, -2, 0, -3),
        t(-INF, -0.5, 0, -2),
    )
    edge(f"poisson, {_r}", lambda x, y, r=_r: F.poisson_nll_loss(x, y, full=True, reduction=r), t(-1, 2, 0), t(0, 1, 2))
    edge(
        f"cosine embedding of zero, {_r}",
        lambda x, z, y, r=_r: F.cosine_embedding_loss(x, z, y, reduction=r),
        zeros(3, 4),
        f(3, 4),
        t(1, -1, 1, grad=False),
    )
    edge(f"triplet of equals, {_r}", lambda x, y, r=_r: F.triplet_margin_loss(x, x, y, reduction=r), f(3, 4), f(3, 4))
    edge(
        f"soft margin, {_r}",
        lambda x, y, r=_r: F.soft_margin_loss(x, y, reduction=r),
        t(0, 100, -800),
        t(1, -1, 1, grad=False),
    )
    edge(
        f"hinge embedding at its margin, {_r}",
        lambda x, y, r=_r: F.hinge_embedding_loss(x, y, reduction=r),
        t(0, 1, -1, 2),
        t(1, -1, -1, 1, grad=False),
    )
    edge(
        f"margin ranking of equals, {_r}",
        lambda x, z, y, r=_r: F.margin_ranking_loss(x, z, y, reduction=r),
        t(0, 1, 2),
        t(0, 1, 1),
        t(1, -1, 1, grad=False),
    )
    edge(
        f"multi margin, {_r}",
        lambda x, y, r=_r: F.multi_margin_loss(x, y, reduction=r),
        f(4, 4),
        torch.tensor([0, 1, 2, 3]),
    )
    edge(
        f"multilabel margin, {_r}",
        lambda x, y, r=_r: F.multilabel_margin_loss(x, y, reduction=r),
        f(4, 4),
        torch.tensor([[0, 1, -1, 2], [-1, 1, 2, 3], [3, 2, 1, 0], [1, -1, 0, 0]]),
    )
    for _name, _labels in _LABELS.items():
        for _smoothing in (0.0, 0.1):
            for _kind, _x in (("", _ROWS), (" with masked classes", _MASKED), (" with a masked row", _BROKEN)):
                edge(
                    f"cross-entropy{_kind}, {_name}, smoothed by {_smoothing}, {_r}",
                    lambda x, y, r=_r, s=_smoothing: F.cross_entropy(x, y, reduction=r, label_smoothing=s),
                    _x.clone().requires_grad_(),
                    torch.tensor(_labels),
                )
        _weighted = lambda x, y, w, r=_r: F.cross_entropy(x, y, w, reduction=r, label_smoothing=0.1)  # noqa: E731
        edge(f"weighted cross-entropy, {_name}, {_r}", _weighted, f(4, 6), torch.tensor(_labels), _WEIGHT)
        _nll = lambda x, y, w, r=_r: F.nll_loss(x, y, w, reduction=r)  # noqa: E731
        edge(f"nll, {_name}, {_r}", _nll, _MASKED.clone().requires_grad_(), torch.tensor(_labels), _WEIGHT)
    edge(
        f"cross-entropy with probabilities, {_r}",
        lambda x, y, r=_r: F.cross_entropy(x, y, reduction=r, label_smoothing=0.1),
        f(4, 6),
        f(4, 6).softmax(1).detach(),
    )
    edge(f"cross-entropy of nothing, {_r}", lambda x, y, r=_r: F.cross_entropy(x, y, reduction=r), f(0, 6), t().long())
    edge(f"mse of nothing, {_r}", lambda x, y, r=_r: F.mse_loss(x, y, reduction=r), f(0, 4), f(0, 4))


# --- attention, distances, products, joins ------------------------------------------------------------------------------

_SEEN = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]) > 0
_BIAS = torch.zeros(4, 4, dtype=torch.float64).masked_fill(~_SEEN, -INF)
_QKV = [f(2, 2, 4, 4) for _ in range(3)]
_attend = F.scaled_dot_product_attention
for _name, _mask in {"a mask": _SEEN, "a float mask": _BIAS, "a learned mask": _BIAS.clone().requires_grad_()}.items():
    edge(f"attention with {_name} that hides a row", lambda q, k, v, m: _attend(q, k, v, m), *_QKV, _mask)
edge("attention with fewer queries", lambda *qkv: _attend(*qkv, is_causal=True), f(2, 2, 3, 4), *_QKV[1:])
edge("attention with more queries", lambda *qkv: _attend(*qkv, is_causal=True), f(2, 2, 6, 4), *_QKV[1:])
edge(
    "attention with a mask per batch of two dims",
    lambda q, k, v, m: _attend(q, k, v, m),
    *(f(2, 2, 2, 4, 4) for _ in range(3)),
    torch.randn(2, 2, 1, 4, 4, generator=_generator) < 1,
)
edge("distances of equals", lambda x: torch.cdist(x, x), f(4, 4))
edge("cosine of zero", F.cosine_similarity, zeros(4, 4), f(4, 4))
edge(
    "addmm that leaves NaN out",
    lambda c, a, b: torch.addmm(c, a, b, beta=0),
    torch.full((4, 4), NAN, dtype=torch.float64),
    f(4, 4),
    f(4, 4),
)
for _dim in (1, -1):
    _join = lambda e, x, y, d=_dim: torch.cat([e, x, y], d)  # noqa: E731
    edge(f"cat of an empty tensor of one dim and more, dim {_dim}", _join, torch.zeros(0).double(), f(4, 4), f(4, 8))
for _mode in ("constant", "reflect", "replicate", "circular"):
    edge(f"pad that keeps the size, {_mode}", lambda x, m=_mode: F.pad(x, (-1, 1), m), f(4, 4, 4))
    edge(f"pad on both sides, {_mode}", lambda x, m=_mode: F.pad(x, (2, 1), m), f(4, 4, 4))
edge("pad of two dims that keep their sizes", lambda x: F.pad(x, (1, -1, -2, 2)), f(4, 4))


# --- complex numbers -------------------------------------------------------------------------------------------------------

_COMPLEX: dict[str, Edge] = {
    "mm": (torch.matmul, (c(4, 4), c(4, 4))),
    "bmm": (torch.bmm, (c(2, 4, 4), c(2, 4, 4))),
    "mv": (torch.mv, (c(4, 4), c(4))),
    "dot": (torch.dot, (c(4), c(4))),
    "vdot": (torch.vdot, (c(4), c(4))),
    "outer": (torch.outer, (c(4), c(4))),
    "linear": (F.linear, (c(2, 4), c(4, 4), c(4))),
    "addmm": (torch.addmm, (c(4, 4), c(4, 4), c(4, 4))),
    "baddbmm": (torch.baddbmm, (c(2, 4, 4), c(2, 4, 4), c(2, 4, 4))),
    "einsum": (lambda x, y: torch.einsum("bix,iox->box", x, y), (c(4, 4, 4), c(4, 4, 4))),
    "einsum of three": (lambda x, y, z: torch.einsum("ij,jk,kl->il", x, y, z), (c(4, 4), c(4, 4), c(4, 4))),
    "adjoints": (lambda x, y: x.conj() @ y.mH, (c(4, 4), c(4, 4))),
    "conv": (F.conv1d, (c(2, 4, 6), c(4, 4, 3), c(4))),
    "conv transposed": (F.conv_transpose1d, (c(2, 4, 6), c(4, 4, 3))),
    "1-norm": (lambda x: torch.linalg.vector_norm(x, 1, 1), (c(4, 4),)),
    "2-norm": (lambda x: torch.linalg.vector_norm(x, 2, 1), (c(4, 4),)),
    "2-norm of zero": (lambda x: x.norm(dim=1), (zeros(4, 4, dtype=torch.complex128),)),
    "max-norm": (lambda x: torch.linalg.vector_norm(x, INF, 1), (c(4, 4),)),
    "var": (lambda x: x.var(0), (c(4, 4),)),
    "std": (lambda x: x.std(0), (c(4, 4),)),
    "mean": (lambda x: x.mean(0), (c(4, 4),)),
    "l1": (F.l1_loss, (c(4, 4), c(4, 4))),
    "abs of zero": (torch.abs, (zeros(4, dtype=torch.complex128),)),
    "rfft": (torch.fft.rfft, (f(4, 6),)),
    "rfft cut": (lambda x: torch.fft.rfft(x, n=4), (f(4, 6),)),
    "rfft padded": (lambda x: torch.fft.rfft(x, n=8), (f(4, 6),)),
    "irfft": (lambda x: torch.fft.irfft(x, n=6), (c(4, 4),)),
    "irfft to an odd size": (lambda x: torch.fft.irfft(x, n=7), (c(4, 4),)),
    "rfft2": (torch.fft.rfft2, (f(2, 4, 6),)),
    "irfft2": (lambda x: torch.fft.irfft2(x, s=(4, 6)), (c(2, 4, 4),)),
    "ifft2": (lambda x: torch.fft.ifft2(x, norm="ortho"), (c(4, 4),)),
    "hfft": (torch.fft.hfft, (c(4, 4),)),
    "real and imag of conj": (lambda x: x.conj().imag * x.H.real, (c(4, 4),)),
    "angle": (torch.angle, (c(4),)),
    "polar": (torch.polar, (t(1, 2, 0.5, 3), f(4))),
    "complex": (torch.complex, (f(4), f(4))),
    "pairs": (lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(4, 2, 2)).square()), (f(4, 4),)),
    "times real": (lambda x, y: (x * y).real, (c(4, 4), f(4, 4))),
    "prod": (lambda x: x.prod(0), (c(4, 4),)),
    "solve": (torch.linalg.solve, (c(4, 4), c(4, 4))),
    "spectral convolution": (
        lambda x, w: torch.fft.irfft(torch.einsum("bim,iom->bom", torch.fft.rfft(x), w), n=6),
        (f(2, 4, 6), c(4, 4, 4)),
    ),
}
for _name, (_function, _tensors) in _COMPLEX.items():
    edge(f"complex {_name}", _function, *_tensors)
