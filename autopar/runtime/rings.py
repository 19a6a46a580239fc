"""Attention over a sequence of which every rank along an axis has a block: keys and values go round, queries stay.

In step j rank r attends to the block that started at rank r - j, while the next one is on its way to it (Liu, Zaharia,
Abbeel 2023, "Ring Attention with Blockwise Transformers"). A softmax over blocks is exact: of block j the kernel gives
out_j and the log-sum-exp lse_j of its scores, and with m the largest lse so far

    total = Σ_j exp(lse_j - m)        out = Σ_j exp(lse_j - m) · out_j / total        lse = m + log total

so a rank holds two blocks of keys and values beside its own, never all of them. The sums are in float32 where the inputs
are in 16 bits. A row that sees nothing of any block has weights 0 and the log-sum-exp 0, as in `attention`.

Backward needs out and lse of all keys alone, so every block's part of the gradients is what `attention_grad` gives for it.
The gradients of a block travel after it and are added to on the way, n - 1 hops between neighbours in the dtype of the keys;
sending every rank's part straight home would be as many bytes over longer ways. A rank's own block comes last, so nothing
of it is held or sent: its part is added to what arrives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import attention as local
from .along import Along
from .comm import Handle
from .triangle import Block, Piece, Run, pieces

Tensor = torch.Tensor
DENSE = torch.contiguous_format
Part = tuple[int, tuple[Tensor, ...]]
"""Where in a block it starts, and gradients of its keys and values."""


@dataclass(frozen=True)
class _Scores:
    """The score matrix: this rank's rows of it, and every rank's block of keys.

    rows, keys: positions of this rank's rows, and of the keys of each rank. mask: of this rank's rows, with all keys. shape,
    offsets: dropout draws by the place in the whole matrix of these sizes; offsets of the block in batch and heads.
    """

    rows: Block
    keys: tuple[Block, ...]
    mask: Tensor | None
    p: float
    causal: bool
    scale: float
    key: int
    shape: tuple[int, ...] | None
    offsets: tuple[int, ...] | None

    def pieces(self, rank: int) -> list[Piece]:
        """What the rows see of the keys of a rank."""
        return list(pieces(self.rows, self.keys[rank], self.causal))

    def mask_of(self, piece: Piece) -> Tensor | None:
        """A mask of one row or one column is one for all."""
        if self.mask is None:
            return None
        mask = self.mask if self.mask.shape[2] == 1 else self.mask.narrow(2, piece.row, piece.rows.size)
        return mask if mask.shape[3] == 1 else mask.narrow(3, piece.keys.start, piece.keys.size)

    def apply(
        self,
        function: Callable[..., Any],
        piece: Piece,
        of_rows: tuple[Tensor, ...],
        of_keys: tuple[Tensor, ...],
        results: tuple[Tensor, ...] = (),
    ) -> Any:
        """A function of `attention` on a piece; results: those of forward, for its gradients."""
        read = (*(_rows(x, piece) for x in of_rows), *(_keys(x, piece) for x in of_keys), self.mask_of(piece))
        config = (*(_rows(x, piece) for x in results), self.p, piece.triangle, self.scale)
        start = None if self.offsets is None else (*self.offsets[:2], piece.rows.start, piece.keys.start)
        return function(*read, *config, key=self.key, shape=self.shape, offsets=start)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float,
    offset: int = 0,
    key: int = 0,
    shape: tuple[int, ...] | None = None,
    offsets: tuple[int, ...] | None = None,
    *,
    along: Along,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's rows; k and v are its blocks. The other arguments are those of `attention.attention`."""
    scores = _scores(q, k, mask, p, causal, scale, offset, key, shape, offsets, along)
    merged = _Merged(q, v)

    def visit(rank: int, keys: Tensor, values: Tensor) -> None:
        for piece in scores.pieces(rank):
            merged.add(piece, *_attend(scores, piece, q, keys, values))

    _go_round(along, (k, v), visit)
    return merged.result(q.dtype)


