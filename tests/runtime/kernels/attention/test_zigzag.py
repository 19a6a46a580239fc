"""Attention of a block of rows with all keys, in natural and in zigzag order, is that of the whole sequence cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.counter import ByteCounter
from autopar.runtime import run_threads
from autopar.runtime.kernels.attention import attention
from autopar.runtime.kernels.attention.triangle import pieces
from autopar.runtime.kernels.attention.zigzag import reorder, runs
from tests.runtime.kernels.attention.test_ring import agree
from tests.runtime.ring_cases import NAMES, Call, call, eager, joined, on_rank, unsharded

KINDS = ("none", "none", "bool", "float", "hidden rows")


def ordered(c: Call, order: int) -> Call:
    """The call on a sequence in zigzag order, its mask too."""
    mask = c.mask
    for dim in (2, 3):
        mask = mask if mask is None or mask.shape[dim] == 1 else reorder(mask, dim, order)
    q, k, v, g = (reorder(x, 2, order) for x in (c.q, c.k, c.v, c.g))
    return Call(q, k, v, mask, g, c.p, c.causal)


def natural(results: dict[str, Tensor], order: int) -> dict[str, Tensor]:
    """Results of it as they would be of the natural order."""
    found = {}
    for name, x in results.items():
        dims = [2, 3] if name == "dmask" else [2]
        for dim in dims:
            x = x if x.shape[dim] == 1 else reorder(x, dim, order, back=True)
        found[name] = x
    return found


def in_blocks(c: Call, blocks: int, order: int) -> dict[str, Tensor]:
    """The results of blocks of rows with all keys: rows joined, parts of gradients added up."""
    made: list[dict[str, Tensor]] = []
    for i in range(blocks):
        q, g = (x.chunk(blocks, 2)[i] for x in (c.q, c.g))
        mask = c.mask if c.mask is None or c.mask.shape[2] == 1 else c.mask.chunk(blocks, 2)[i]
        first = i * q.shape[2]
        told: dict[str, Any] = {"offset": first, "key": c.key, "order": order}
        if c.p > 0:
            told |= {"shape": c.shape, "offsets": (0, 0, first, 0)}
        out, lse = attention.attention(q, c.k, c.v, mask, *c.config, **told)
        given = (g, q, c.k, c.v, mask, out, lse, *c.config)
        made.append(dict(zip(NAMES, (out, *attention.attention_grad(*given, **told)), strict=False)) | {"lse": lse})
        if mask is not None and mask.dtype != torch.bool:
            made[-1]["dmask"] = attention.attention_mask_grad(*given, **told)
    got = {name: torch.cat([m[name] for m in made], 2) for name in ("out", "lse", "dq")}
    got |= {name: torch.stack([m[name] for m in made]).sum(0) for name in ("dk", "dv")}
    if "dmask" in made[0]:
        assert c.mask is not None
        got["dmask"] = torch.cat([m["dmask"] for m in made], 2).sum_to_size(c.mask.shape)
    return got


def sweep(examples: int, p: float, order: int, ring: bool) -> None:
    @settings(max_examples=examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        def pick(*options: object) -> object:
            return data.draw(st.sampled_from(options))

        n = pick(1, 2, 3, 4) if order else 0
        ranks = pick(1, 2, 4)
        c = call(pick, data.draw(st.integers(0, 999)), ranks * max(2 * n, 1), KINDS, p, 1 if order else 3)
        wanted = unsharded(c) if p else eager(c)
        given_call = ordered(c, n) if order else c
        if ring:
            mesh = {"cp": ranks}
            got = joined(given_call, mesh, run_threads(ranks, mesh, on_rank(given_call, mesh, n), timeout_s=60))
        else:
            got = in_blocks(given_call, ranks, n)
        agree(natural(got, n) if order else got, wanted)

    check()


@pytest.mark.few(2)
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("order", [0, 1])
def test_blocks_of_rows_are_eagers_attention(order: int, p: float) -> None:
    sweep(16, p, order, ring=False)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.4, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_ring_in_zigzag_order_is_eagers_attention(p: float) -> None:
    sweep(30, p, 1, ring=True)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_blocks_and_rings_are_eagers_attention_at_length(p: float) -> None:
    for order, ring in ((0, False), (1, False), (1, True)):
        sweep(400, p, order, ring)


# --- the order


def test_rank_r_has_the_chunk_r_from_the_front_and_the_one_from_the_back() -> None:
    assert reorder(torch.arange(8), 0, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.data())
def test_runs_say_where_reordering_puts_a_position(
    order: int, chunk: int, inner: int, lead: int, dim: int, data: st.DataObject
) -> None:
    length = 2 * order * chunk
    block = slice(start := data.draw(st.integers(0, length)), data.draw(st.integers(start, length)))
    positions = reorder(torch.arange(length), 0, order)
    found = runs(block.start, block.stop, length, order)
    assert positions[block].tolist() == [i for run in found for i in range(*run)]
    shape = [2, 3, 2]
    shape[dim] = lead * length * inner
    x = torch.randn(shape)
    wanted = x.unflatten(dim, (lead, length, inner)).index_select(dim + 1, positions).flatten(dim, dim + 2)
    got = reorder(x, dim, order, size=length, inner=inner)
    assert torch.equal(got, wanted)
    assert torch.equal(reorder(got, dim, order, back=True, size=length, inner=inner), x)


@given(st.integers(1, 8), st.integers(1, 4))
def test_every_rank_sees_as_many_keys(ranks: int, chunk: int) -> None:
    length = 2 * ranks * chunk
    size = length // ranks
    blocks = [runs(r * size, (r + 1) * size, length, ranks) for r in range(ranks)]
    whole = runs(0, length, length, 0)
    seen = [
        sum(
            p.rows.size * (p.rows.size + 1) // 2 if p.triangle else p.rows.size * p.keys.size
            for p in pieces(b, whole, True)
        )
        for b in blocks
    ]
    assert len(set(seen)) == 1
    assert sum(seen) == length * (length + 1) // 2


def test_a_block_of_rows_makes_no_scores() -> None:
    """64 rows at the end of 4096 keys: their scores alone would be 2 MB a head."""
    q, k = torch.randn(1, 2, 64, 16), torch.randn(1, 2, 4096, 16)
    with ByteCounter() as counter:
        out, lse = attention.attention(q, k, k, None, 0.0, True, 1.0, offset=4032)
        assert counter.peak < 64 * 1024
        counter.restart()
        attention.attention_grad(out, q, k, k, None, out, lse, 0.0, True, 1.0, offset=4032)
        assert counter.peak < 5 * k.nbytes
    assert math.isfinite(float(out.sum()))
