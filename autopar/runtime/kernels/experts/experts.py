"""A mixture of experts in one op: every token's rows to the experts that it chose, their layers, and the weighted sum.

    y[t] = sum over j of weights[t, j] · expert[chosen[t, j]](x[t])
    expert[i](x) = gate(x @ w_in[i] + b_in[i]) @ w_out[i] + b_out[i]

A rank has a block of the tokens, a block of the experts, or, along an axis that sends rows (dispatch.py, padded.py), both; along
two axes rows go to a node first and then inside it (two_level_dispatch.py). It may also have a block of the inner dim. Choices
that are no number of an expert add nothing. Both ops stop while rows travel (suspended.py). Backward computes the first product
again, as the rows that a rank gets are known only while it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ...comm.axis_comm import Along
from ...comm.calls import Handle
from ...comm.suspended import Parts, whole_or_suspended
from ..gates import Gate
from ..grouped import Groups, add_outer_products, add_sums, products
from .dispatch import Promise, Spread
from .padded import legs, pieces

Tensor = torch.Tensor


def _experts(
    x: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    chosen: Tensor,
    weights: Tensor,
    act: str,
    alpha: float,
    limit: float | None,
    shift: float,
    expert_imbalance: float = 1.25,
    on_overflow: str = "stop",
    source: str = "",
    *,
    first: int = 0,
    parts: float = 1,
    inner: int = 0,
    along: Along | None = None,
    experts: int = 0,
    tokens: int = 0,
) -> Parts[Tensor]:
    """x: (…, d), chosen, weights: (…, choices), w_in: (experts, d, 1 or 2, f), b_in: (experts, 1 or 2, f), w_out: (experts,
    f, d), b_out: (experts, d) -> (…, d).

    first, parts: number of the first expert of this block, and into how many blocks as long as the longest they are cut;
    inner: of the first of its f. experts: of all ranks along the axis, where they hold unequally many; tokens: of the rank with
    the most, where it is not the same on all. Raises ExpertOverflow.
    """
    layers = _Layers(w_in, b_in, w_out, None if inner else b_out, Gate(act, alpha, limit, shift))
    promise = Promise(expert_imbalance, on_overflow, source)
    spread = _spread(first, parts, along, experts, tokens * chosen.shape[-1])
    y = yield from _mixed(layers, promise, spread, _flat(x), _flat(chosen), _flat(weights))
    return y.to(x.dtype).view(x.shape)


def _mixed(
    layers: _Layers, promise: Promise, spread: Spread, rows: Tensor, choices: Tensor, shares: Tensor
) -> Parts[Tensor]:
    """The weighted sums of rows, (tokens, d)."""
    y = rows.new_zeros(rows.shape, dtype=torch.promote_types(rows.dtype, shares.dtype))
    for leg in legs(choices, len(layers.w_in), promise, spread):
        comings = [leg.out(rows), leg.choices_out(choices), leg.out(shares)]
        yield
        here = [coming.wait() for coming in comings]
        del comings
        y_here = yield from _mixed(layers, promise, leg.inside, *here)
        del here
        returning = leg.back(y_here.to(rows.dtype))
        del y_here
        yield
        leg.add_to(y, returning.wait())
        del returning
    for piece in pieces(choices, len(layers.w_in), promise, spread):
        coming = piece.to_experts(piece.of_tokens(rows))
        yield
        arrived = coming.wait()
        del coming
        h = layers.first(arrived, piece.groups)
        del arrived
        a = layers.value(h)
        del h
        out = layers.second(a, piece.groups)
        del a
        returning = piece.back(out)
        del out
        yield
        out = returning.wait()
        del returning
        piece.add_to(y, out, shares)
        del out
    return y


def _experts_grad(
    g: Tensor,
    x: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    chosen: Tensor,
    weights: Tensor,
    of_layers: bool,
    act: str,
    alpha: float,
    limit: float | None,
    shift: float,
    expert_imbalance: float = 1.25,
    on_overflow: str = "stop",
    source: str = "",
    *,
    first: int = 0,
    parts: float = 1,
    inner: int = 0,
    along: Along | None = None,
    experts: int = 0,
    tokens: int = 0,
) -> Parts[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """The gradients of x, weights, w_in, b_in, w_out, b_out; one zero for a bias that is absent, and for all layers
    unless `of_layers`. The gradients of results come while the first product is made again, those of rows go back while
    those of layers are computed; where rows travel to nodes and then inside them, this is said of the way between nodes.
    Raises ExpertOverflow."""
    layers = _Layers(w_in, b_in, w_out, None if inner else b_out, Gate(act, alpha, limit, shift))
    grads = gradient_room(w_in, b_in, w_out, b_out, of_layers)
    for grad in grads:
        grad.zero_()
    promise, spread, to = (
        Promise(expert_imbalance, on_overflow, source, notes=False),
        _spread(first, parts, along, experts, tokens * chosen.shape[-1]),
        grads if of_layers else (),
    )
    gs, later = Handle(None, _flat(g)), list[Callable[[], None]]()
    dx, dshares = yield from _mixed_grad(
        layers, to, later, promise, spread, gs, _flat(x), _flat(chosen), _flat(weights)
    )
    return dx.to(x.dtype).view(x.shape), dshares.view(weights.shape), *grads


def _mixed_grad(
    layers: _Layers,
    grads: tuple[Tensor, ...],
    later: list[Callable[[], None]],
    promise: Promise,
    spread: Spread,
    gs: Handle[Tensor],
    rows: Tensor,
    choices: Tensor,
    shares: Tensor,
) -> Parts[tuple[Tensor, Tensor]]:
    """The gradients of rows and of the router's weights; those of layers are added to `grads`, where there are any. Inside a node
    the last of these are left to be done `later`."""
    dx = rows.new_zeros(rows.shape, dtype=torch.promote_types(rows.dtype, shares.dtype))
    dshares = torch.zeros_like(shares, memory_format=torch.contiguous_format)
    for leg in legs(choices, len(layers.w_in), promise, spread):
        comings = [leg.out(rows), leg.choices_out(choices), leg.out(shares)]
        gs_here = leg.out(gs.wait())
        yield
        here = [coming.wait() for coming in comings]
        del comings
        dx_here, dshares_here = yield from _mixed_grad(layers, grads, later, promise, leg.inside, gs_here, *here)
        del here, gs_here
        dx_coming, dshares_coming = leg.back(dx_here.to(rows.dtype)), leg.back(dshares_here)
        del dx_here, dshares_here
        _do(later)
        yield
        leg.add_to(dx, dx_coming.wait())
        leg.add_to(dshares, dshares_coming.wait())
        del dx_coming, dshares_coming
    for piece in pieces(choices, len(layers.w_in), promise, spread):
        _do(later)
        row_coming = piece.to_experts(piece.of_tokens(rows))
        g_coming = None if gs.waits else piece.to_experts(piece.of_tokens(gs.wait()))
        share_coming = piece.to_experts(shares.reshape(-1)[piece.pairs].unsqueeze(1))
        yield
        row = row_coming.wait()
        h = layers.first(row, piece.groups)
        g_coming = g_coming or piece.to_experts(piece.of_tokens(gs.wait()))
        yield
        gy, share = g_coming.wait(), share_coming.wait()
        del row_coming, g_coming, share_coming
        a, da = layers.value(h), layers.second_dx(gy, piece.groups)
        dshare = (a * da).sum(1, keepdim=True, dtype=share.dtype)
        if layers.b_out is not None:
            dshare += (gy * _of_rows(layers.b_out, piece.groups)).sum(1, keepdim=True, dtype=share.dtype)
        dshare_coming = piece.back(dshare)
        dh = layers.slope_(da.mul_(share), h)
        del da, h
        dx_coming = piece.back(layers.first_dx(dh, piece.groups))
        if grads:
            later.append(partial(layers.add_gradients, grads, row, dh, a.mul_(share), gy, share, piece.groups))
        del row, dh, a, gy, share
        if spread.mean is None:
            _do(later)
        yield
        piece.add_to(dx, dx_coming.wait())
        piece.put(dshares, dshare_coming.wait())
        del dx_coming, dshare, dshare_coming
    gs.wait()  # also where none of them chose an expert here: a message that nobody waits for may be lost
    return dx, dshares


def _spread(first: int, parts: float, along: Along | None, experts: int, pairs: int) -> Spread:
    lengths = along.lengths(experts) if along is not None and experts else ()
    return Spread(first, parts, along, lengths, pairs)


def _do(later: list[Callable[[], None]]) -> None:
    """Do the work that was put off, and forget it."""
    while later:
        later.pop()()


experts, start_experts = whole_or_suspended(_experts)
experts_grad, start_experts_grad = whole_or_suspended(_experts_grad)


@dataclass(frozen=True)
class _Layers:
    """The layers of this rank's experts, on rows sorted by expert. b_out: None also where another block adds it."""

    w_in: Tensor
    b_in: Tensor | None
    w_out: Tensor
    b_out: Tensor | None
    gate: Gate

    def first(self, rows: Tensor, groups: Groups) -> Tensor:
        """(r, d) -> what the gate takes."""
        h = products(rows, _joined(self.w_in, self.w_in), groups)
        if self.b_in is not None:
            h.add_(_of_rows(_joined(self.b_in, self.w_in), groups))
        return h if self.w_in.shape[2] == 1 else h.unflatten(1, (-1, 2) if _interleaved(self.w_in) else (2, -1))

    def first_dx(self, dh: Tensor, groups: Groups) -> Tensor:
        return products(dh.flatten(1), _joined(self.w_in, self.w_in).transpose(1, 2), groups)

    def value(self, h: Tensor) -> Tensor:
        return self.gate.value(h, _interleaved(self.w_in))

    def slope_(self, g: Tensor, h: Tensor) -> Tensor:
        return self.gate.slope_(g, h, _interleaved(self.w_in))

    def second(self, a: Tensor, groups: Groups) -> Tensor:
        """(r, f) -> (r, d)."""
        y = products(a, self.w_out, groups)
        return y if self.b_out is None else y.add_(_of_rows(self.b_out, groups))

    def second_dx(self, g: Tensor, groups: Groups) -> Tensor:
        return products(g, self.w_out.transpose(1, 2), groups)

    def add_gradients(
        self, grads: tuple[Tensor, ...], rows: Tensor, dh: Tensor, a: Tensor, g: Tensor, share: Tensor, groups: Groups
    ) -> None:
        """To `grads` what these rows give. a: times their weights, g: without them."""
        dw_in, db_in, dw_out, db_out = grads
        interleaved = _interleaved(self.w_in)
        matrices = (dw_in.transpose(2, 3) if interleaved else dw_in).view(*dw_in.shape[:2], -1)
        add_outer_products(matrices, rows, dh.flatten(1), groups)
        add_outer_products(dw_out, a, g, groups)
        if self.b_in is not None:
            pairs = dh.transpose(1, 2) if interleaved else dh
            add_sums(db_in, pairs if pairs.ndim == 3 else pairs.unsqueeze(1), groups)
        if self.b_out is not None:
            add_sums(db_out, g * share, groups)


