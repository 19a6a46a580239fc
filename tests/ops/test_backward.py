"""The dialect's own backward ops give what torch's autograd gives, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture.export.fake import faked
from autopar.ir.program import op_name
from autopar.ops.dialect import LIFT
from autopar.runtime.kernels import ops
from tests.ops.traced import run, traced

from .gradients import assert_equal_gradients, f

aten = torch.ops.aten

# --- contractions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "equation", [f"{a},{b}->{out}" for a in ("xk", "kx") for b in ("yk", "ky") for out in ("xy", "yx")]
)
def test_an_einsum_of_matrices_is_a_product_as_they_lie(equation: str, bias: bool) -> None:
    sizes = {"x": 3, "y": 4, "k": 5}
    first, second, out = (tuple(sizes[c] for c in term) for term in equation.replace("->", ",").split(","))
    a, b, c = f(*first), f(*second), f(out[1]) if bias else None
    product = ops.einsum(equation, a, b, c)
    assert product.is_contiguous()
    expected = torch.einsum(equation, a, b)
    torch.testing.assert_close(product, expected if c is None else expected + c, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "equation", [f"ab{a},ab{b}->ab{out}" for a in ("xk", "kx") for b in ("yk", "ky") for out in ("xy", "yx")]
)
def test_an_einsum_of_batches_of_matrices_is_a_product(equation: str, turned: bool, bias: bool) -> None:
    """turned: of heads that lie beside each other, so that batch and rows cannot be one dim without a copy."""
    sizes = {"a": 2, "b": 3, "x": 4, "y": 5, "k": 6}
    first, second, out = (tuple(sizes[c] for c in term) for term in equation.replace("->", ",").split(","))
    a, b, c = f(*first), f(*second), f(out[-1]) if bias else None
    if turned:
        a, b = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (a, b))
    product = ops.einsum(equation, a, b, c)
    assert product.is_contiguous()
    expected = torch.einsum(equation, a, b)
    torch.testing.assert_close(product, expected if c is None else expected + c, rtol=1e-12, atol=1e-12)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(batch, tokens, heads, width) each -> (batch, tokens, heads, width)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize(
    ("heads", "learned", "copies"), [(3, 3, 4), (1, 3, 0), (3, 1, 2)], ids=["heads", "one head", "queries alone"]
)
def test_what_two_products_of_heads_read_is_copied_once(heads: int, learned: int, copies: int) -> None:
    """Queries, keys, values and the gradient of what they give; where only queries are learned: keys and values, of which
    each gradient of a product is read by one."""
    tensors = [f(2, 5, heads, 4).detach().requires_grad_(i < learned) for i in range(3)]
    with faked(nn.Module(), FakeTensorMode()):
        template = traced(by_hand, tensors)
    assert [op_name(node.target) for node in template.ops].count("autopar.contiguous_batch") == copies
    tangent = f(2, 5, heads, 4).detach()
    expected = by_hand(*tensors)
    values = run(template, [x.detach() for x in tensors], [tangent])
    torch.testing.assert_close(values[template.outputs[0]], expected.detach(), rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(expected, tensors[:learned], tangent)
    for name, gradient in zip(template.input_grads, gradients, strict=False):
        assert name is not None
        torch.testing.assert_close(values[name], gradient, rtol=1e-12, atol=1e-12)


def test_a_contiguous_batch_is_a_copy_whose_inner_dim_stays() -> None:
    x = f(2, 5, 3, 4).detach().transpose(1, 2)
    for one in (x, x.mT):
        copy = ops.contiguous_batch(one)
        assert torch.equal(copy, one)
        assert copy.data_ptr() != one.data_ptr()
        assert copy.flatten(0, 1).data_ptr() == copy.data_ptr()
        assert (copy.stride(-2) < copy.stride(-1)) == (one.stride(-2) < one.stride(-1))


@pytest.mark.parametrize("equation", ["xk,x->k", "xk,kx->xk", "xk,y->xky", "xbk,bky->bxy"])
def test_other_einsums_are_torchs_own(equation: str) -> None:
    sizes = {"x": 3, "y": 4, "k": 5, "b": 2}
    first, second, out = (tuple(sizes[c] for c in term) for term in equation.replace("->", ",").split(","))
    a, b, c = f(*first), f(*second), f(out[-1])
    torch.testing.assert_close(ops.einsum(equation, a, b, c), torch.einsum(equation, a, b) + c, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(lead: tuple[int, ...], bias: bool) -> None:
    more = (f(5),) if bias else ()
    assert_equal_gradients(LIFT[aten.linear.default], F.linear, f(*lead, 4), f(5, 4), *more)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((4,), (4,)),
        ((4,), (4, 5)),
        ((3, 4), (4,)),
        ((3, 4), (4, 5)),
        ((2, 3, 4), (4, 5)),
        ((3, 4), (2, 4, 5)),
        ((2, 1, 3, 4), (6, 4, 5)),
        ((1, 3, 4), (2, 4, 5)),
    ],
)
def test_matmul(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    assert_equal_gradients(LIFT[aten.matmul.default], torch.matmul, f(*a), f(*b))


@pytest.mark.parametrize(
    "equation",
    [
        "bik,bkj->bij",
        "bhid,bhjd->bhij",
        "ij,ji->",
        "ik,kj",
        "ii,ij->j",
        "...i,ij->...j",
        "bi,bj->i",
        "bhi,ij->bj",
        "ij->ji",
        "bi,ij,bj->b",
    ],
)
def test_einsum(equation: str) -> None:
    sizes = dict(zip("bhijkd", (2, 3, 4, 4, 6, 7), strict=True))
    terms = equation.replace("...", "bh").split("->")[0].split(",")
    leaves = [f(*(sizes[c] for c in term)) for term in terms]
    assert_equal_gradients(
        lambda *xs: LIFT[aten.einsum.default](equation, xs), lambda *xs: torch.einsum(equation, *xs), *leaves
    )


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 3), (5,)])
def test_cross_entropy(reduction: str, smoothing: float, weighted: bool, shape: tuple[int, ...]) -> None:
    target = torch.randint(0, 5, shape[:1] + shape[2:] if len(shape) > 1 else ())
    if target.ndim:
        target.view(-1)[0] = -100
    weight = torch.rand(5, dtype=torch.float64) if weighted else None
    code = {"none": 0, "mean": 1, "sum": 2}[reduction]
    assert_equal_gradients(
        lambda x: LIFT[aten.cross_entropy_loss.default](x, target, weight, code, -100, smoothing),
        lambda x: F.cross_entropy(x, target, weight, reduction=reduction, label_smoothing=smoothing),
        f(*shape),
    )


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_cross_entropy_gradient_of_a_block_of_the_vocabulary(parts: int) -> None:
    x, index, g = f(6, 8), torch.randint(0, 8, (6,)), torch.randn(6, dtype=torch.float64)
    (expected,) = torch.autograd.grad(F.cross_entropy(x, index, reduction="none"), x, g)
    n = 8 // parts
    blocks = x.detach().split(n, 1)
    lse = x.detach().logsumexp(1)
    got = [ops.cross_entropy_grad(b, lse, index, g, 1, offset=i * n) for i, b in enumerate(blocks)]
    torch.testing.assert_close(torch.cat(got, 1), expected, rtol=1e-12, atol=1e-12)
    picked = sum(ops.pick(b, index, 1, offset=i * n) for i, b in enumerate(blocks))
    torch.testing.assert_close(lse - picked, F.cross_entropy(x, index, reduction="none"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("mse_loss", ()),
        ("l1_loss", ()),
        ("smooth_l1_loss", ()),
        ("huber_loss", ()),
        ("kl_div", ()),
        ("binary_cross_entropy_with_logits", ()),
        ("binary_cross_entropy", ()),
    ],
)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_pointwise_losses(name: str, extra: tuple[Any, ...], reduction: str) -> None:
    target = torch.rand(3, 4, dtype=torch.float64)
    x = f(3, 4)
    squash = torch.sigmoid if name == "binary_cross_entropy" else torch.clone
    code = {"none": 0, "mean": 1, "sum": 2}[reduction]
    target_op = getattr(aten, name).default
    keyword = {"reduction": code}
    assert_equal_gradients(
        lambda t: LIFT[target_op](squash(t), target, **keyword),
        lambda t: getattr(F, name)(squash(t), target, reduction=reduction),
        x,
    )


# --- embedding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [None, 0, 3, -1])
def test_embedding(padding: int | None) -> None:
    index = torch.tensor([[0, 3, 3], [7, 2, 0]])
    raw = -1 if padding is None else padding % 8
    assert_equal_gradients(
        lambda w: LIFT[aten.embedding.default](w, index, raw), lambda w: F.embedding(index, w, padding), f(8, 4)
    )


@pytest.mark.parametrize("padding", [-1, 0, 5])
def test_embedding_gradient_of_blocks_of_rows(padding: int) -> None:
    w, index = f(8, 4), torch.randint(0, 8, (3, 5))
    out = F.embedding(index, w, padding if padding >= 0 else None)
    g = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, w, g)
    got = [ops.embedding_grad(g, index, 2, padding, offset=start) for start in range(0, 8, 2)]
    torch.testing.assert_close(torch.cat(got), expected, rtol=1e-12, atol=1e-12)
    parts = [ops.embedding(block, index, offset=2 * i) for i, block in enumerate(w.detach().split(2))]
    torch.testing.assert_close(sum(parts), out.detach(), rtol=0, atol=0)


def test_gradients_of_tables_on_gpus_are_those_of_scattered_additions(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own kernel, which adds in a fixed order."""
    g, index = f(6, 50, 4), torch.randint(0, 8, (6, 50))
    asked = [
        (dtype, padding, offset)
        for dtype in (torch.float64, torch.bfloat16)
        for padding, offset in ((-1, None), (3, 2))
    ]
    wanted = [ops.embedding_grad(g.to(dtype), index, 5 + 3 * (o is None), p, o) for dtype, p, o in asked]
    monkeypatch.setattr(ops, "has_ordered_embedding", lambda device: True)
    for (dtype, padding, offset), expected in zip(asked, wanted, strict=True):
        found = ops.embedding_grad(g.to(dtype), index, 5 + 3 * (offset is None), padding, offset)
        torch.testing.assert_close(found, expected, rtol=1e-12 if dtype == torch.float64 else 8e-3, atol=1e-12)


