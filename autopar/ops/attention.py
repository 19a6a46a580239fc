"""Scaled dot-product attention: one op forward, one for the gradients of queries, keys and values, one for a mask's.

Batch, key/value heads and query rows can be sharded; keys stay whole, or are cut along one axis together with the rows
(`+s+t`, a ring: `autopar.runtime.kernels.attention.attention`). A mask keeps all its columns, which have a factor of their
own. A block of query rows needs its offset for the causal triangle, and its place in the whole score matrix for dropout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd import Function

from autopar.ir.call import OpCall, Operand
from autopar.ir.rule import Carried, Labels, Rule
from autopar.ir.sent import Sent
from autopar.ops.attention_pieces import merged
from autopar.ops.dialect import empty_like, graph_op, lifts
from autopar.ops.labels import Maker
from autopar.ops.random import next_site
from autopar.ops.registry import Block, Drawn, Gemm, Sending, define
from autopar.runtime.comm.devices import Device
from autopar.runtime.kernels.attention import attention as local
from autopar.runtime.kernels.attention.plain_scores import softmax_dtype
from autopar.runtime.kernels.attention.rings import turn_count
from autopar.runtime.kernels.attention.zigzag import runs
from autopar.runtime.kernels.kernels import AttentionCall, attention_kernels

Tensor = torch.Tensor
aten = torch.ops.aten
_CONFIG = "float p, bool causal, float scale, int site, int order=0"
_GRAD = f"(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, {_CONFIG})"

define("aten.scaled_dot_product_attention", precision="low", low_operands=3)


def _attention_labels(call: OpCall) -> tuple[Maker, dict[str, Labels], list[Labels | None]]:
    q, k, v = (call.operand(name) for name in "qkv")
    make = Maker()
    b, heads, s, d = q.shape
    kv, t, e = k.shape[1], k.shape[2], v.shape[3]
    head = (*make.add("h", kv), *make.add("r", heads // kv, whole=True))
    batch, query = make.add("b", b), make.add("s", s)
    key, width = make.add("t", t, whole=True), make.add("d", d, whole=True)
    value, column = make.add("e", e, whole=True), make.add("u", t, whole=True)
    kv_head = make.add("h", kv)
    table: dict[str, Labels] = {
        "q": (batch, head, query, width),
        "k": (batch, kv_head, key, width),
        "v": (batch, kv_head, key, value),
        "out": (batch, head, query, value),
        "g": (batch, head, query, value),
        "lse": (batch, head, query),
        "score": (batch, head, query, column),
    }
    mask = call.type_of("mask")
    if mask is not None:
        table["mask"] = tuple(() if n == 1 else dim for n, dim in zip(mask.shape, table["score"], strict=True))
    operands = [table[n] for n in ("g", "q", "k", "v", "mask", "out", "lse") if isinstance(call.get(n), Operand)]
    return make, table, list(operands)


def _attention_work(call: OpCall, rule: Rule) -> Gemm:
    q, k, v = (call.operand(name) for name in "qkv")
    b, h, s, d = q.shape
    forward = call.op == "autopar.attention"
    products = 2 if forward else 5
    flops = products * b * h * s * k.shape[2] * (d + v.shape[3]) * (0.5 if call["causal"] else 1.0)
    return flops, "attention" if forward else "attention_grad", (("t",), ("d",))


_INSTRUCTIONS = 23
"""The instructions that dropout adds for a score, a quarter of a hash among them: the mean of the kernels for heads of 64 as
compiled for sm80 and sm90."""


def _drawn(call: OpCall, device: Device) -> Drawn | None:
    """The hashes of dropout where a kernel makes them. Its backward makes scores, weights and hashes twice, for dq and
    for dk and dv, which are seven products instead of five."""
    q, k, v, mask = call.operand("q"), call.operand("k"), call.operand("v"), call.type_of("mask")
    facts = AttentionCall(q.dtype, q.shape[3], v.shape[3], mask.dtype if mask else None, call["causal"], call["p"] > 0)
    if attention_kernels(facts, device)[0] != "dropped":
        return None
    times, products = (1, 1.0) if call.op == "autopar.attention" else (2, 7 / 5)
    scores = math.prod(q.shape[:3]) * k.shape[2] * (0.5 if call["causal"] else 1.0)
    return Drawn(products, times * scores * _INSTRUCTIONS)


def _attention_block(block: Block) -> dict[str, Any]:
    call = block.call
    changed: dict[str, Any] = {}
    if call["causal"]:
        changed["offset"] = block.offset("s")
    if call["p"] > 0:
        q, k = call.operand("q"), call.operand("k")
        changed["shape"] = (*q.shape[:3], k.shape[2])
        _, table, _ = _attention_labels(call)
        changed["offsets"] = (*block.offsets(table["score"][:3]), 0)
    return changed | block.told()


def _imbalance(call: OpCall, parts: Mapping[str, int], tile: float) -> float:
    """The last of n blocks of rows that see the keys before them does n - 1 blocks of work and half of its own; on average
    they do half of n; in zigzag order all do as much. A kernel that skips keys by tiles looks at half a tile too many
    for every row."""
    if not call["causal"]:
        return 1.0
    blocks, rows = math.ceil(parts.get("s", 1)), call.operand("q").shape[2]
    run = rows / (2 * call["order"] if call["order"] else blocks)
    return _busiest_share(blocks, call["order"]) + min(tile, run) / call.operand("k").shape[2]


@functools.cache
def _busiest_share(blocks: int, order: int) -> float:
    """Keys that rows see of the block that sees most over the mean. Rows start … stop - 1 see (stop² - start²) / 2."""
    length = 2 * blocks * max(order, 1)
    size = length // blocks
    seen = [
        sum(run.stop**2 - run.start**2 for run in runs(block * size, (block + 1) * size, length, order))
        for block in range(blocks)
    ]
    return max(seen) * blocks / length**2


def _joined(call: OpCall) -> tuple[tuple[str, ...], ...]:
    """A causal mask goes by the positions of rows and keys; the columns of another mask are those of the keys."""
    columns = ("u",) if call.op == "autopar.attention_mask_grad" or _has_columns(call) else ()
    return (("s", "t", *columns),) if call["causal"] else (("t", *columns),)


def _has_columns(call: OpCall) -> bool:
    mask = call.type_of("mask")
    return mask is not None and mask.shape[3] > 1


def _ordered(call: OpCall, order: int, held: frozenset[str]) -> dict[str, Any] | None:
    """Rows and keys of a causal mask in one order; without one a softmax does not mind where a key stands, but dropout does."""
    if call["causal"]:
        square = call.operand("q").shape[2] == call.operand("k").shape[2]
        return {"order": order} if square and call["order"] == 0 else None
    return {} if call["p"] == 0 else None


_RING = Carried(("s", "t"))


def _visits(call: OpCall, ranks: int) -> tuple[float, float]:
    """Shares of the work on a rank's own block, and on another one's. Under a causal mask the last rank has most to do, all of
    the others' and half of its own; in zigzag order all visits are alike."""
    own = 0.5 if call["causal"] and not call["order"] else 1.0
    return own / (ranks - 1 + own), 1 / (ranks - 1 + own)


