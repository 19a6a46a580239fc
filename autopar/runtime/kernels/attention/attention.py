"""Scaled dot-product attention as emitted programs call it: a rank's rows, all keys or a block of them that goes round.

What the rows see of a block of keys is cut into pieces (`triangle`) that one kernel each does (`scores`): of block j it gives
out_j and the log-sum-exp lse_j of its scores. A softmax over pieces is exact: with m the largest lse so far

    total = Σ_j exp(lse_j - m)        out = Σ_j exp(lse_j - m) · out_j / total        lse = m + log total

The sums are in float32 where the inputs are in 16 bits. A row that sees nothing has weights 0 and the log-sum-exp 0.

Backward needs out and lse of all keys alone, so a piece's part of the gradients is what its kernel gives. With `along` the
keys and values of the axis' ranks come one block after the other (`rings`), queries stay where they are: ring attention
(Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers").
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...comm.axis_comm import Along
from ..draws import Key
from . import scores as kernels
from .plain_scores import softmax_dtype
from .rings import Blocks, Part, go_round, go_round_and_home, turns
from .triangle import Block, Piece, Run, pieces
from .zigzag import Turned, runs

Tensor = torch.Tensor


@dataclass(frozen=True)
class _Scores:
    """The scores of this rank's rows, or of some of their heads, with the keys of all ranks.

    heads: of the queries. rows, keys: positions of this rank's rows, and of the keys of each rank. mask: of this rank's rows and
    heads, with all keys. shape, offsets: dropout draws by the place among all scores, which are so many; where this rank's
    start in batch and heads.
    """

    heads: Run
    rows: Block
    keys: tuple[Block, ...]
    mask: Tensor | None
    p: float
    causal: bool
    scale: float
    key: Key
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def pieces(self, rank: int) -> list[Piece]:
        """The pieces of the keys of a rank that the rows see."""
        before = sum(run.size for block in self.keys[:rank] for run in block)
        return list(pieces(self.rows, self.keys[rank], self.causal, before))

    @property
    def key_count(self) -> int:
        """Keys of all ranks."""
        return sum(run.size for block in self.keys for run in block)

    def in_turns(self, count: int) -> list[_Scores]:
        """Some heads after the others."""
        size = self.heads.size // count
        return [replace(self, heads=Run(start, start + size)) for start in range(0, self.heads.size, size)]

    def of(self, x: Tensor, piece: Piece) -> Tensor:
        """The part of a tensor (batch, heads, rows, …) that a piece is about."""
        return x.narrow(1, self.heads.start, self.heads.size).narrow(2, piece.row, piece.rows.size)

    def mask_of(self, piece: Piece) -> Tensor | None:
        """The same of the mask. One of one head, row or column is one for all."""
        mask = self.mask
        if mask is not None:
            mask = mask if mask.shape[1] == 1 else mask.narrow(1, self.heads.start, self.heads.size)
            mask = mask if mask.shape[2] == 1 else mask.narrow(2, piece.row, piece.rows.size)
            mask = mask if mask.shape[3] == 1 else mask.narrow(3, piece.column, piece.keys.size)
        return mask

    def apply(
        self,
        kernel: Callable[..., Any],
        piece: Piece,
        of_rows: tuple[Tensor, ...],
        of_keys: tuple[Tensor, ...],
        results: tuple[Tensor, ...] = (),
    ) -> Any:
        """A kernel on a piece; results: those of forward, for its gradients. of_keys: of these heads alone."""
        keys = (x.narrow(2, piece.key, piece.keys.size) for x in of_keys)
        read = (
            *(self.of(x, piece) for x in of_rows),
            *keys,
            self.mask_of(piece),
            *(self.of(x, piece) for x in results),
        )
        batch, head = self.offsets[0], self.offsets[1] + self.heads.start
        place = {"shape": self.shape, "offsets": (batch, head, piece.rows.start, piece.keys.start)}
        return kernel(*read, self.p, piece.triangle, self.scale, key=self.key, **place)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float,
    order: int = 0,
    offset: int = 0,
    key: Key = 0,
    shape: tuple[int, ...] | None = None,
    offsets: tuple[int, ...] | None = None,
    *,
    along: Along | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (out: like q with v's head dim, lse: (batch, heads, query) float).

    order: that rows and keys are in (`zigzag`). offset: first row of the sequence that is in q, in this order (causal masks).
    key, shape, offsets: dropout on the weights. along: the axis whose ranks have the keys and values, k and v being this
    rank's block.
    """
    turned = _turned(q, k, order, along)
    q, k, v, mask = turned.back(q), turned.keys_back(k), turned.keys_back(v), turned.mask_back(mask)
    order, offsets = order - turned.rows, offsets or (0, 0, offset, 0)
    if along is None and (only := _only_piece(q.shape[2], k.shape[2], causal, order, offsets[2])) is not None:
        place = (*offsets[:2], only.rows.start, 0)
        out, lse = kernels.attend(q, k, v, mask, p, only.triangle, scale, key, shape, place)
        return turned.forth(out), turned.forth(lse)
    scores = _scores(q, k, mask, p, causal, scale, order, key, shape, offsets, along)
    merged, heads, blocks = _Merged(q, v), *_in_turns(scores, k, v, along)

    def visit(turn: int, rank: int, keys: Tensor, values: Tensor) -> None:
        for piece in scores.pieces(rank):
            merged.add(heads[turn], piece, q, keys, values)

    go_round(along, blocks, visit)
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
    order: int = 0,
    offset: int = 0,
    key: Key = 0,
    shape: tuple[int, ...] | None = None,
    offsets: tuple[int, ...] | None = None,
    *,
    along: Along | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    turned = _turned(q, k, order, along)
    g, q, out, lse = map(turned.back, (g, q, out, lse))
    k, v = map(turned.keys_back, (k, v))
    mask = turned.mask_back(mask)
    order, offsets = order - turned.rows, offsets or (0, 0, offset, 0)
    if along is None and (only := _only_piece(q.shape[2], k.shape[2], causal, order, offsets[2])) is not None:
        place = (*offsets[:2], only.rows.start, 0)
        dq, dk, dv = kernels.attend_grad(g, q, k, v, mask, out, lse, p, only.triangle, scale, key, shape, place)
        return turned.forth(dq), turned.keys_forth(dk), turned.keys_forth(dv)
    scores = _scores(q, k, mask, p, causal, scale, order, key, shape, offsets, along)
    dq = torch.zeros(q.shape, dtype=softmax_dtype(q), device=q.device)
    heads, blocks = _in_turns(scores, k, v, along)

    def visit(turn: int, rank: int, keys: Tensor, values: Tensor) -> list[Part]:
        return [of_piece(heads[turn], piece, keys, values) for piece in scores.pieces(rank)]

    def of_piece(scores: _Scores, piece: Piece, keys: Tensor, values: Tensor) -> Part:
        dq_part, dk_part, dv_part = scores.apply(kernels.attend_grad, piece, (g, q), (keys, values), (out, lse))
        scores.of(dq, piece).add_(dq_part)
        return piece.key, (dk_part, dv_part)

    dk, dv = (_joined(of_turns) for of_turns in zip(*go_round_and_home(along, blocks, visit), strict=True))
    return turned.forth(dq.to(q.dtype)), turned.keys_forth(dk), turned.keys_forth(dv)


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
    order: int = 0,
    offset: int = 0,
    key: Key = 0,
    shape: tuple[int, ...] | None = None,
    offsets: tuple[int, ...] | None = None,
    *,
    along: Along | None = None,
) -> Tensor:
    """Gradient of an additive mask, at full size (batch, heads, query, all keys), in the dtype of the scores."""
    turned = _turned(q, k, order, along)
    g, q, out, lse = map(turned.back, (g, q, out, lse))
    k, v = map(turned.keys_back, (k, v))
    turned_mask = turned.mask_back(mask)
    offsets = offsets or (0, 0, offset, 0)
    scores = _scores(q, k, turned_mask, p, causal, scale, order - turned.rows, key, shape, offsets, along)
    dmask = torch.zeros((*q.shape[:3], scores.key_count), dtype=softmax_dtype(q), device=q.device)
    heads, blocks = _in_turns(scores, k, v, along)

    def visit(turn: int, rank: int, keys: Tensor, values: Tensor) -> None:
        for piece in scores.pieces(rank):
            seen = heads[turn].of(dmask, piece).narrow(3, piece.column, piece.keys.size)
            seen.copy_(heads[turn].apply(kernels.mask_grad, piece, (g, q), (keys, values), (out, lse)))

    go_round(along, blocks, visit)
    return turned.scores_forth(dmask)