# --- convolution ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), (1, 2, 2)])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolution(rank: int, groups: int, stride: int, padding: int, dilation: int, transposed: bool) -> None:
    x, w, b = f(2, 4, *([6] * rank)), f(*((4, 8 // groups) if transposed else (8, 4 // groups)), *([3] * rank)), f(8)
    if transposed:
        name = f"conv_transpose{rank}d"
        op = getattr(aten, name).input if rank > 1 else aten.conv_transpose1d.default
        args: tuple[Any, ...] = (stride, padding, stride - 1, groups, dilation)
    else:
        name, op, args = f"conv{rank}d", getattr(aten, f"conv{rank}d").default, (stride, padding, dilation, groups)
    assert_equal_gradients(lambda *t: LIFT[op](*t, *args), lambda *t: getattr(F, name)(*t, *args), x, w, b)


@pytest.mark.parametrize(("kernel", "padding"), [(3, "same"), (4, "same"), (3, "valid")])
def test_convolution_with_named_padding(kernel: int, padding: str) -> None:
    assert_equal_gradients(
        lambda x, w: LIFT[aten.conv2d.padding](x, w, None, 1, padding),
        lambda x, w: F.conv2d(x, w, None, 1, padding),
        f(2, 3, 6, 6),
        f(4, 3, kernel, kernel),
    )


# --- recurrence -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
@pytest.mark.parametrize(
    ("layers", "bidirectional", "bias", "batch_first"),
    [(1, False, True, False), (2, True, True, True), (2, False, False, False), (1, True, False, True)],
)
@pytest.mark.parametrize("out", [5, 2])
def test_recurrence(mode: str, layers: int, bidirectional: bool, bias: bool, batch_first: bool, out: int) -> None:
    """out: 5, or what an LSTM projects these to."""
    if out != 5 and mode != "lstm":
        pytest.skip("torch projects the states of an LSTM alone")
    ways = 2 if bidirectional else 1
    gates = {"lstm": 4, "gru": 3}.get(mode, 1)
    params = []
    for layer in range(layers):
        for _ in range(ways):
            params += [f(gates * 5, 3 if layer == 0 else out * ways), f(gates * 5, out)]
            params += [f(gates * 5), f(gates * 5)] if bias else []
            params += [f(out, 5)] if out != 5 else []
    hidden = [f(layers * ways, 2, size) for size in ([out, 5] if mode == "lstm" else [5])]
    x = f(2, 4, 3) if batch_first else f(4, 2, 3)
    config = (bias, layers, 0.0, True, bidirectional, batch_first)
    op = getattr(aten, mode).input

    def split(*t: Tensor) -> tuple[Any, ...]:
        state = t[1 : 1 + len(hidden)]
        return t[0], (list(state) if mode == "lstm" else state[0]), list(t[1 + len(hidden) :])

    assert_equal_gradients(
        lambda *t: LIFT[op](*split(*t), *config), lambda *t: op(*split(*t), *config), x, *hidden, *params
    )


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cross_entropy_of_rows_of_many_tiles(dim: int, dtype: torch.dtype) -> None:
    """Sums and gradients tile by tile are those of the whole, numbers of 16 bits as if in float32, where exp is 0 too."""
    shape = [7, 70_000, 3] if dim == 1 else [300, 11, 90] if dim == 0 else [40, 30, 300]
    x = (f(*shape).detach() * 40).to(dtype)
    rows = [n for i, n in enumerate(shape) if i != dim]
    index, g = torch.randint(0, shape[dim], rows), f(*rows).detach().to(dtype)
    wide = x.to(torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    top = x.amax(dim)
    total = (wide - top.to(wide.dtype).unsqueeze(dim)).exp().sum(dim)
    torch.testing.assert_close(ops.sumexp(x, top, dim).to(wide.dtype), total, rtol=tolerance, atol=tolerance)
    lse = wide.logsumexp(dim).to(dtype)
    onehot = torch.zeros_like(wide).scatter_(dim, index.unsqueeze(dim), 1.0)
    expected = ((wide - lse.to(wide.dtype).unsqueeze(dim)).exp() - onehot) * g.to(wide.dtype).unsqueeze(dim)
    grad = ops.cross_entropy_grad(x, lse, index, g, dim)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad.to(wide.dtype), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("offsets", [[None], [0, 5]])
def test_cross_entropy_of_one_tile(dim: int, dtype: torch.dtype, offsets: list[int | None]) -> None:
    """Rows that fit into a tile, their class dim whole or in blocks that are told where they start: autograd's numbers."""
    shape = [4, 6, 3]
    shape[dim] = 10
    rows = [n for i, n in enumerate(shape) if i != dim]
    x, g, index = (f(*shape).detach() * 40).to(dtype), f(*rows).detach().to(dtype), torch.randint(0, 10, rows)
    whole = x.clone().requires_grad_()
    loss = whole.logsumexp(dim) - whole.gather(dim, index.unsqueeze(dim)).squeeze(dim)
    top, blocks = x.amax(dim), list(zip(x.chunk(len(offsets), dim), offsets, strict=True))
    total, picked = torch.zeros_like(top), torch.zeros_like(top)
    for block, offset in blocks:
        total += ops.sumexp(block, top, dim)
        picked += ops.pick(block, index, dim, offset)
    lse = total.log() + top
    grad = torch.cat([ops.cross_entropy_grad(block, lse, index, g, dim, offset) for block, offset in blocks], dim)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(lse - picked, loss.detach(), rtol=tolerance, atol=tolerance * 100)
    torch.testing.assert_close(grad, *torch.autograd.grad(loss, whole, g), rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("shape", [(4, 4), (3, 2, 2), (2, 0, 0)])
def test_exponential_of_matrices(shape: tuple[int, ...]) -> None:
    assert_equal_gradients(LIFT[aten.matrix_exp.default], torch.matrix_exp, f(*shape))
