"""Layers and ops of every family, each between a linear layer and a loss per sample.

`PLAIN` treats samples independently; `COUPLED` mixes them. `x` is (batch, 12); ops that want another shape make it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.differential.cases import BATCH, Between, Case, draw, weighted_square
from tests.differential.modules import Layer, W, used
from tests.differential.states import STATES


def image(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], 3, 2, 2).repeat(1, 1, 2, 2)


def signal(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], 2, 6)


def heads(x: Tensor) -> Tensor:
    """(batch, 2 heads, 3 positions, 2)."""
    return x.reshape(x.shape[0], 2, 3, 2)


def _of_x(f: Callable[[Tensor], Tensor]) -> Layer:
    return lambda m, x: f(x)


POINTWISE: dict[str, Layer] = {
    name: _of_x(f)
    for name, f in {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
        "silu": F.silu,
        "elu": F.elu,
        "selu": F.selu,
        "celu": F.celu,
        "mish": F.mish,
        "softplus": F.softplus,
        "softsign": F.softsign,
        "hardswish": F.hardswish,
        "hardsigmoid": F.hardsigmoid,
        "hardtanh": F.hardtanh,
        "leaky_relu": F.leaky_relu,
        "logsigmoid": F.logsigmoid,
        "tanhshrink": F.tanhshrink,
        "relu6": F.relu6,
        "threshold": lambda x: F.threshold(x, 0.1, -1.0),
        "sigmoid": torch.sigmoid,
        "exp": torch.exp,
        "log": lambda x: (x.abs() + 1).log(),
        "log1p": lambda x: x.abs().log1p(),
        "sqrt": lambda x: (x.abs() + 1).sqrt(),
        "rsqrt": lambda x: (x * x + 1).rsqrt(),
        "pow": lambda x: x.pow(3),
        "pow of a number": lambda x: 2.0**x,
        "square": torch.square,
        "reciprocal": lambda x: (x.abs() + 1).reciprocal(),
        "sin": torch.sin,
        "cos": torch.cos,
        "tan": lambda x: torch.tan(0.3 * x),
        "atan": torch.atan,
        "sinh": torch.sinh,
        "erf": torch.erf,
        "expm1": torch.expm1,
        "sign": lambda x: x * x.sign(),
        "abs": torch.abs,
        "neg": torch.neg,
        "clamp": lambda x: x.clamp(-0.5, 0.7),
        "clamp of a tensor": lambda x: x.clamp(min=-x.abs() / 2),
        "where": lambda x: torch.where(x > 0, x, 0.1 * x * x),
        "masked_fill": lambda x: x.masked_fill(x > 0.5, 0.0),
        "maximum": lambda x: torch.maximum(x, x * x),
        "minimum": lambda x: torch.minimum(x, x.sin()),
        "lerp": lambda x: torch.lerp(x, x * x, 0.3),
        "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
        "addcdiv": lambda x: torch.addcdiv(x, x, x.abs() + 1),
        "floor": lambda x: x - x.floor(),
        "round": lambda x: x * x.round(),
        "fmod": lambda x: torch.fmod(x, 0.7),
        "remainder": lambda x: torch.remainder(x, 0.7),
        "atan2": lambda x: torch.atan2(x, x.abs() + 1),
        "hypot": lambda x: torch.hypot(x, x + 2),
        "logaddexp": lambda x: torch.logaddexp(x, -x),
        "xlogy": lambda x: torch.xlogy(x.abs(), x.abs() + 1),
        "nan_to_num": lambda x: torch.nan_to_num(x),
        "detach": lambda x: x * x.detach(),
        "cast": lambda x: x.float().double() * x,
    }.items()
}
REDUCING: dict[str, Layer] = {
    "sum": lambda m, x: x.sum(1, keepdim=True),
    "mean": lambda m, x: x.mean(-1, True),
    "amax": lambda m, x: x.amax(1, True),
    "amin": lambda m, x: x.amin(1, True),
    "max": lambda m, x: x.max(1)[0][:, None],
    "min": lambda m, x: x.min(1)[0][:, None],
    "median": lambda m, x: x.median(1)[0][:, None],
    "prod": lambda m, x: x.prod(1, True),
    "var": lambda m, x: x.var(1, keepdim=True),
    "std": lambda m, x: x.std(1, keepdim=True),
    "norm": lambda m, x: x / x.norm(dim=1, keepdim=True),
    "norm 1": lambda m, x: x.norm(1, 1, True),
    "norm inf": lambda m, x: x.norm(float("inf"), 1, True),
    "norm 3": lambda m, x: x.norm(3, 1, True),
    "logsumexp": lambda m, x: x.logsumexp(1, True),
    "cumsum": lambda m, x: x.cumsum(1),
    "cumprod": lambda m, x: x.cumprod(1),
    "cummax": lambda m, x: x.cummax(1)[0],
    "logcumsumexp": lambda m, x: x.logcumsumexp(1),
    "softmax": lambda m, x: x.softmax(-1),
    "log_softmax": lambda m, x: x.log_softmax(-1),
    "softmin": lambda m, x: F.softmin(x, 1),
    "sort": lambda m, x: x.sort(1)[0],
    "topk": lambda m, x: x.topk(3, 1)[0],
    "argsort": lambda m, x: x.gather(1, x.argsort(1)),
    "argmax": lambda m, x: x * x.argmax(1, True),
    "normalize": lambda m, x: F.normalize(x, dim=1),
    "var_mean": lambda m, x: torch.var_mean(x, 1)[0][:, None] + x,
    "count_nonzero": lambda m, x: x * (x > 0).sum(1, True),
    "any": lambda m, x: x * (x > 1).any(1, True),
    "cosine": lambda m, x: F.cosine_similarity(x[:, :6], x[:, 6:])[:, None],
    "pairwise": lambda m, x: F.pairwise_distance(x[:, :6], x[:, 6:])[:, None],
}
SHAPING: dict[str, Layer] = {
    "view": lambda m, x: x.view(-1, 3, 4).sin().view(x.shape),
    "transpose": lambda m, x: signal(x).transpose(1, 2),
    "permute": lambda m, x: x.reshape(-1, 2, 3, 2).permute(0, 3, 1, 2),
    "merged with features": lambda m, x: (x.reshape(-1, 3) * torch.arange(1, 4)).reshape(-1, W),
    "batch in the middle": lambda m, x: x.t().contiguous().tanh().t(),
    "batch minor": lambda m, x: (x.t().reshape(-1) * 2).sin().reshape(W, -1).t(),
    "slice": lambda m, x: x[:, 2:7],
    "strided": lambda m, x: x[:, ::3],
    "select": lambda m, x: x[:, 4:5] * x[:, 0, None],
    "split": lambda m, x: x.split(4, 1)[1],
    "chunk": lambda m, x: torch.cat([p * (i + 1) for i, p in enumerate(x.chunk(3, 1))], 1),
    "unbind": lambda m, x: sum(p * i for i, p in enumerate(signal(x).unbind(2))),
    "cat": lambda m, x: torch.cat([x, x * x], 1),
    "stack": lambda m, x: torch.stack([x, x.sin()], 1),
    "pad": lambda m, x: F.pad(x, (1, 2)),
    "pad and cut": lambda m, x: F.pad(x, (-1, 1)),
    "pad and cut rows": lambda m, x: F.pad(signal(x), (0, 0, 1, -1)),
    "pad value": lambda m, x: F.pad(x, (2, 0), value=0.3),
    "reflect": lambda m, x: F.pad(signal(x), (2, 1), mode="reflect"),
    "replicate": lambda m, x: F.pad(signal(x), (1, 2), mode="replicate"),
    "circular": lambda m, x: F.pad(signal(x), (1, 1), mode="circular"),
    "roll": lambda m, x: x.roll(3, 1),
    "flip": lambda m, x: x.flip(1) * x,
    "expand": lambda m, x: x[:, :, None].expand(-1, -1, 2) * torch.tensor([1.0, 2.0]),
    "repeat": lambda m, x: x.repeat(1, 2),
    "repeat_interleave": lambda m, x: x.repeat_interleave(2, 1),
    "tile": lambda m, x: x.tile(1, 2),
    "squeeze": lambda m, x: x[:, None].squeeze(1),
    "unfold": lambda m, x: x.unfold(1, 4, 2),
    "diagonal": lambda m, x: x.reshape(-1, 3, 4).diagonal(dim1=1, dim2=2),
    "diag_embed": lambda m, x: torch.diag_embed(x[:, :3]),
    "tril": lambda m, x: x.reshape(-1, 3, 4).tril(),
    "triu": lambda m, x: x.reshape(-1, 3, 4).triu(1),
    "meshed": lambda m, x: x[:, :, None] * x[:, None, :3],
    "movedim": lambda m, x: x.reshape(-1, 2, 3, 2).movedim(1, 3),
    "unflatten": lambda m, x: x.unflatten(1, (3, 4)).sum(1),
    "pixel_shuffle": lambda m, x: F.pixel_shuffle(x.reshape(-1, 12, 1, 1), 2),
    "rot90": lambda m, x: torch.rot90(x.reshape(-1, 3, 4), 1, (1, 2)),
    "constant": lambda m, x: torch.cat([x, torch.ones(x.shape[0], 1)], 1),
    "pairs of samples": lambda m, x: x.reshape(4, 24).softmax(1).reshape(BATCH, W),
    "class token": lambda m, x: torch.cat([m.token.expand(x.shape[0], -1, -1), signal(x)], 1),
}
PRODUCTS: dict[str, Layer] = {
    "matmul": lambda m, x: x @ m.weight,
    "bmm": lambda m, x: torch.bmm(signal(x), signal(x).transpose(1, 2)),
    "einsum": lambda m, x: torch.einsum("bij,jk->bik", signal(x), m.small),
    "outer": lambda m, x: torch.einsum("bi,bj->bij", x[:, :3], x[:, 3:6]),
    "bilinear": lambda m, x: m.bilinear(x[:, :6], x[:, 6:]),
    "addmm": lambda m, x: torch.addmm(m.bias, x, m.weight),
    "baddbmm": lambda m, x: torch.baddbmm(signal(x)[:, :, :2], signal(x), signal(x).transpose(1, 2)),
    "functional linear": lambda m, x: F.linear(x, m.weight.t(), m.bias),
    "weight by weight": lambda m, x: x @ (m.weight @ m.weight.t()),
    "weight normed": lambda m, x: x @ (m.weight / m.weight.norm(dim=0, keepdim=True)),
    "lora": lambda m, x: x @ (m.weight + m.small_in @ m.small_out),
    "tied": lambda m, x: m.tied(torch.tanh(m.tied(x))),
    "kron": lambda m, x: torch.einsum("bi,ij,jk->bk", x, m.weight, m.weight),
    "penalty": lambda m, x: x @ m.weight + m.weight.pow(2).sum(),
    "scaled": lambda m, x: x * m.bias.exp(),
    "mixed experts": lambda m, x: torch.einsum("be,bi,eio->bo", (x[:, :2]).softmax(-1), x, m.experts),
    "inverse": lambda m, x: x[:, :6] @ torch.linalg.inv(m.small @ m.small.t() + torch.eye(6)),
    "solve": lambda m, x: torch.linalg.solve_triangular(
        m.small.tril() + 3 * torch.eye(6), x[:, :6].t(), upper=False
    ).t(),
}
NORMS: dict[str, Layer] = {
    "layer_norm": lambda m, x: m.layer(x),
    "layer_norm without": lambda m, x: F.layer_norm(x, (W,)),
    "rms_norm": lambda m, x: m.rms(x),
    "group_norm": lambda m, x: m.group(image(x)),
    "instance_norm": lambda m, x: F.instance_norm(image(x)),
    "batch_norm eval": lambda m, x: F.batch_norm(x, m.mean, m.var, m.bias, m.bias),
    "local_response": lambda m, x: F.local_response_norm(image(x), 2),
    "own rms": lambda m, x: x * (x.pow(2).mean(-1, True) + 1e-5).rsqrt() * m.bias,
    "scaled attention": lambda m, x: F.scaled_dot_product_attention(*(heads(x),) * 3),
    "causal attention": lambda m, x: F.scaled_dot_product_attention(heads(x), heads(x) * 2, heads(x), is_causal=True),
    "masked attention": lambda m, x: F.scaled_dot_product_attention(
        *(heads(x),) * 3, attn_mask=torch.ones(3, 3).tril().bool()
    ),
    "biased attention": lambda m, x: F.scaled_dot_product_attention(*(heads(x),) * 3, attn_mask=m.attention_bias),
    "own attention": lambda m, x: (heads(x) @ heads(x).transpose(-1, -2) / 2).softmax(-1) @ heads(x),
    "grouped queries": lambda m, x: F.scaled_dot_product_attention(
        heads(x), heads(x)[:, :1], heads(x)[:, 1:], enable_gqa=True
    ),
    "multihead": lambda m, x: m.multihead(*(signal(x),) * 3)[0],
    "encoder layer": lambda m, x: m.encoder(signal(x)),
}
CONVOLUTIONS: dict[str, Layer] = {
    "conv1d": lambda m, x: m.conv1(signal(x)),
    "conv2d": lambda m, x: m.conv2(image(x)),
    "strided": lambda m, x: m.strided(image(x)),
    "grouped": lambda m, x: m.grouped(image(x)),
    "dilated": lambda m, x: m.dilated(image(x)),
    "transposed": lambda m, x: m.transposed(image(x)),
    "conv3d": lambda m, x: m.conv3(image(x)[:, None]),
    "causal conv": lambda m, x: m.conv1(F.pad(signal(x), (2, 0))),
    "max_pool": lambda m, x: F.max_pool2d(image(x), 2),
    "max_pool padded": lambda m, x: F.max_pool2d(image(x), 3, 1, 1),
    "avg_pool": lambda m, x: F.avg_pool2d(image(x), 2),
    "adaptive": lambda m, x: F.adaptive_avg_pool2d(image(x), 1),
    "lp_pool": lambda m, x: F.lp_pool2d(image(x).abs() + 1, 2, 2),
    "nearest": lambda m, x: F.interpolate(image(x), scale_factor=2),
    "bilinear": lambda m, x: F.interpolate(image(x), scale_factor=2, mode="bilinear"),
    "bilinear aligned": lambda m, x: F.interpolate(image(x), size=(3, 5), mode="bilinear", align_corners=True),
    "linear 1d": lambda m, x: F.interpolate(signal(x), scale_factor=2, mode="linear"),
    "fold": lambda m, x: F.unfold(image(x), 2),
    "grid_sample": lambda m, x: F.grid_sample(image(x), torch.tanh(x[:, :8]).reshape(-1, 2, 2, 2), align_corners=False),
    "unshuffle": lambda m, x: F.pixel_unshuffle(image(x), 2),
    "channel shuffle": lambda m, x: F.channel_shuffle(signal(x).repeat(1, 2, 1), 2),
}
INDEXED: dict[str, Layer] = {
    "index of columns": lambda m, x: x[:, torch.tensor([3, 1, 3])],
    "index_select": lambda m, x: x.index_select(1, torch.tensor([0, 5])),
    "gather of columns": lambda m, x: x.gather(1, (x[:, :3] > 0).long()),
    "take_along": lambda m, x: torch.take_along_dim(x, x.argsort(1)[:, :4], 1),
    "embedding": lambda m, x: m.table((x[:, :3] > 0).long() * 3),
    "embedding of padding": lambda m, x: m.padded((x[:, :3] > 0).long() * 3),
    "embedding_bag": lambda m, x: m.bag((x[:, :3] > 0).long()),
    "positions": lambda m, x: signal(x).transpose(1, 2) + m.positions(torch.arange(6)),
    "learned positions": lambda m, x: signal(x) + m.learned,
    "relative bias": lambda m, x: (
        signal(x) @ m.table.weight[torch.arange(6)[:, None].sub(torch.arange(6)).abs()][:, :, 0]
    ),
    "scatter": lambda m, x: torch.zeros_like(x).scatter(1, (x[:, :3] > 0).long() + torch.arange(3) * 2, x[:, :3]),
    "scatter_add": lambda m, x: torch.zeros_like(x).scatter_add(1, (x[:, :3] > 0).long(), x[:, :3]),
    "one_hot": lambda m, x: x[:, :4] * F.one_hot((x[:, 0] > 0).long(), 4),
    "index_fill": lambda m, x: x.clone().index_fill(1, torch.tensor([1]), 0.0),
    "masked": lambda m, x: x.masked_fill(torch.arange(W) % 2 == 0, 0.5),
    "bucketize": lambda m, x: x * torch.bucketize(x, torch.tensor([-0.5, 0.5], dtype=torch.float64)),
    "isin": lambda m, x: x * torch.isin(x.round(), torch.tensor([0.0, 1.0], dtype=torch.float64)),
    "where of an index": lambda m, x: torch.where(torch.arange(W) < 5, x, x.sin()),
}
TRANSFORMED: dict[str, Layer] = {
    "fft": lambda m, x: torch.fft.fft(x).abs(),
    "rfft": lambda m, x: torch.view_as_real(torch.fft.rfft(x)),
    "rfft and back": lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * m.spectrum, n=W),
    "complex weights": lambda m, x: torch.fft.irfft(torch.fft.rfft(signal(x)) * torch.view_as_complex(m.filters)),
    "convolution by a spectrum": lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(m.bias)),
    "fft2": lambda m, x: torch.fft.fft2(x.reshape(-1, 3, 4)).real,
    "ifft": lambda m, x: torch.fft.ifft(torch.fft.fft(x) * 1j).imag,
    "rfft2 and back": lambda m, x: torch.fft.irfft2(torch.fft.rfft2(image(x))[..., :2], s=(4, 4)),
    "rotary": lambda m, x: torch.view_as_real(torch.view_as_complex(signal(x).reshape(-1, 2, 3, 2)) * m.rotation),
    "complex": lambda m, x: torch.complex(x, x * x).abs(),
    "polar": lambda m, x: torch.polar(x.abs() + 1, x).real,
    "angle": lambda m, x: torch.complex(x, x.abs() + 1).angle(),
    "norm ortho": lambda m, x: torch.fft.rfft(x, norm="ortho").abs(),
}
RECURRENT: dict[str, Layer] = {
    "lstm": lambda m, x: m.lstm(signal(x).transpose(1, 2))[0],
    "lstm, last state": lambda m, x: m.lstm(signal(x).transpose(1, 2))[1][0].transpose(0, 1),
    "gru": lambda m, x: m.gru(signal(x).transpose(1, 2))[0],
    "rnn": lambda m, x: m.rnn(signal(x).transpose(1, 2))[0],
    "bidirectional": lambda m, x: m.both(signal(x).transpose(1, 2))[0],
    "projected": lambda m, x: m.projected(signal(x).transpose(1, 2))[0],
    "time major": lambda m, x: m.major(signal(x).permute(2, 0, 1))[0].transpose(0, 1),
    "lstm cell": lambda m, x: m.cell(x)[0],
    "gru cell": lambda m, x: m.gru_cell(x),
    "unrolled": lambda m, x: m.step(torch.tanh(m.step(torch.tanh(m.step(x))))),
}
COUPLED: dict[str, Layer] = {
    "batch_norm": lambda m, x: m.batch(x),
    "batch_norm 2d": lambda m, x: m.batch2(image(x)),
    "softmax over samples": lambda m, x: x.softmax(0),
    "log_softmax over samples": lambda m, x: x.log_softmax(0),
    "cumsum over samples": lambda m, x: x.cumsum(0),
    "sorted samples": lambda m, x: x.sort(0)[0],
    "flipped samples": lambda m, x: x.flip(0) * x,
    "rolled samples": lambda m, x: x.roll(1, 0) * x,
    "fft over samples": lambda m, x: torch.fft.fft(x, dim=0).abs(),
    "gathered samples": lambda m, x: x.gather(0, torch.arange(BATCH).flip(0)[:, None].expand(-1, W)),
    "indexed samples": lambda m, x: x[torch.arange(BATCH).flip(0)] * x,
    "index_add over samples": lambda m, x: x.index_add(0, torch.tensor([0, 0]), x[2:4]),
    "linspace over samples": lambda m, x: x * torch.linspace(0, 1, x.shape[0])[:, None],
    "arange over samples": lambda m, x: x * torch.arange(x.shape[0])[:, None],
    "eye over samples": lambda m, x: torch.eye(x.shape[0], dtype=x.dtype) @ x + x,
    "halves": lambda m, x: x.chunk(2, 0)[0].repeat(2, 1) * x,
    "one sample": lambda m, x: x * x[0],
    "samples less their mean": lambda m, x: x - x.mean(0),
    "samples over their norm": lambda m, x: x / x.norm(),
    "attention over samples": lambda m, x: (x @ x.t() / 3).softmax(-1) @ x,
    "top samples": lambda m, x: x.topk(BATCH, 0)[0],
    "samples of the other half": lambda m, x: torch.cat([x[4:], x[:4]]) * x,
    "maximum over samples": lambda m, x: x - x.amax(0),
    "median over samples": lambda m, x: x - x.median(0)[0],
    "convolved samples": lambda m, x: F.avg_pool1d(x.t()[None], 3, 1, 1)[0].t(),
    "per sample weights": lambda m, x: x * m.per_sample,
    "batch mean function": lambda m, x: BatchMean.apply(x),
}


class BatchMean(torch.autograd.Function):
    """Takes the mean over samples off, and hands gradients on as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def _case(kind: str, name: str, f: Layer, coupled: bool = False) -> Case:
    return Case(
        f"{kind}/{name}",
        lambda: Between(f, W, **used(f)),
        lambda seed: (draw(seed, BATCH, 6), draw(seed + 50, BATCH, 1)),
        weighted_square,
        coupled,
    )


FAMILIES = {
    "pointwise": POINTWISE,
    "reduction": REDUCING,
    "view": SHAPING,
    "product": PRODUCTS,
    "norm and attention": NORMS,
    "convolution": CONVOLUTIONS,
    "indexing": INDEXED,
    "transform": TRANSFORMED,
    "recurrence": RECURRENT,
}


def cases() -> list[Case]:
    """A case per layer."""
    rows = [_case(kind, name, f) for kind, family in FAMILIES.items() for name, f in family.items()]
    rows += [_case("coupled", name, f, True) for name, f in COUPLED.items()]
    rows += [_case("state", name, f) for name, f in STATES.items()]
    return rows