class _Merged:
    """The softmax over the pieces added so far, of every row. Not yet divided by its total."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        dtype, device = softmax_dtype(q), q.device
        self.out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=dtype, device=device)
        self.most = torch.full(q.shape[:3], -math.inf, dtype=dtype, device=device)
        self.total = torch.zeros(q.shape[:3], dtype=dtype, device=device)

    def add(self, scores: _Scores, piece: Piece, q: Tensor, keys: Tensor, values: Tensor) -> None:
        """Attend to a piece too."""
        out, lse = scores.apply(kernels.attend, piece, (q,), (keys, values))
        hidden = kernels.hidden_rows(lse, scores.mask_of(piece), piece.triangle)
        lse = lse if hidden is None else lse.masked_fill(hidden, -math.inf)
        before, total, most = (scores.of(x, piece) for x in (self.out, self.total, self.most))
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


def _in_turns(scores: _Scores, k: Tensor, v: Tensor, along: Along | None) -> tuple[list[_Scores], Blocks]:
    """The scores and this rank's keys and values of every turn in which they go round."""
    count = turns(along, (k, v))
    return scores.in_turns(count), list(zip(k.chunk(count, 1), v.chunk(count, 1), strict=True))


def _joined(of_turns: tuple[Tensor, ...]) -> Tensor:
    return of_turns[0] if len(of_turns) == 1 else torch.cat(of_turns, 1)


