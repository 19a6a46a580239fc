"""From ATen's training ops to the dialect: what an exported op becomes while its template is traced.

`LIFT` maps an ATen overload to a function that computes the same with dialect wrappers and plain ops; ops that are not
in the table run as they are. Means become sum · 1/n (a sharded sum is a partial sum; a sharded mean is nothing), so a
batch of several ranks has the statistics of the whole batch everywhere, also in batch norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.errors import CaptureError
from autopar.ops import dialect as d
from autopar.ops import wrappers as w

Tensor = torch.Tensor
aten = torch.ops.aten
LIFT: dict[Any, Callable[..., Any]] = {}


def lifts(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as what `targets` become."""

    def add(f: Callable[..., Any]) -> Callable[..., Any]:
        LIFT.update(dict.fromkeys(targets, f))
        return f

    return add


# --- contractions -----------------------------------------------------------------------------------------------------


@lifts(aten.linear.default)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = w.Linear.apply(x, weight) if x.ndim > 1 else w.Linear.apply(x.unsqueeze(0), weight).squeeze(0)
    return y if bias is None else y + bias


def contract(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """A two-operand einsum as one node when its gradients are einsums too, else torch's own decomposition."""
    left, out = equation.split("->")
    la, lb = left.split(",")
    clean = len(set(la)) == len(la) and len(set(lb)) == len(lb) and len(set(out)) == len(out)
    sizes: dict[str, int] = {}
    for term, t in ((la, a), (lb, b)):
        for c, n in zip(term, t.shape, strict=True):
            clean &= sizes.setdefault(c, n) == n
    clean &= set(la) <= set(out) | set(lb) and set(lb) <= set(out) | set(la)
    return w.Einsum.apply(equation, a, b) if clean else torch.einsum(equation, a, b)


@lifts(aten.matmul.default)
def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.ndim == 1 or b.ndim == 1:
        x, y = (a.unsqueeze(0) if a.ndim == 1 else a), (b.unsqueeze(1) if b.ndim == 1 else b)
        z = _matmul(x, y)
        z = z.squeeze(-2) if a.ndim == 1 else z
        return z.squeeze(-1) if b.ndim == 1 else z
    letters = "abcdefghijlmnopqrstuvw"
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    names = letters[: len(batch)]
    a, a_names = _batch_term(a, batch, names)
    b, b_names = _batch_term(b, batch, names)
    return contract(f"{a_names}xk,{b_names}ky->{names}xy", a, b)


def _batch_term(x: Tensor, batch: torch.Size, names: str) -> tuple[Tensor, str]:
    """Drop leading dims of size one that broadcast; expand inner ones."""
    own = list(x.shape[:-2])
    while own and own[0] == 1 and (len(own) <= len(batch)) and batch[len(batch) - len(own)] != 1:
        x, own = x.squeeze(0), own[1:]
    skip = len(batch) - len(own)
    if own != list(batch[skip:]):
        x = x.expand(*batch[skip:], *x.shape[-2:])
    return x, names[skip:]


@lifts(aten.bmm.default)
def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return contract("bxk,bky->bxy", a, b)


@lifts(aten.mm.default)
def _mm(a: Tensor, b: Tensor) -> Tensor:
    return contract("xk,ky->xy", a, b)


@lifts(aten.addmm.default)
def _addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = contract("xk,ky->xy", a, b)
    return (c if beta == 1 else c * beta) + (product if alpha == 1 else product * alpha)


@lifts(aten.baddbmm.default)
def _baddbmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = contract("bxk,bky->bxy", a, b)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else (c if beta == 1 else c * beta) + product


@lifts(aten.mv.default)
def _mv(a: Tensor, b: Tensor) -> Tensor:
    return contract("xk,k->x", a, b)


@lifts(aten.dot.default)
def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum()


@lifts(aten.outer.default)
def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(1) * b.unsqueeze(0)


@lifts(aten.einsum.default)
def _einsum(equation: str, operands: Sequence[Tensor], *, path: Any = None) -> Tensor:
    equation = equation.replace(" ", "")
    if "..." not in equation and "->" not in equation:
        labels = equation.replace(",", "")
        equation += "->" + "".join(sorted(c for c in set(labels) if labels.count(c) == 1))
    if "..." in equation or len(operands) != 2:
        return torch.einsum(equation, *operands)
    return contract(equation, *operands)


# --- normalisation ----------------------------------------------------------------------------------------------------


@lifts(aten.rms_norm.default)
def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return w.RMSNorm.apply(x, weight, torch.finfo(x.dtype).eps if eps is None else eps, len(shape))


@lifts(aten.layer_norm.default)
def _layer_norm(
    x: Tensor,
    shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Tensor:
    return w.LayerNorm.apply(x, weight, bias, eps, len(shape))


@lifts(aten.native_layer_norm.default)
def _native_layer_norm(x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    return _layer_norm(x, shape, weight, bias, eps), None, None


def _channel(t: Tensor, like: Tensor) -> Tensor:
    return t.reshape([1, -1, *([1] * (like.ndim - 2))])


@lifts(aten._native_batch_norm_legit_functional.default)
def _batch_norm_functional(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    if not training:
        return _batch_norm_eval(x, weight, bias, mean, var, eps), None, None, mean, var
    y, batch_mean, batch_var, count = _normalise(x, weight, bias, eps)
    unbiased = batch_var.detach() * (count / max(count - 1, 1))
    new_mean = batch_mean.detach() * momentum + mean * (1 - momentum)
    new_var = unbiased * momentum + var * (1 - momentum)
    return y, None, None, new_mean, new_var


def _normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor, int]:
    """Batch statistics in two passes over the whole batch, then scale and shift."""
    dims = [0, *range(2, x.ndim)]
    count = x.numel() // x.shape[1]
    mean = x.sum(dims) / count
    centered = x - _channel(mean, x)
    var = (centered * centered).sum(dims) / count
    y = centered * _channel((var + eps).rsqrt(), x)
    y = y * _channel(weight, x) if weight is not None else y
    return (y + _channel(bias, x) if bias is not None else y), mean, var, count


def _batch_norm_eval(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    scale = (var + eps).rsqrt()
    scale = scale * weight if weight is not None else scale
    y = (x - _channel(mean, x)) * _channel(scale, x)
    return y + _channel(bias, x) if bias is not None else y


@lifts(aten._native_batch_norm_legit_no_training.default)
def _batch_norm_no_training(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Any, ...]:
    return _batch_norm_eval(x, weight, bias, mean, var, eps), None, None


@lifts(aten._native_batch_norm_legit.no_stats)
def _batch_norm_no_stats(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    return _normalise(x, weight, bias, eps)[0], None, None


@lifts(aten.batch_norm.default)
def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Tensor:
    if training or mean is None or var is None:
        return _normalise(x, weight, bias, eps)[0]
    return _batch_norm_eval(x, weight, bias, mean, var, eps)


@lifts(aten.group_norm.default)
def _group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Tensor:
    n, c, *space = x.shape
    y = x.reshape(n, groups, c // groups, *space)
    dims = list(range(2, y.ndim))
    count = math.prod(y.shape[2:])
    centered = y - y.sum(dims, keepdim=True) / count
    y = centered * ((centered * centered).sum(dims, keepdim=True) / count + eps).rsqrt()
    y = y.reshape(x.shape)
    y = y * _channel(weight, x) if weight is not None else y
    return y + _channel(bias, x) if bias is not None else y


@lifts(aten.instance_norm.default)
def _instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Tensor:
    if not use_input_stats and mean is not None and var is not None:
        return _batch_norm_eval(x, weight, bias, mean, var, eps)
    return _group_norm(x, x.shape[1], weight, bias, eps)


# --- attention, recurrence, convolution ----------------------------------------------------------------------------


@lifts(aten.scaled_dot_product_attention.default)
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    lead = q.shape[:-2]
    if q.ndim == 3:
        q, k, v = (t.unsqueeze(1) for t in (q, k, v))
    elif q.ndim == 2:
        q, k, v = (t[None, None] for t in (q, k, v))
    elif q.ndim > 4:
        q, k, v = (t.flatten(0, -4) for t in (q, k, v))
    k, v = (t if t.shape[0] == q.shape[0] else t.expand(q.shape[0], -1, -1, -1) for t in (k, v))
    k, v = (t.expand(-1, q.shape[1], -1, -1) if t.shape[1] == 1 and q.shape[1] > 1 else t for t in (k, v))
    if attn_mask is not None:
        attn_mask = attn_mask.unsqueeze(1) if len(lead) == 1 and attn_mask.ndim == 3 else attn_mask
        attn_mask = attn_mask.reshape([1] * (4 - attn_mask.ndim) + list(attn_mask.shape))
    site = w.next_site() if dropout_p > 0.0 else -1
    out = w.Attention.apply(q, k, v, attn_mask, float(dropout_p), bool(is_causal), float(scale), site)
    return out.reshape([*lead, *out.shape[-2:]])


def _rnn(
    mode: str,
    x: Tensor,
    hidden: Sequence[Tensor],
    params: Sequence[Tensor],
    biases: bool,
    layers: int,
    p: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    x = x.transpose(0, 1) if batch_first else x
    per, ways = 4 if biases else 2, 2 if bidirectional else 1
    if len(params) != per * ways * layers:
        raise CaptureError(
            f"{mode} with a projection (proj_size) is not supported; use proj_size=0 and a Linear after it"
        )
    lasts: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        outs = []
        for way in range(ways):
            k = layer * ways + way
            weights = list(params[k * per : (k + 1) * per]) + [None] * (4 - per)
            start = [h[k] for h in hidden] + [None] * (2 - len(hidden))
            out, *last = w.RNN.apply(mode, x.flip(0) if way else x, *start, *weights)
            outs.append(out.flip(0) if way else out)
            lasts.append(tuple(last[: len(hidden)]))
        x = torch.cat(outs, -1) if ways > 1 else outs[0]
        if p > 0 and train and layer + 1 < layers:
            x = _dropout(x, p, True)
    ends = [torch.stack(state) for state in zip(*lasts, strict=True)]
    return (x.transpose(0, 1) if batch_first else x), *ends


@lifts(aten.lstm.input)
def _lstm(x: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *config: Any) -> tuple[Tensor, ...]:
    return _rnn("lstm", x, hx, params, *config)


def _one_state(mode: str) -> Callable[..., tuple[Tensor, ...]]:
    return lambda x, hx, params, *config: _rnn(mode, x, [hx], params, *config)


lifts(aten.gru.input)(_one_state("gru"))
lifts(aten.rnn_tanh.input)(_one_state("rnn_tanh"))
lifts(aten.rnn_relu.input)(_one_state("rnn_relu"))


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    transposed: bool = False,
    output_padding: Any = 0,
) -> Tensor:
    n = weight.ndim - 2
    unbatched = x.ndim == n + 1
    x = x.unsqueeze(0) if unbatched else x
    config = [_ntuple(v, n) for v in (stride, padding, dilation)]
    y = w.Conv.apply(x, weight, bias, *config, transposed, _ntuple(output_padding, n), groups)
    return y.squeeze(0) if unbatched else y


def _ntuple(value: Any, n: int) -> list[int]:
    value = [value] if isinstance(value, int) else list(value)
    return value * n if len(value) == 1 else value


@lifts(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
def _conv_nd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    return _conv(x, weight, bias, stride, padding, dilation, groups)


@lifts(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
def _conv_padding(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: str = "valid",
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    n = weight.ndim - 2
    if padding == "valid":
        return _conv(x, weight, bias, stride, 0, dilation, groups)
    total = [step * (k - 1) for step, k in zip(_ntuple(dilation, n), weight.shape[2:], strict=True)]
    if any(t % 2 for t in total):
        pads = [side for t in reversed(total) for side in (t // 2, t - t // 2)]
        return _conv(torch.constant_pad_nd(x, pads, 0.0), weight, bias, stride, 0, dilation, groups)
    return _conv(x, weight, bias, stride, [t // 2 for t in total], dilation, groups)


@lifts(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def _conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    return _conv(x, weight, bias, stride, padding, dilation, groups, True, output_padding)


@lifts(aten.convolution.default)
def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Tensor:
    return _conv(x, weight, bias, stride, padding, dilation, groups, transposed, output_padding)


# --- embedding, dropout, randomness -----------------------------------------------------------------------------------


@lifts(aten.embedding.default)
def _embedding(
    weight: Tensor, index: Tensor, padding: int = -1, scale_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    if scale_by_freq:
        raise CaptureError(
            "embedding(scale_grad_by_freq=True) is not supported: the counts span the batch; turn it off"
        )
    padding = padding + weight.shape[0] if padding < -1 else padding
    return w.Embedding.apply(weight, index, padding)


@lifts(aten.dropout.default)
def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return w.Dropout.apply(x, p, w.next_site()) if train and p > 0 else x


@lifts(aten.native_dropout.default)
def _native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Any, ...]:
    return _dropout(x, p, train is not False), None


@lifts(aten.feature_dropout.default)
def _feature_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return x
    return x * _dropout(x.new_ones([*x.shape[:2], *([1] * (x.ndim - 2))]), p, True)


def _random(op: Any, size: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    return op(list(size), dtype or torch.get_default_dtype(), w.next_site())


@lifts(aten.rand.default)
def _rand(size: list[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _random(d.random_uniform, size, dtype)


@lifts(aten.randn.default)
def _randn(size: list[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _random(d.random_normal, size, dtype)


@lifts(aten.rand_like.default)
def _rand_like(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _random(d.random_uniform, x.shape, dtype or x.dtype)


@lifts(aten.randn_like.default)
def _randn_like(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _random(d.random_normal, x.shape, dtype or x.dtype)


@lifts(aten.bernoulli.default)
def _bernoulli(x: Tensor, **_: Any) -> Tensor:
    return (_random(d.random_uniform, x.shape, x.dtype) < x).to(x.dtype)


@lifts(aten.bernoulli.p)
def _bernoulli_p(x: Tensor, p: float, **_: Any) -> Tensor:
    return (_random(d.random_uniform, x.shape, torch.float32) < p).to(x.dtype)
