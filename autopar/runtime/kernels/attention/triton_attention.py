"""Attention with dropout in kernels of Triton: scores, their softmax and the hashes of its mask stay on the processors.

The formulas and their letters are those of `plain_scores`, the draws those of `draws`. Forward goes over the keys of some rows
with the largest score so far (Dao 2023, "FlashAttention-2"). Backward is two kernels: of some rows, which gives dQ and δ, and
of some keys, which sums dK and dV over the query heads of a key head. Both make P and D again.

    S = scale · Q Kᵀ + bias      P = exp(S - L)      dS = P ∘ (D ∘ dO Vᵀ - δ)

Scores and sums are in float32; a hash serves four neighbouring keys where a block of keys begins with a word.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..tiles import LOG2_E
from ..triton_dropout import hashed, kept

_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def _at(lying, batch, head, rows, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Addresses of rows of a tensor (batch, heads, rows, width). lying: where it begins, and its strides but the last, 1."""
    first = lying[0] + batch * lying[1] + head * lying[2]
    return first + rows[:, None] * lying[3] + tl.arange(0, PADDED)[None, :]


@triton.jit
def _inside(rows, row_count, WIDTH: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of these places a tensor has."""
    return (rows < row_count)[:, None] & (tl.arange(0, PADDED) < WIDTH)[None, :]


@triton.jit
def _part(lying, batch, head, rows, row_count, WIDTH: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of a tensor; zeros beyond its ends."""
    return tl.load(_at(lying, batch, head, rows, PADDED), mask=_inside(rows, row_count, WIDTH, PADDED), other=0.0)


@triton.jit
def _store(lying, batch, head, rows, row_count, value, WIDTH: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes rows of a tensor."""
    value = value.to(lying[0].dtype.element_ty)
    tl.store(_at(lying, batch, head, rows, PADDED), value, mask=_inside(rows, row_count, WIDTH, PADDED))


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    q,
    k,
    bias_lies,
    batch,
    head,
    rows,
    keys,
    row_count,
    key_count,
    scale,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """S · log2 e of some rows and keys, -inf where a row does not see a key. BIAS: "none", "seen" of a boolean mask, "added"."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * _LOG2_E)
    seen = (rows < row_count)[:, None] & (keys < key_count)[None, :]
    if BIAS != "none":
        first = bias_lies[0] + batch * bias_lies[1] + head * bias_lies[2]
        at = first + rows[:, None] * bias_lies[3] + keys[None, :] * bias_lies[4]
        bias = tl.load(at, mask=seen, other=0)
        if BIAS == "seen":
            seen = seen & (bias != 0)
        else:
            scores += bias.to(tl.float32) * _LOG2_E
    if CAUSAL:
        seen = seen & (keys[None, :] <= rows[:, None])
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _numbers(batch, head, rows, place):
    """The numbers of rows among those of all scores. place: where the block starts in these, in four dims, and their heads,
    rows and words of a row."""
    return ((batch + place[0]) * place[4] + head + place[1]) * place[5] + rows + place[2]


@triton.jit
def _kept(  # type: ignore[no-untyped-def]
    counted,
    first,
    place,
    key,
    LEAST: tl.constexpr,
    LANES: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Which weights of rows with these numbers are kept. first: the first key of the block, which begins a word where WORDS."""
    first += place[3]
    if WORDS:
        words = first // LANES + tl.arange(0, KEYS // LANES)
        hashes = hashed(counted[:, None] * place[6] + words[None, :], key)
        lane = tl.arange(0, LANES)
        keep = kept(hashes[:, :, None], lane[None, None, :], LEAST, LANES, tl.float32)
        return tl.reshape(keep, (ROWS, KEYS))
    else:
        places = first + tl.arange(0, KEYS)
        hashes = hashed(counted[:, None] * place[6] + (places // LANES)[None, :], key)
        return kept(hashes, (places % LANES)[None, :], LEAST, LANES, tl.float32)


@triton.jit(do_not_specialize=["key"])
def _forward(  # type: ignore[no-untyped-def]
    q_lies,
    k_lies,
    v_lies,
    bias_lies,
    out_lies,
    lse_ptr,
    sizes,
    scale,
    key,
    place,
    grown,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    LEAST: tl.constexpr,
    LANES: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    KEYED: tl.constexpr,
):
    """Rows of a head with all keys. key: where it lies if KEYED. grown: 1 / (1 - p)."""
    heads, row_count, key_count = sizes[0], sizes[1], sizes[2]
    key = tl.load(key) if KEYED else key
    tiles = tl.cdiv(row_count, ROWS)
    program = tl.program_id(0)
    head, batch = ((program // tiles) % heads).to(tl.int64), (program // tiles // heads).to(tl.int64)
    begin = (tiles - 1 - program % tiles) * ROWS  # the last rows, which see most keys, come first
    rows = begin.to(tl.int64) + tl.arange(0, ROWS)
    counted = _numbers(batch, head, rows, place)
    q = _part(q_lies, batch, head, rows, row_count, WIDTH, D)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, E), tl.float32)
    end = tl.minimum(begin + ROWS, key_count) if CAUSAL else key_count
    for first in range(0, end, KEYS):
        keys = tl.arange(0, KEYS).to(tl.int64) + first
        k = _part(k_lies, batch, head // GROUP, keys, key_count, WIDTH, D)
        v = _part(v_lies, batch, head // GROUP, keys, key_count, VALUE, E)
        scores = _scores(q, k, bias_lies, batch, head, rows, keys, row_count, key_count, scale, CAUSAL, BIAS, PRECISION)
        new = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - finite[:, None])
        shrunk = tl.exp2(top - finite)
        total = total * shrunk + tl.sum(weights, 1)
        keep = _kept(counted, first, place, key, LEAST, LANES, WORDS, ROWS, KEYS)
        weights = tl.where(keep, weights, 0.0).to(v.dtype)
        out = out * shrunk[:, None] + tl.dot(weights, v, input_precision=PRECISION)
        top = new
    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    _store(out_lies, batch, head, rows, row_count, out * (grown / total)[:, None], VALUE, E)
    lse = tl.where(blind, 0.0, top / _LOG2_E + tl.log(total))
    tl.store(lse_ptr + (batch * heads + head) * row_count + rows, lse, mask=rows < row_count)


@triton.jit(do_not_specialize=["key"])
def _of_rows(  # type: ignore[no-untyped-def]
    g_lies,
    q_lies,
    k_lies,
    v_lies,
    bias_lies,
    out_lies,
    lse_ptr,
    delta_ptr,
    dq_lies,
    sizes,
    scale,
    key,
    place,
    grown,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    LEAST: tl.constexpr,
    LANES: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    KEYED: tl.constexpr,
):
    """dQ and δ of some rows of a head."""
    heads, row_count, key_count = sizes[0], sizes[1], sizes[2]
    key = tl.load(key) if KEYED else key
    tiles = tl.cdiv(row_count, ROWS)
    program = tl.program_id(0)
    head, batch = ((program // tiles) % heads).to(tl.int64), (program // tiles // heads).to(tl.int64)
    begin = (tiles - 1 - program % tiles) * ROWS
    rows = begin.to(tl.int64) + tl.arange(0, ROWS)
    counted = _numbers(batch, head, rows, place)
    q = _part(q_lies, batch, head, rows, row_count, WIDTH, D)
    g = _part(g_lies, batch, head, rows, row_count, VALUE, E)
    out = _part(out_lies, batch, head, rows, row_count, VALUE, E)
    delta = tl.sum(g.to(tl.float32) * out.to(tl.float32), 1)
    at = (batch * heads + head) * row_count + rows
    tl.store(delta_ptr + at, delta, mask=rows < row_count)
    lse = tl.load(lse_ptr + at, mask=rows < row_count, other=0.0) * _LOG2_E
    dq = tl.zeros((ROWS, D), tl.float32)
    end = tl.minimum(begin + ROWS, key_count) if CAUSAL else key_count
    for first in range(0, end, KEYS):
        keys = tl.arange(0, KEYS).to(tl.int64) + first
        k = _part(k_lies, batch, head // GROUP, keys, key_count, WIDTH, D)
        v = _part(v_lies, batch, head // GROUP, keys, key_count, VALUE, E)
        scores = _scores(q, k, bias_lies, batch, head, rows, keys, row_count, key_count, scale, CAUSAL, BIAS, PRECISION)
        weights = tl.exp2(scores - lse[:, None])
        keep = _kept(counted, first, place, key, LEAST, LANES, WORDS, ROWS, KEYS)
        dweights = tl.where(keep, tl.dot(g, tl.trans(v), input_precision=PRECISION) * grown, 0.0)
        dscores = (weights * (dweights - delta[:, None])).to(k.dtype)
        dq += tl.dot(dscores, k, input_precision=PRECISION)
    _store(dq_lies, batch, head, rows, row_count, dq * scale, WIDTH, D)


@triton.jit(do_not_specialize=["key"])
def _of_keys(  # type: ignore[no-untyped-def]
    g_lies,
    q_lies,
    k_lies,
    v_lies,
    bias_lies,
    lse_ptr,
    delta_ptr,
    dk_lies,
    dv_lies,
    sizes,
    scale,
    key,
    place,
    grown,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    LEAST: tl.constexpr,
    LANES: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    KEYED: tl.constexpr,
):
    """dK and dV of some keys of a key head, with the rows of all its query heads."""
    heads, row_count, key_count = sizes[0], sizes[1], sizes[2]
    key = tl.load(key) if KEYED else key
    tiles = tl.cdiv(key_count, KEYS)
    program = tl.program_id(0)
    kv_heads = heads // GROUP
    kv_head, batch = ((program // tiles) % kv_heads).to(tl.int64), (program // tiles // kv_heads).to(tl.int64)
    begin = (program % tiles) * KEYS  # the first keys, which most rows see, come first
    keys = begin.to(tl.int64) + tl.arange(0, KEYS)
    k = _part(k_lies, batch, kv_head, keys, key_count, WIDTH, D)
    v = _part(v_lies, batch, kv_head, keys, key_count, VALUE, E)
    dk = tl.zeros((KEYS, D), tl.float32)
    dv = tl.zeros((KEYS, E), tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        for first in range(begin // ROWS * ROWS if CAUSAL else 0, row_count, ROWS):
            rows = tl.arange(0, ROWS).to(tl.int64) + first
            counted = _numbers(batch, head, rows, place)
            q = _part(q_lies, batch, head, rows, row_count, WIDTH, D)
            g = _part(g_lies, batch, head, rows, row_count, VALUE, E)
            at = (batch * heads + head) * row_count + rows
            lse = tl.load(lse_ptr + at, mask=rows < row_count, other=0.0) * _LOG2_E
            delta = tl.load(delta_ptr + at, mask=rows < row_count, other=0.0)
            scores = _scores(
                q, k, bias_lies, batch, head, rows, keys, row_count, key_count, scale, CAUSAL, BIAS, PRECISION
            )
            weights = tl.exp2(scores - lse[:, None])
            keep = _kept(counted, begin, place, key, LEAST, LANES, WORDS, ROWS, KEYS)
            dropped = tl.where(keep, weights * grown, 0.0).to(g.dtype)
            dv += tl.dot(tl.trans(dropped), g, input_precision=PRECISION)
            dweights = tl.where(keep, tl.dot(g, tl.trans(v), input_precision=PRECISION) * grown, 0.0)
            dscores = (weights * (dweights - delta[:, None])).to(q.dtype)
            dk += tl.dot(tl.trans(dscores), q, input_precision=PRECISION)
    _store(dk_lies, batch, kv_head, keys, key_count, dk * scale, WIDTH, D)
    _store(dv_lies, batch, kv_head, keys, key_count, dv, VALUE, E)