def _turned(q: Tensor, k: Tensor, order: int, along: Along | None) -> Turned:
    """Keys that are all here are put back in their natural order, and rows where all are: each is then one run."""
    return Turned(0, 0) if along is not None else Turned(order if q.shape[2] == k.shape[2] else 0, order)


@functools.cache
def _only_piece(rows: int, keys: int, causal: bool, order: int, start: int) -> Piece | None:
    """The piece that is so many rows, from a place in an order of the sequence on, and all keys, which needs no merging. Every
    call of a step asks for the same, and looking takes longer than a small block's scores."""
    seen = list(pieces(runs(start, start + rows, keys, order), runs(0, keys, keys, 0), causal))
    return seen[0] if [(piece.rows.size, piece.keys.size) for piece in seen] == [(rows, keys)] else None


def _scores(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float,
    order: int,
    key: Key,
    shape: tuple[int, ...] | None,
    offsets: tuple[int, ...],
    along: Along | None,
) -> _Scores:
    """This rank's rows from offsets[2] on in an order of the sequence, and the ranks' blocks of keys in it. Keys that are all
    here are in their natural order."""
    ranks, size = 1 if along is None else along.size, k.shape[2]
    rows = runs(offsets[2], offsets[2] + q.shape[2], ranks * size, order)
    order_of_keys = 0 if along is None else order
    keys = tuple(runs(rank * size, (rank + 1) * size, ranks * size, order_of_keys) for rank in range(ranks))
    heads = Run(0, q.shape[1])
    return _Scores(heads, rows, keys, mask, p, causal, scale, key, shape or (*q.shape[:3], ranks * k.shape[2]), offsets)