def attention_grad(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    p: float,
    causal: bool,
    scale: float,
    offset: int = 0,
    key: int = 0,
    shape: tuple[int, ...] | None = None,
    offsets: tuple[int, ...] | None = None,
    *,
    along: Along,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, and of this rank's blocks of k and v."""
    scores = _scores(q, k, mask, p, causal, scale, offset, key, shape, offsets, along)
    dq = torch.zeros(q.shape, dtype=local.softmax_dtype(q), device=q.device)

    def visit(rank: int, keys: Tensor, values: Tensor) -> list[Part]:
        parts: list[Part] = []
        for piece in scores.pieces(rank):
            dq_part, *of_block = scores.apply(local.attention_grad, piece, (g, q), (keys, values), (out, lse))
            _rows(dq, piece).add_(dq_part)
            parts.append((piece.key, tuple(of_block)))
        return parts

    dk, dv = _go_round_and_home(along, (k, v), visit)
    return dq.to(q.dtype), dk, dv


def attention_mask_grad(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    out: Tensor,
    lse: Tensor,
    p: float,
    causal: bool,
    scale: float,
    offset: int = 0,
    key: int = 0,
    shape: tuple[int, ...] | None = None,
    offsets: tuple[int, ...] | None = None,
    *,
    along: Along,
) -> Tensor:
    """Gradient of an additive mask: this rank's rows, all keys."""
    scores = _scores(q, k, mask, p, causal, scale, offset, key, shape, offsets, along)
    size = (*q.shape[:3], k.shape[2] * along.size)
    dmask = torch.zeros(size, dtype=local.softmax_dtype(q), device=q.device)

    def visit(rank: int, keys: Tensor, values: Tensor) -> None:
        for piece in scores.pieces(rank):
            seen = _rows(dmask, piece).narrow(3, piece.keys.start, piece.keys.size)
            seen.copy_(scores.apply(local.attention_mask_grad, piece, (g, q), (keys, values), (out, lse)))

    _go_round(along, (k, v), visit)
    return dmask


class _Merged:
    """The softmax over the pieces added so far, of every row. Not yet divided by its total."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        dtype, device = local.softmax_dtype(q), q.device
        self.out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=dtype, device=device)
        self.most = torch.full(q.shape[:3], -math.inf, dtype=dtype, device=device)
        self.total = torch.zeros(q.shape[:3], dtype=dtype, device=device)

    def add(self, piece: Piece, out: Tensor, lse: Tensor) -> None:
        """Add a piece; lse is -inf where a row sees nothing of it."""
        before, total, most = (_rows(x, piece) for x in (self.out, self.total, self.most))
        new = torch.maximum(most, lse)
        finite = new.masked_fill(new == -math.inf, 0.0)
        old_share, share = (most - finite).exp_(), (lse - finite).exp_()
        before.mul_(old_share.unsqueeze(-1)).addcmul_(out, share.unsqueeze(-1))
        total.mul_(old_share).add_(share)
        most.copy_(new)

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out, lse) of all pieces; both 0 where a row has seen nothing."""
        nothing = self.total == 0
        total = self.total.masked_fill_(nothing, 1.0)
        out = self.out.div_(total.unsqueeze(-1)).to(dtype)
        return out, self.most.masked_fill_(nothing, 0.0).add_(total.log())


def _attend(scores: _Scores, piece: Piece, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of one piece, the latter -inf where a row sees nothing of it."""
    out, lse = scores.apply(local.attention, piece, (q,), (keys, values))
    hidden = local.hidden_rows(_rows(q, piece), _keys(keys, piece), scores.mask_of(piece), piece.triangle)
    return out, lse if hidden is None else lse.masked_fill(hidden, -math.inf)


def _rows(x: Tensor, piece: Piece) -> Tensor:
    return x.narrow(2, piece.row, piece.rows.size)


def _keys(x: Tensor, piece: Piece) -> Tensor:
    return x.narrow(2, piece.key, piece.keys.size)


def _scores(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float,
    offset: int,
    key: int,
    shape: tuple[int, ...] | None,
    offsets: tuple[int, ...] | None,
    along: Along,
) -> _Scores:
    """Blocks of neighbours: this rank's rows from `offset` on, the ranks' keys in their order."""
    first = offset if offsets is None else offsets[2]
    rows = (Run(first, first + q.shape[2]),)
    keys = tuple((Run(rank * k.shape[2], (rank + 1) * k.shape[2]),) for rank in range(along.size))
    return _Scores(rows, keys, mask, p, causal, scale, key, shape, offsets)


# --- the ways of blocks


def _go_round(along: Along, block: tuple[Tensor, ...], visit: Callable[..., None]) -> None:
    """visit(rank, *block) with the block of every rank along the axis, this rank's own first."""
    for step in range(along.size):
        coming = [along.start_shift(x) for x in block] if step + 1 < along.size else []
        visit((along.index - step) % along.size, *block)
        block = tuple(handle.wait() for handle in coming)


def _go_round_and_home(along: Along, block: tuple[Tensor, ...], visit: Callable[..., list[Part]]) -> tuple[Tensor, ...]:
    """visit(rank, *block) with the block of every rank, this rank's own last, gives parts of a sum for it: the sums of all ranks
    for this rank's own block. In a step the next block and the sums for the present one are under way."""
    own = block
    sums: list[Tensor] = []
    coming = [along.start_shift(x) for x in own]
    coming_sums: list[Handle[Tensor]] = []
    for step in range(1, along.size + 1):
        block = tuple(handle.wait() for handle in coming) if step < along.size else own
        coming = [along.start_shift(x) for x in block] if step + 1 < along.size else []
        parts = visit((along.index - step) % along.size, *block)
        sums = [handle.wait() for handle in coming_sums] or [torch.zeros_like(x, memory_format=DENSE) for x in own]
        _add(sums, parts)
        del parts
        coming_sums = [along.start_shift(x) for x in sums] if step < along.size else []
    return tuple(sums)


def _add(sums: Sequence[Tensor], parts: Sequence[Part]) -> None:
    """Apart, so that nothing of the parts is held by a name of a loop."""
    for start, part in parts:
        for total, x in zip(sums, part, strict=True):
            total.narrow(2, start, x.shape[2]).add_(x)
