"""Rules of the semantic ops: contractions, attention, norms, losses, embedding, recurrence."""

from __future__ import annotations

import math
from typing import Any

from autopar.ir.call import OpCall, Operand
from autopar.ir.rule import Labels, Rule, parse_rule
from autopar.ops.registry import Block, Gemm, Maker, Offset, register

_LEAD = ("b", "s", "t", "u", "v", "x")


# --- contractions -------------------------------------------------------------------------------------------------------


def _gemm(call: OpCall, rule: Rule) -> Gemm:
    """FLOPs = 2 · product of all factors; m, n, k: result factors of the first, of the second operand, contracted."""
    first, second = ({f for dim in labels or () for f in dim} for labels in rule.operands[:2])
    out = {f for dim in rule.results[0] or () for f in dim}
    m = tuple(f for f in rule.factors if f in first and f in out)
    n = tuple(f for f in rule.factors if f in second and f in out and f not in first)
    k = tuple(f for f in rule.factors if f in first and f in second and f not in out)
    return 2.0 * math.prod(f.size for f in rule.factors.values()), "matmul", (m, n, k)


def _lead(call: OpCall, operand: int = 0) -> str:
    return " ".join(_LEAD[: len(call.shapes[operand]) - 1])


@register("autopar.linear", work=_gemm)
def linear(call: OpCall) -> Rule:
    """Column parallel: shard o. Row parallel: shard i, the result is a partial sum."""
    lead = _lead(call)
    return parse_rule(f"{lead} i, o i -> {lead} o", call.shapes, call.out_shapes)


@register("autopar.linear_dx", work=_gemm)
def linear_dx(call: OpCall) -> Rule:
    """Contracts the output features."""
    lead = _lead(call)
    return parse_rule(f"{lead} o, o i -> {lead} i", call.shapes, call.out_shapes)


@register("autopar.linear_dw", work=_gemm)
def linear_dw(call: OpCall) -> Rule:
    """Contracts every batch dim: a sharded batch leaves a partial sum of gradients."""
    lead = _lead(call)
    return parse_rule(f"{lead} o, {lead} i -> o i", call.shapes, call.out_shapes)


@register("autopar.einsum", work=_gemm)
def einsum(call: OpCall) -> Rule:
    """The equation is the rule."""
    left, out = call["equation"].split("->")
    terms = [" ".join(t) or "1" for t in (*left.split(","), out)]
    return parse_rule(f"{', '.join(terms[:-1])} -> {terms[-1]}", call.shapes, call.out_shapes)


@register("aten.mm", work=_gemm)
def mm(call: OpCall) -> Rule:
    """Matrix product."""
    return parse_rule("i k, k j -> i j", call.shapes, call.out_shapes)


@register("aten.bmm", work=_gemm)
def bmm(call: OpCall) -> Rule:
    """Batched matrix product."""
    return parse_rule("b i k, b k j -> b i j", call.shapes, call.out_shapes)


# --- attention ----------------------------------------------------------------------------------------------------------


