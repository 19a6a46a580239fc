"""Random small calls of losses: over a class dim, and those that are torch's own ops."""

from __future__ import annotations

import torch

from autopar.ops import ctc, head_loss, loss
from tests.ops.execution import Case
from tests.ops.generators import Draw, call, makes, overload

aten = torch.ops.aten


@makes(
    "autopar.sumexp",
    "autopar.pick",
    "autopar.pick_grad",
    "autopar.cross_entropy_grad",
    "autopar.smoothed_cross_entropy_grad",
)
def _loss(draw: Draw, name: str) -> Case:
    x = draw.f(*draw.shape(1, 3))
    dim = draw.pick(*range(x.ndim))
    row = x.amax(dim)
    index = draw.i(x.shape[dim], *row.shape)
    if name == "autopar.sumexp":
        return call(loss.sumexp, x, row, dim)
    if name == "autopar.pick":
        return call(loss.pick, x, index, dim)
    if name == "autopar.pick_grad":
        return call(loss.pick_grad, draw.f(*row.shape), index, dim, x.shape[dim])
    g, g_all, lse = draw.f(*row.shape), draw.f(*row.shape), x.logsumexp(dim)
    if name == "autopar.cross_entropy_grad":
        return call(loss.cross_entropy_grad, x, lse, index, g, dim)
    return call(loss.smoothed_cross_entropy_grad, x, lse, index, g, g_all, dim)


@makes(
    "aten.smooth_l1_loss",
    "aten.smooth_l1_loss_backward",
    "aten.huber_loss",
    "aten.huber_loss_backward",
    "aten.binary_cross_entropy",
    "aten.binary_cross_entropy_backward",
    "aten.binary_cross_entropy_with_logits",
    "aten.soft_margin_loss",
    "aten.soft_margin_loss_backward",
)
def _elementwise_loss(draw: Draw, name: str) -> Case:
    shape = draw.shape(1, 3)
    x, y, g = (draw.f(*shape).sigmoid() for _ in range(3))
    backward, reduction = (g,) if name.endswith("_backward") else (), draw.pick(0, 0, 0, 1, 2)
    if backward and reduction:
        backward = (draw.f(),)
    if "soft_margin" in name:
        return call(overload(name), *backward, x, (y - 0.5).sign(), reduction)
    if "cross_entropy" not in name:
        return call(overload(name), *backward, x, y, reduction, 0.3)
    weights = [draw.f(*shape).sigmoid() if draw.pick(True, False) else None]
    weights += [None] * name.endswith("with_logits")
    return call(overload(name), *backward, x, y, *weights, reduction)


@makes(
    "aten.multi_margin_loss",
    "aten.multi_margin_loss_backward",
    "aten.multilabel_margin_loss_forward",
    "aten.multilabel_margin_loss_backward",
)
def _margin_loss(draw: Draw, name: str) -> Case:
    """Rows of classes, or one row."""
    x, reduction = draw.f(*draw.shape(1, 2)), draw.pick(0, 0, 0, 1, 2)
    rows, classes = x.shape[:-1], x.shape[-1]
    g = (draw.f(*rows if reduction == 0 else ()),) if name.endswith("_backward") else ()
    if "multilabel" in name:
        target = torch.stack([draw.i(classes, *rows), torch.full(rows, -1)], -1)[..., :classes]
        target = torch.cat([target, torch.full((*rows, classes - target.shape[-1]), -1)], -1)
        known = aten.multilabel_margin_loss_forward(x, target, reduction)[1:] if g else ()
        return call(overload(name), *g, x, target, reduction, *known)
    weight = draw.f(classes).sigmoid() if draw.pick(True, False) else None
    return call(overload(name), *g, x, draw.i(classes, *rows), draw.pick(1, 2), 0.7, weight, reduction)


@makes("autopar.linear_cross_entropy", "autopar.times")
def _head_loss(draw: Draw, name: str) -> Case:
    """Some rows count nowhere."""
    if name == "autopar.times":
        return call(head_loss.times, draw.f(*draw.shape(1, 3)), draw.f())
    tokens, classes, width = draw.shape(1, 2), draw.size(), draw.size()
    scale = draw.f(*tokens).relu()
    smoothing = draw.pick(0.0, 0.1)
    operands = draw.f(*tokens, width), draw.f(classes, width), draw.i(classes, *tokens), scale
    return call(head_loss.linear_cross_entropy, *operands, smoothing, smoothing / classes)


@makes("autopar.ctc", "autopar.ctc_grad")
def _ctc(draw: Draw, name: str) -> Case:
    """Some samples are too short for their labels."""
    time, batch, classes, labels = draw.pick(4, 6), draw.size(), draw.pick(3, 5), draw.pick(1, 2, 3)
    log_probs = draw.f(time, batch, classes).log_softmax(-1)
    targets = draw.i(classes - 1, batch, labels) + 1
    inputs, lengths = draw.i(time, batch) + 1, draw.i(labels + 1, batch)
    config = (log_probs, targets, inputs, lengths, 0, True)
    if name == "autopar.ctc":
        return call(ctc.ctc, *config)
    return call(ctc.ctc_grad, torch.ones(batch, dtype=torch.float64), *config)