def gradient_room(
    w_in: Tensor, b_in: Tensor | None, w_out: Tensor, b_out: Tensor | None, of_layers: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tensors for the gradients of the layers, laid out like these; of one element where there is none."""

    def like(t: Tensor | None) -> Tensor:
        return w_in.new_empty(1) if t is None or not of_layers else torch.empty_like(t)

    joins = _interleaved(w_in) or w_in.stride(2) == w_in.shape[3] * w_in.stride(3)
    dw_in = like(w_in) if joins else like(w_in.contiguous())
    return dw_in, like(b_in), like(w_out), like(b_out)


def _interleaved(w_in: Tensor) -> bool:
    """Whether gate and up lie beside each other in memory, number by number."""
    return w_in.shape[2] == 2 and w_in.stride(3) == 2 * w_in.stride(2)


def _joined(t: Tensor, w_in: Tensor) -> Tensor:
    """t: (…, 1 or 2, f), its last two dims in the order in which w_in has them in memory, which are then one."""
    return (t.transpose(-1, -2) if _interleaved(w_in) else t).flatten(-2)


def _flat(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])


def _of_rows(b: Tensor, groups: Groups) -> Tensor:
    """b: (experts, n) -> (rows, n): that of every row's expert, 0 for rows after the last."""
    return torch.cat([b, torch.zeros_like(b[:1])])[groups.numbers]