def _attention_labels(call: OpCall) -> tuple[Maker, dict[str, Labels], list[Labels | None]]:
    q, k, v = (call.type_of(n) for n in "qkv")
    assert q is not None
    assert k is not None
    assert v is not None
    make = Maker()
    b, heads, s, d = q.shape
    kv, t, e = k.shape[1], k.shape[2], v.shape[3]
    head = (*make.add("h", kv), *make.add("r", heads // kv, whole=True))
    batch, query = make.add("b", b), make.add("s", s)
    key, width = make.add("t", t, whole=True), make.add("d", d, whole=True)
    value = make.add("e", e, whole=True)
    kv_head = make.add("h", kv)
    table: dict[str, Labels] = {
        "q": (batch, head, query, width),
        "k": (batch, kv_head, key, width),
        "v": (batch, kv_head, key, value),
        "out": (batch, head, query, value),
        "g": (batch, head, query, value),
        "lse": (batch, head, query),
    }
    mask = call.type_of("mask")
    if mask is not None:
        full = (batch, head, query, key)
        table["mask"] = tuple(() if n == 1 else dim for n, dim in zip(mask.shape, full, strict=True))
    table["score"] = (batch, head, query, key)
    operands = [table[n] for n in ("g", "q", "k", "v", "mask", "out", "lse") if isinstance(call.get(n), Operand)]
    return make, table, list(operands)


def _attention_work(call: OpCall, rule: Rule) -> Gemm:
    q, k, v = (call.type_of(n) for n in "qkv")
    assert q is not None
    assert k is not None
    assert v is not None
    b, h, s, d = q.shape
    products = 2 if call.op == "autopar.attention" else 5
    flops = products * b * h * s * k.shape[2] * (d + v.shape[3]) * (0.5 if call["causal"] else 1.0)
    return flops, "attention", (("t",), ("d",))


def _attention_block(block: Block) -> dict[str, Any]:
    call = block.call
    changed: dict[str, Any] = {}
    if call["causal"]:
        changed["offset"] = block.offset("s")
    if call["p"] > 0:
        q, k = call.type_of("q"), call.type_of("k")
        assert q is not None
        assert k is not None
        changed["shape"] = (*q.shape[:3], k.shape[2])
        _, table, _ = _attention_labels(call)
        changed["offsets"] = block.offsets(table["score"])
    return changed


@register("autopar.attention", work=_attention_work, localize=_attention_block)
def attention(call: OpCall) -> Rule:
    """Batch, (key/value) heads and query rows can be sharded; keys stay whole."""
    make, table, operands = _attention_labels(call)
    return make.rule(operands, [table["out"], table["lse"]])


@register("autopar.attention_grad", work=_attention_work, localize=_attention_block)
def attention_grad(call: OpCall) -> Rule:
    """Sharded query rows leave partial gradients of keys and values."""
    make, table, operands = _attention_labels(call)
    return make.rule(operands, [table["q"], table["k"], table["v"]])


@register("autopar.attention_mask_grad", work=_attention_work, localize=_attention_block)
def attention_mask_grad(call: OpCall) -> Rule:
    """Gradient of the mask at full size."""
    make, table, operands = _attention_labels(call)
    return make.rule(operands, [table["score"]])


# --- normalisation --------------------------------------------------------------------------------------------------------


def _norm(call: OpCall) -> tuple[Maker, Labels, Labels, Labels]:
    """(make, labels of x, of statistics, of the weight)."""
    x = call.type_of("x")
    assert x is not None
    make = Maker()
    split = len(x.shape) - call["ndim"]
    labels = make.dims(x.shape, whole=set(range(split, len(x.shape))))
    return make, labels, (*labels[:split], *((),) * call["ndim"]), labels[split:]


def _norm_operands(call: OpCall, labels: dict[str, Labels]) -> list[Labels | None]:
    return [labels[n] for n, a in call.arguments.items() if isinstance(a, Operand)]


@register("autopar.rms_norm", "autopar.layer_norm", "autopar.rms_norm_dx", "autopar.layer_norm_dx", "autopar.norm_dw")
def norm(call: OpCall) -> Rule:
    """The normalised dims stay whole; gradients of the weight are sums over the others."""
    make, x, stat, weight = _norm(call)
    operands = _norm_operands(call, {"x": x, "g": x, "w": weight, "b": weight, "mean": stat, "rstd": stat})
    by_op: dict[str, list[Labels | None]] = {
        "rms_norm": [x, stat],
        "layer_norm": [x, stat, stat],
        "rms_norm_dx": [x],
        "layer_norm_dx": [x],
        "norm_dw": [weight],
    }
    return make.rule(operands, by_op[call.op.split(".")[1]])


# --- loss -----------------------------------------------------------------------------------------------------------------


def _rows(call: OpCall, shape: tuple[int, ...]) -> tuple[Maker, Labels, Labels]:
    """(make, labels with the class factor v at `dim`, labels of rows)."""
    make = Maker()
    dim = int(call["dim"]) % len(shape)
    labels = tuple(make.add("v" if i == dim else f"d{i}", n) for i, n in enumerate(shape))
    return make, labels, tuple(d for i, d in enumerate(labels) if i != dim)


def _class_offset(block: Block) -> dict[str, Any]:
    return {"offset": block.offset("v")} if "v" in block.rule.factors else {}


@register("autopar.sumexp")
def sumexp(call: OpCall) -> Rule:
    """A sharded class dim leaves a partial sum; the maximum must be whole."""
    make, x, row = _rows(call, call.shapes[0])
    return make.rule([x, row], [row])


@register("autopar.pick", localize=_class_offset)
def pick(call: OpCall) -> Rule:
    """Each block contributes the entries it holds: a partial sum over a sharded class dim."""
    make, x, row = _rows(call, call.shapes[0])
    return make.rule([x, row], [row])


@register("autopar.pick_grad", localize=lambda b: {"size": b.result_shape()[b.call["dim"]], **_class_offset(b)})
def pick_grad(call: OpCall) -> Rule:
    """Each block places the entries it holds."""
    out = call.out_shapes[0]
    assert out is not None
    make, x, row = _rows(call, out)
    return make.rule([row, row], [x])


@register("autopar.cross_entropy_grad", localize=_class_offset)
def cross_entropy_grad(call: OpCall) -> Rule:
    """Local in the class dim once log-sum-exp is whole."""
    make, x, row = _rows(call, call.shapes[0])
    return make.rule([x, row, row, row], [x])


# --- embedding ------------------------------------------------------------------------------------------------------------


def _table_offset(block: Block) -> dict[str, Any]:
    offset = block.offset("v")
    return {"offset": offset if isinstance(offset, Offset) else None}


@register("autopar.embedding", localize=_table_offset)
def embedding(call: OpCall) -> Rule:
    """A sharded vocabulary leaves partial sums (zero rows elsewhere); the hidden dim passes."""
    make = Maker()
    index = tuple(make.add(f"d{i}", n) for i, n in enumerate(call.shapes[1]))
    v, h = make.add("v", call.shapes[0][0]), make.add("h", call.shapes[0][1])
    return make.rule([(v, h), index], [(*index, h)])


@register("autopar.embedding_grad", localize=lambda b: {"rows": b.result_shape()[0], **_table_offset(b)})
def embedding_grad(call: OpCall) -> Rule:
    """Sums over the batch; each block of the vocabulary takes its own rows."""
    make = Maker()
    index = tuple(make.add(f"d{i}", n) for i, n in enumerate(call.shapes[1]))
    out = call.out_shapes[0]
    assert out is not None
    v, h = make.add("v", out[0]), make.add("h", out[1])
    return make.rule([(*index, h), index], [(v, h)])


# --- recurrence -------------------------------------------------------------------------------------------------------------


@register("autopar.rnn", "autopar.rnn_grad")
def rnn(call: OpCall) -> Rule:
    """Only the batch shards; gradients of the weights are sums over it."""
    make = Maker()
    x = call.type_of("x")
    assert x is not None
    b = make.add("b", x.shape[1])
    table: dict[str, Labels] = {
        "x": ((), b, ()),
        "h0": (b, ()),
        "c0": (b, ()),
        "w_ih": ((), ()),
        "w_hh": ((), ()),
        "b_ih": ((),),
        "b_hh": ((),),
        "g_out": ((), b, ()),
        "g_h": (b, ()),
        "g_c": (b, ()),
    }
    operands: list[Labels | None] = [table[n] for n, a in call.arguments.items() if isinstance(a, Operand)]
    if call.op == "autopar.rnn":
        return make.rule(operands, [table["x"], table["h0"], table["h0"]])
    return make.rule(operands, [table[n] for n in ("x", "h0", "c0", "w_ih", "w_hh", "b_ih", "b_hh")])
