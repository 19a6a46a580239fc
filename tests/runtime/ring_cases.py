"""Attention cut over ranks: random calls of it, what every rank holds, and what eager PyTorch makes of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.runtime.comm.axis_comm import Along
from autopar.runtime.comm.comm import Comm
from autopar.runtime.kernels.attention import attention

NAMES = ("out", "dq", "dk", "dv", "dmask")


@dataclass(frozen=True)
class Call:
    """One attention: tensors of the whole sequence and how it is called; g: the gradient of the result."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    g: Tensor
    p: float
    causal: bool
    scale: float = 0.5
    key: int = 7

    @property
    def config(self) -> tuple[float, bool, float]:
        return self.p, self.causal, self.scale

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the scores."""
        return (*self.q.shape[:3], self.k.shape[2])


def call(
    pick: Callable[..., Any], seed: int, ranks: int, kinds: tuple[str, ...], p: float = 0.0, longest: int = 3
) -> Call:
    """A call whose rows and keys `ranks` divides. kinds: of masks. pick(*options) decides."""
    generator = torch.Generator().manual_seed(seed)

    def f(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    b, kv, repeat = pick(1, 2), pick(1, 2), pick(1, 2)
    s, t = ranks * pick(*range(1, longest + 1)), ranks * pick(*range(1, longest + 1))
    d, e = pick((4, 4), (4, 3))
    q, k, v = f(b, kv * repeat, s, d), f(b, kv, t, d), f(b, kv, t, e)
    if pick(True, False):
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    mask, kind = None, pick(*kinds)
    if kind != "none":
        shape = [pick(1, n) for n in (b, kv * repeat, s, t)]
        mask = f(*shape)
        hidden = mask < pick(-0.5, 0.5)
        if kind in ("hidden rows", "hidden blocks"):
            block = t // ranks
            hidden[..., : 1 + s // 2 if shape[2] > 1 else 1, : t if kind == "hidden rows" else block] = True
        mask = mask if kind == "float" else ~hidden
        if kind == "float" and pick(True, False):
            mask = mask.masked_fill(hidden, -math.inf)
    return Call(q, k, v, mask, f(b, kv * repeat, s, e), p, pick(True, False))


def eager(c: Call) -> dict[str, Tensor]:
    """The results and gradients of scaled_dot_product_attention and autograd for a call."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (c.q, c.k, c.v))
    mask = c.mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.detach().clone().requires_grad_()
    leaves = [q, k, v] + ([mask] if mask is not None and mask.requires_grad else [])
    seen = mask
    if c.causal:
        past = torch.ones(c.shape[2:], dtype=torch.bool).tril()
        if mask is None:
            seen = past
        else:
            seen = mask & past if mask.dtype == torch.bool else mask.masked_fill(~past, -math.inf)
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q, k, v, seen, scale=c.scale, enable_gqa=True)
    grads = torch.autograd.grad(out, leaves, c.g)
    return dict(zip(NAMES, (out.detach(), *grads), strict=False))


def unsharded(c: Call) -> dict[str, Tensor]:
    """The results and gradients of the runtime's attention for a call on one rank."""
    drawn = {"key": c.key}
    out, lse = attention.attention(c.q, c.k, c.v, c.mask, *c.config, **drawn)
    given = (c.g, c.q, c.k, c.v, c.mask, out, lse, *c.config)
    return dict(zip(NAMES, (out, *attention.attention_grad(*given, **drawn)), strict=False)) | {"lse": lse}


def on_rank(c: Call, mesh: Mapping[str, int], order: int = 0) -> Callable[[Comm], dict[str, Tensor]]:
    """Rows cut over every axis of the mesh, keys over `cp`, which carries: what one rank makes, by name. order: that the
    sequence is in."""
    every = tuple(mesh)

    def cut(x: Tensor, dim: int, parts: int, index: int) -> Tensor:
        return x.chunk(parts, dim)[index]

    def run(comm: Comm) -> dict[str, Tensor]:
        along = Along(comm, "cp")
        parts, row = comm.axis_size(every), comm.axis_index(every)
        q, g = (cut(x, 2, parts, row) for x in (c.q, c.g))
        k, v = (cut(x, 2, along.size, along.index) for x in (c.k, c.v))
        mask = c.mask if c.mask is None or c.mask.shape[2] == 1 else cut(c.mask, 2, parts, row)
        first = row * q.shape[2]
        told: dict[str, Any] = {"offset": first, "key": c.key, "along": along, "order": order}
        if c.p > 0:
            told |= {"shape": c.shape, "offsets": (0, 0, first, 0)}
        out, lse = attention.attention(q, k, v, mask, *c.config, **told)
        given = (g, q, k, v, mask, out, lse, *c.config)
        got = dict(zip(NAMES, (out, *attention.attention_grad(*given, **told)), strict=False)) | {"lse": lse}
        if mask is not None and mask.dtype != torch.bool:
            got["dmask"] = attention.attention_mask_grad(*given, **told)
        return got

    return run


def joined(c: Call, mesh: Mapping[str, int], results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole out of what ranks have; axes but `cp` come first, so a rank's number is its place among the rows."""
    keys = mesh["cp"]
    got = {name: torch.cat([r[name] for r in results], 2) for name in ("out", "lse", "dq")}
    for name in ("dk", "dv"):
        sums = [torch.cat([r[name] for r in results[i : i + keys]], 2) for i in range(0, len(results), keys)]
        got[name] = torch.stack(sums).sum(0)
    if "dmask" in results[0]:
        assert c.mask is not None
        got["dmask"] = torch.cat([r["dmask"] for r in results], 2).sum_to_size(c.mask.shape)
    return got
