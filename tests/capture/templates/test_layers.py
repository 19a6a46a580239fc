"""Layers, tensor ops and losses, one small model each: forward, gradients and two steps equal eager under two plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.equal import Net, assert_equal_to_eager, square

Case = tuple[Callable[..., Any], str, dict[str, Callable[[], nn.Module]]]


def case(forward: Callable[..., Any], inputs: str = "seq", **modules: Callable[[], nn.Module]) -> Case:
    return forward, inputs, modules


def tensors(kinds: str) -> tuple[Tensor, ...]:
    make = {
        "row": lambda: torch.randn(4, 8),
        "seq": lambda: torch.randn(4, 6, 8),
        "image": lambda: torch.randn(4, 4, 6, 6),
        "cube": lambda: torch.randn(4, 2, 4, 4, 4),
        "ids": lambda: torch.randint(0, 8, (4, 6)),
    }
    return tuple(make[kind]() for kind in kinds.split())


def check(which: Case, ranks: int = 2, seeds: tuple[int, ...] = (0,)) -> None:
    forward, kinds, modules = which
    model = Net(lambda net, *inputs: square(forward(net, *inputs)), **{k: make() for k, make in modules.items()})
    assert_equal_to_eager(model, tensors(kinds), ranks=ranks, seeds=seeds)


def _attend(net: Net, x: Tensor) -> Tensor:
    hidden = torch.zeros(4, 6, dtype=torch.bool)
    hidden[:, 5] = True
    causal = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)
    return net.a(x, x, x, key_padding_mask=hidden, attn_mask=causal, need_weights=False)[0]


def conv1x1() -> nn.Module:
    return nn.Conv2d(4, 4, 1)


LAYERS = {
    "embedding with padding_idx": case(lambda m, i: m.e(i), "ids", e=lambda: nn.Embedding(8, 8, padding_idx=1)),
    "embedding scaled by frequency": case(
        lambda m, i: m.e(i), "ids", e=lambda: nn.Embedding(8, 8, padding_idx=1, scale_grad_by_freq=True)
    ),
    "bag of embeddings, sum": case(lambda m, i: m.e(i), "ids", e=lambda: nn.EmbeddingBag(8, 8, mode="sum")),
    "bag of embeddings, mean": case(lambda m, i: m.e(i), "ids", e=lambda: nn.EmbeddingBag(8, 8, mode="mean")),
    "one_hot": case(lambda m, i: m.first(F.one_hot(i, 8).float()), "ids"),
    "multihead attention with weights": case(
        lambda m, x: torch.cat((m.a(x, x, x)[0], m.a(x, x, x)[1]), -1),
        a=lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    ),
    "multihead attention with masks": case(_attend, a=lambda: nn.MultiheadAttention(8, 2, batch_first=True)),
    "multihead attention with dropout and extra keys": case(
        lambda m, x: m.a(x, x, x)[0],
        a=lambda: nn.MultiheadAttention(8, 2, dropout=0.2, add_bias_kv=True, add_zero_attn=True, batch_first=True),
    ),
    "encoder layer in train mode": case(
        lambda m, x: m.layer(x), layer=lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    ),
    "encoder layer, norm first, no dropout": case(
        lambda m, x: m.layer(x),
        layer=lambda: nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.0, norm_first=True, activation="gelu", batch_first=True
        ),
    ),
    "lstm": case(lambda m, x: m.r(x)[0], r=lambda: nn.LSTM(8, 8, batch_first=True)),
    "grouped convolution": case(lambda m, x: m.c(x), "image", c=lambda: nn.Conv2d(4, 8, 3, groups=2, padding=1)),
    "depthwise, padding same": case(
        lambda m, x: m.c(x), "image", c=lambda: nn.Conv2d(4, 4, 4, groups=4, padding="same")
    ),
    "transposed convolution": case(
        lambda m, x: m.c(x),
        "image",
        c=lambda: nn.ConvTranspose2d(4, 4, 3, stride=2, groups=2, padding=1, output_padding=1),
    ),
    "convolution over volumes": case(lambda m, x: m.c(x), "cube", c=lambda: nn.Conv3d(2, 4, 2)),
    "reflected padding": case(
        lambda m, x: m.c(x), "image", c=lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")
    ),
    "pixel_shuffle": case(lambda m, x: F.pixel_shuffle(m.c(x), 2), "image", c=conv1x1),
    "interpolate nearest": case(lambda m, x: F.interpolate(m.c(x), scale_factor=2), "image", c=conv1x1),
    "interpolate bilinear": case(
        lambda m, x: F.interpolate(m.c(x), size=(9, 7), mode="bilinear", align_corners=False), "image", c=conv1x1
    ),
    "average and maximum pooling": case(
        lambda m, x: F.avg_pool2d(m.c(x), 2) + F.max_pool2d(m.c(x), 2), "image", c=conv1x1
    ),
    "adaptive pooling": case(lambda m, x: F.adaptive_avg_pool2d(m.c(x), (2, 3)), "image", c=conv1x1),
    "group norm": case(lambda m, x: m.n(m.c(x)), "image", n=lambda: nn.GroupNorm(2, 4), c=conv1x1),
    "bilinear": case(lambda m, x: m.b(x, m.first(x)), "row", b=lambda: nn.Bilinear(8, 8, 4)),
}

LAYERS |= {
    f"lstm, projected{', both ways, two layers' if more else ''}": case(
        lambda m, x: torch.cat([m.r(x)[0].flatten(1), *(h.transpose(0, 1).flatten(1) for h in m.r(x)[1])], 1),
        r=lambda more=more: nn.LSTM(8, 6, 1 + more, batch_first=True, bidirectional=more, proj_size=3),
    )
    for more in (False, True)
}

OPS = {
    "einsum with a weight": case(lambda m, x: torch.einsum("bij,kj->bik", x, m.first.weight)),
    "einsum with an ellipsis": case(lambda m, x: torch.einsum("...j,kj->...k", x, m.first.weight)),
    "einsum of three": case(lambda m, x: torch.einsum("bij,bkj,kl->bil", m.first(x), x, torch.ones(6, 3))),
    "einsum, outer": case(lambda m, x: torch.einsum("bi,bj->bij", m.first(x), x), "row"),
    "einsum, diagonal": case(lambda m, x: torch.einsum("bii->bi", m.first(x) @ x.transpose(1, 2))),
    "einsum without an arrow": case(lambda m, x: torch.einsum("ij,jk", m.first(x), m.first.weight), "row"),
    "cumsum": case(lambda m, x: m.first(x).cumsum(1)),
    "sort": case(lambda m, x: m.first(x).sort(-1)[0]),
    "argsort and gather": case(lambda m, x: m.first(x).gather(-1, x.argsort(-1))),
    "topk": case(lambda m, x: m.first(x).topk(3)[0]),
    "kthvalue": case(lambda m, x: m.first(x).kthvalue(2, 1)[0]),
    "maximum over dims": case(lambda m, x: m.first(x).amax((1, 2)) + m.first(x).max() + m.first(x).min(1)[0].sum(1)),
    "variance and deviation": case(
        lambda m, x: m.first(x).var(1) + m.first(x).std(1, unbiased=False) + m.first(x).var()
    ),
    "logsumexp": case(lambda m, x: m.first(x).logsumexp(1) + m.first(x).logsumexp((0, 1, 2))),
    "softmax over the batch": case(lambda m, x: m.first(x).softmax(0) + m.first(x).log_softmax(1)),
    "norms": case(
        lambda m, x: F.normalize(m.first(x), dim=-1) + m.first(x).norm(dim=1, keepdim=True) + m.first(x).norm()
    ),
    "masks": case(lambda m, x: (m.first(x) @ x.mT).masked_fill(torch.ones(6, 6).triu(1).bool(), -5.0).tril()),
    "where and clamp": case(lambda m, x: torch.where(x > 0, m.first(x), 0.0).clamp(-1, 1)),
    "scatter_add": case(lambda m, x, i: torch.zeros(4, 8).scatter_add(1, i, m.first(x)[:, 0, :6]), "seq ids"),
    "index_add": case(lambda m, x, i: torch.zeros(8, 8).index_add(0, i[:, 0], m.first(x)[:, 0]), "seq ids"),
    "indexing by tensors": case(lambda m, x, i: m.first(x)[torch.arange(4)[:, None], i.clamp(max=5)], "seq ids"),
    "roll, flip, repeat": case(lambda m, x: m.first(x).roll(1, 1).flip(2).repeat(1, 2, 1)),
    "stack, chunk, split": case(
        lambda m, x: torch.stack(m.first(x).chunk(2, -1), 1) * torch.stack(x.split([4, 4], -1), 1)
    ),
    "complex rotation": case(
        lambda m, x: torch.view_as_real(
            torch.view_as_complex(m.first(x).reshape(4, 6, 4, 2))
            * torch.polar(torch.ones(6, 4), torch.arange(24.0).view(6, 4))
        )
    ),
}

MORE = {
    "bag of embeddings, max": case(lambda m, i: m.e(i), "ids", e=lambda: nn.EmbeddingBag(8, 8, mode="max")),
    "encoder of three layers": case(
        lambda m, x: m.t(x), t=lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    ),
    "encoder and decoder": case(lambda m, x: m.t(x, x * 2), t=lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True)),
    "interpolate bicubic": case(lambda m, x: F.interpolate(m.c(x), size=(9, 9), mode="bicubic"), "image", c=conv1x1),
    "interpolate area": case(lambda m, x: F.interpolate(m.c(x), size=(3, 3), mode="area"), "image", c=conv1x1),
    "interpolate linear": case(lambda m, x: F.interpolate(m.first(x), scale_factor=2, mode="linear")),
    "adaptive maximum": case(lambda m, x: F.adaptive_max_pool2d(m.c(x), (2, 3)), "image", c=conv1x1),
    "lp pooling": case(lambda m, x: F.lp_pool2d(m.c(x).relu() + 1, 2, 2), "image", c=conv1x1),
    "unfold and fold": case(
        lambda m, x: F.fold(F.unfold(m.c(x), 2, stride=2), (6, 6), 2, stride=2), "image", c=conv1x1
    ),
    "grid_sample": case(
        lambda m, x: F.grid_sample(
            m.c(x),
            F.affine_grid(torch.eye(2, 3).expand(4, 2, 3) * 0.9, [4, 4, 6, 6], align_corners=False),
            align_corners=False,
        ),
        "image",
        c=conv1x1,
    ),
    "channel shuffle": case(lambda m, x: F.channel_shuffle(m.c(x), 2), "image", c=conv1x1),
    "local response norm": case(lambda m, x: F.local_response_norm(m.c(x), 2), "image", c=conv1x1),
    "channel dropout": case(lambda m, x: F.dropout2d(m.c(x)), "image", c=conv1x1),
    "cumprod, logcumsumexp, cummax": case(
        lambda m, x: m.first(x).sigmoid().cumprod(1) + m.first(x).logcumsumexp(1) + m.first(x).cummax(1)[0]
    ),
    "median": case(lambda m, x: m.first(x).median(1)[0]),
    "product": case(lambda m, x: m.first(x).prod(1)),
    "distances": case(lambda m, x: torch.cdist(m.first(x), x)),
    "cosine similarity": case(lambda m, x: F.cosine_similarity(m.first(x), x, dim=-1)),
    "windows": case(lambda m, x: m.first(x).unfold(1, 3, 1)),
    "repeat_interleave and tile": case(
        lambda m, x: m.first(x).repeat_interleave(2, 1) + torch.tile(m.first(x), (1, 2, 1))
    ),
    "scatter_reduce": case(
        lambda m, x, i: torch.zeros(4, 8).scatter_reduce(1, i, m.first(x)[:, 0, :6], "amax"), "seq ids"
    ),
    "index_put": case(
        lambda m, x, i: m.first(x).index_put((torch.arange(4), i[:, 0].clamp(max=5)), x[:, 0]), "seq ids"
    ),
    "take_along_dim": case(lambda m, x, i: torch.take_along_dim(m.first(x)[:, 0], i, 1), "seq ids"),
    "bucketize": case(lambda m, x: m.first(x) * torch.bucketize(x, torch.linspace(-1, 1, 4)).float()),
    "fourier": case(lambda m, x: torch.fft.rfft(m.first(x), dim=1).abs()),
    "matrix inverse": case(lambda m, x: torch.linalg.inv(m.first.weight + 10 * torch.eye(8)) @ x.mT),
    "cholesky": case(lambda m, x: torch.linalg.cholesky(m.first.weight @ m.first.weight.mT + torch.eye(8)) @ x.mT),
    "singular values": case(lambda m, x: torch.linalg.svdvals(m.first.weight) * x),
    "log determinant": case(lambda m, x: torch.logdet(m.first.weight @ m.first.weight.mT + torch.eye(8)) * x),
    "kronecker product": case(lambda m, x: torch.kron(m.first(x), x), "row"),
    "differences, trace, diagonal": case(
        lambda m, x: m.first(x).diff(dim=1) + m.first(x).trace() + m.first(x).diagonal().sum(), "row"
    ),
    "prelu, glu, rrelu": case(
        lambda m, x: m.p(m.first(x)) + F.glu(m.last(x)).repeat(1, 1, 2) + F.rrelu(m.last(x)), p=nn.PReLU
    ),
}
ACTIVATIONS = (
    "gelu",
    "silu",
    "elu",
    "selu",
    "softplus",
    "mish",
    "hardswish",
    "hardsigmoid",
    "leaky_relu",
    "relu6",
    "logsigmoid",
    "tanhshrink",
    "softsign",
    "celu",
    "hardtanh",
)


def activation(name: str) -> Case:
    return case(lambda m, x: getattr(F, name)(m.first(x)))


MORE |= {name: activation(name) for name in ACTIVATIONS}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_equals_eager(name: str) -> None:
    check(LAYERS[name])


@pytest.mark.few(4)
@pytest.mark.parametrize("name", OPS)
def test_a_tensor_op_equals_eager(name: str) -> None:
    check(OPS[name])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:autopar has no sharding rule")
@pytest.mark.parametrize("name", MORE)
def test_a_rare_op_equals_eager(name: str) -> None:
    check(MORE[name], ranks=4, seeds=(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAYERS, *OPS])
def test_a_layer_or_op_equals_eager_under_many_plans(name: str) -> None:
    check((LAYERS | OPS)[name], ranks=4, seeds=tuple(range(12)))


# --- losses ------------------------------------------------------------------------------------------------------------

ROW, SEQ, IMAGE = (4, 8), (4, 6, 8), (4, 8, 3, 3)
CLASS_WEIGHTS = torch.rand(8) + 0.1


def _classes(*shape: int) -> Tensor:
    return torch.randint(0, 8, shape)


LOSSES: dict[str, tuple[tuple[int, ...], Callable[[], Tensor], Callable[..., Tensor]]] = {
    "cross-entropy, class weights": (ROW, lambda: _classes(4), nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)),
    "cross-entropy, weights and smoothing": (
        ROW,
        lambda: _classes(4),
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1),
    ),
    "cross-entropy, sum": (ROW, lambda: _classes(4), nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1)),
    "cross-entropy, ignored class": (ROW, lambda: torch.tensor([3, 1, 3, 0]), nn.CrossEntropyLoss(ignore_index=3)),
    "cross-entropy, probabilities": (
        ROW,
        lambda: torch.rand(4, 8).softmax(-1),
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1),
    ),
    "cross-entropy, 2d targets": (
        IMAGE,
        lambda: _classes(4, 3, 3),
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1, ignore_index=2),
    ),
    "cross-entropy, sequence": (SEQ, lambda: _classes(4, 6), lambda o, t: F.cross_entropy(o.transpose(1, 2), t)),
    "cross-entropy, per element": (
        ROW,
        lambda: _classes(4),
        lambda o, t: (F.cross_entropy(o, t, reduction="none") * torch.arange(4)).sum(),
    ),
    "binary cross-entropy": (ROW, lambda: torch.rand(4, 8), lambda o, t: F.binary_cross_entropy(o.sigmoid(), t)),
    "binary cross-entropy of logits": (
        ROW,
        lambda: torch.rand(4, 8),
        lambda o, t: F.binary_cross_entropy_with_logits(o, t, weight=CLASS_WEIGHTS, pos_weight=CLASS_WEIGHTS),
    ),
    "negative log-likelihood": (ROW, lambda: _classes(4), lambda o, t: F.nll_loss(o.log_softmax(-1), t, CLASS_WEIGHTS)),
    "negative log-likelihood, 2d": (
        IMAGE,
        lambda: _classes(4, 3, 3),
        lambda o, t: F.nll_loss(o.log_softmax(1), t, ignore_index=2),
    ),
    "divergence": (
        ROW,
        lambda: torch.rand(4, 8).softmax(-1),
        lambda o, t: F.kl_div(o.log_softmax(-1), t, reduction="batchmean"),
    ),
    "divergence of logs": (
        ROW,
        lambda: torch.rand(4, 8).log_softmax(-1),
        lambda o, t: F.kl_div(o.log_softmax(-1), t, log_target=True),
    ),
    "smooth l1": (ROW, lambda: torch.randn(4, 8), nn.SmoothL1Loss(beta=0.5)),
    "huber": (ROW, lambda: torch.randn(4, 8), nn.HuberLoss(delta=0.5)),
    "l1": (ROW, lambda: torch.randn(4, 8), nn.L1Loss()),
    "mse": (ROW, lambda: torch.randn(4, 8), nn.MSELoss()),
    "poisson": (ROW, lambda: torch.rand(4, 8), nn.PoissonNLLLoss()),
    "ranking with a margin": (
        ROW,
        lambda: torch.randn(4, 8),
        lambda o, t: F.margin_ranking_loss(o, t, torch.ones(4, 8), margin=0.1),
    ),
    "triplets": (ROW, lambda: torch.randn(4, 8), lambda o, t: F.triplet_margin_loss(o, t, t.flip(0))),
    "cosine": (ROW, lambda: torch.randn(4, 8), lambda o, t: F.cosine_embedding_loss(o, t, torch.ones(4))),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_equals_eager(name: str) -> None:
    shape, target, loss_fn = LOSSES[name]
    model = Net(lambda net, x: net.c(x), c=nn.Conv2d(8, 8, 1)) if len(shape) == 4 else Net(lambda net, x: net.first(x))
    assert_equal_to_eager(model, (torch.randn(shape), target()), loss_fn)