def _in_turns(sending: Sending) -> tuple[int, float]:
    """In how many turns keys and values go round, and the bytes of one."""
    block = sending.bytes_of("k") + sending.bytes_of("v")
    count = turn_count(sending.call.operand("k").shape[1], block)
    return count, block / count


def _ring_sends(sending: Sending) -> list[Sent]:
    """Keys and values go n - 1 places on: of every turn the first time behind the work on a rank's own block, and on the last one
    of the turn before, then behind that on the block that has come."""
    n, axis, (turns, block) = sending.ranks, sending.axis, _in_turns(sending)
    own, other = _visits(sending.call, n)
    first = Sent("shift", axis, block, 1, own / turns)
    next_turns = Sent("shift", axis, block, turns - 1, (own + other) / turns)
    passed_on = Sent("shift", axis, block, turns * (n - 2), other / turns)
    return [sent for sent in (first, next_turns, passed_on) if sent.times]


def _ring_grad_sends(sending: Sending) -> list[Sent]:
    """Nothing is behind the first block that is awaited. Those after it and the sums on their way, n - 2 times of every turn,
    share the n - 1 visits to others' blocks; in the end the sums go home behind the work on a rank's own."""
    n, axis, (turns, block) = sending.ranks, sending.axis, _in_turns(sending)
    own, other = _visits(sending.call, n)
    between = 2 * turns * (n - 2) + turns - 1
    first, home = Sent("shift", axis, block), Sent("shift", axis, block, turns, own / turns)
    if not between:
        return [first, home]
    return [first, Sent("shift", axis, block, between, (n - 1) * other / between), home]


_FACTS: dict[str, Any] = {
    "work": _attention_work,
    "imbalance": _imbalance,
    "localize": _attention_block,
    "joined": _joined,
    "ordered": _ordered,
    "dear": False,
    "random": True,
    "home": "attention",
}


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float,
    site: int,
    order: int = 0,
) -> tuple[Tensor, Tensor]:
    return local.attention(q, k, v, mask, p, causal, scale, order, key=site)


def _with_key(f: Callable[..., Any]) -> Callable[..., Any]:
    """The site in the place of the key, which comes last; the order may be left out."""
    return lambda *args: f(*args[:10], *args[11:], key=args[10])


def _shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty([*q.shape[:3], v.shape[3]]), q.new_empty(q.shape[:3], dtype=softmax_dtype(q))


@graph_op(
    f"attention(Tensor q, Tensor k, Tensor v, Tensor? mask, {_CONFIG}) -> (Tensor, Tensor)",
    _forward,
    _shapes,
    result_names=("attended", "lse"),
    sends=_ring_sends,
    merged=merged,
    drawn=_drawn,
    **_FACTS,
)
def attention(call: OpCall) -> Rule:
    """Batch, (key/value) heads and query rows can be sharded; keys stay whole, or go round."""
    make, table, operands = _attention_labels(call)
    return make.rule(operands, [table["out"], table["lse"]], carried=[_RING])


@graph_op(
    f"attention_grad{_GRAD} -> (Tensor, Tensor, Tensor)",
    _with_key(local.attention_grad),
    lambda g, q, k, v, *_: (empty_like(q), empty_like(k), empty_like(v)),
    result_names=("dq", "dk", "dv"),
    sends=_ring_grad_sends,
    merged=merged,
    drawn=_drawn,
    **_FACTS,
)
def attention_grad(call: OpCall) -> Rule:
    """Sharded query rows leave partial gradients of keys and values, those that go round with these nothing."""
    make, table, operands = _attention_labels(call)
    return make.rule(operands, [table["q"], table["k"], table["v"]], carried=[_RING])


@graph_op(
    f"attention_mask_grad{_GRAD} -> Tensor",
    _with_key(local.attention_mask_grad),
    lambda g, q, k, *_: q.new_empty([*q.shape[:3], k.shape[2]], dtype=softmax_dtype(q)),
    sends=_ring_sends,
    **_FACTS,
)
def attention_mask_grad(call: OpCall) -> Rule:
    """Gradient of the mask at full size."""
    make, table, operands = _attention_labels(call)
    return make.rule(operands, [table["score"]], carried=[_RING])


class Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float, site: int
    ) -> Tensor:
        out, lse = attention(q, k, v, mask, p, causal, scale, site)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.config = (p, causal, scale, site)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        dq, dk, dv = attention_grad(g, q, k, v, mask, out, lse, *ctx.config)
        dmask = None
        if ctx.needs_input_grad[3]:
            dmask = attention_mask_grad(g, q, k, v, mask, out, lse, *ctx.config).sum_to_size(mask.shape)
        return dq, dk, dv, dmask, None, None, None, None


# --- what ATen's attention becomes


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
        if attn_mask is not None and attn_mask.ndim > 3:
            attn_mask = attn_mask.expand(*lead[:-1], *attn_mask.shape[-3:]).flatten(0, -4)
    k, v = (t if t.shape[0] == q.shape[0] else t.expand(q.shape[0], -1, -1, -1) for t in (k, v))
    k, v = (t.expand(-1, q.shape[1], -1, -1) if t.shape[1] == 1 and q.shape[1] > 1 else t for t in (k, v))
    if attn_mask is not None:
        attn_mask = attn_mask.unsqueeze(1) if len(lead) == 1 and attn_mask.ndim == 3 else attn_mask
        attn_mask = attn_mask.reshape([1] * (4 - attn_mask.ndim) + list(attn_mask.shape))
    site = next_site() if dropout_p > 0.0 else -1
    out = Attention.apply(q, k, v, attn_mask, float(dropout_p), bool(is_causal), float(scale), site)
    return out.reshape([*lead, *out.shape[-2:]])
