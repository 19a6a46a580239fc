"""A product with a trained weight whose result only a cross-entropy reads becomes one op with it (`autopar.ops.head_loss`).

    logits = x wᵀ ─ cast ─ slice of rows ─ reshape of rows ─ cross_entropy        becomes        x ─ slice of rows ─ head_loss

It pays where logits are larger than x and have so many rows that there are several chunks. What else reads the logits needs
them whole. Two ops stay: a head with a bias or one that is not trained, probabilities as targets, smoothing with class weights,
losses that are not summed, and float16, in which sums over all tokens would overflow.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture.dead_code import remove_dead_code
from autopar.capture.exported import Exported
from autopar.capture.graph.cast_marks import shown
from autopar.capture.graph.new_nodes import made_like
from autopar.ir.program import op_name
from autopar.ops.head_loss import head_loss
from autopar.ops.loss import MEAN, SUM
from autopar.ops.registry import OpDef, find
from autopar.runtime.kernels.losses import chunk_rows

aten = torch.ops.aten
_DEFAULTS = (None, MEAN, -100, 0.0)
"""The defaults of cross_entropy_loss, behind logits and targets: class weights, reduction, the target that is ignored,
smoothing."""


def join_head_losses(exported: Exported, reach: Collection[fx.Node], mode: FakeTensorMode) -> None:
    """Rewrite the captured graph in place. reach: nodes from which a gradient may flow."""
    for node in list(exported.graph.nodes):
        if node.target is aten.cross_entropy_loss.default and node in reach:
            _join(exported, node, reach, mode)
    remove_dead_code(exported.graph)


def _join(exported: Exported, loss: fx.Node, reach: Collection[fx.Node], mode: FakeTensorMode) -> None:
    logits, target = loss.args[:2]
    weight, reduction, ignored, smoothing = loss.args[2:] + _DEFAULTS[len(loss.args) - 2 :]
    assert isinstance(logits, fx.Node)
    assert isinstance(target, fx.Node)
    found = _head(logits, reach)
    if found is None or loss.kwargs or reduction not in (MEAN, SUM) or (smoothing and weight is not None):
        return
    x, w, slices = found
    if not _is_trained(w, exported) or target.meta["val"].is_floating_point() or not _pays(logits, x):
        return

    made = functools.partial(made_like, loss, mode)
    with exported.graph.inserting_before(loss):
        for part in slices:
            x = made(aten.slice.Tensor, x, *part)
        rows = made(aten.reshape.default, target, list(x.meta["val"].shape[:-1]))
        dtype = logits.meta["val"].dtype
        joined = made(head_loss, x, w, rows, weight, reduction, ignored, smoothing, dtype)
    loss.replace_all_uses_with(joined)


def _head(logits: fx.Node, reach: Collection[fx.Node]) -> tuple[fx.Node, fx.Node, list[tuple[Any, ...]]] | None:
    """(x, w, slices of x's rows) where the logits are a product, in the order of its rows, that nobody else reads."""
    slices: list[tuple[Any, ...]] = []
    classes = logits.meta["val"].shape[1] if logits.meta["val"].ndim > 1 else 0
    at_end = logits.meta["val"].ndim == 2
    node = logits
    while len(node.users) == 1 and node.op == "call_function" and node in reach:
        if (product := _product(node)) is not None:
            is_possible = at_end and node.meta["val"].dtype != torch.float16
            return (*product, slices[::-1]) if is_possible else None
        definition = find(op_name(node.target)) or OpDef()
        source: Any = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return None
        before, after = source.meta["val"], node.meta["val"]
        if definition.canonical == "cast":
            if torch.promote_types(before.dtype, after.dtype) != after.dtype:
                return None
        elif definition.canonical == "regroup":
            if slices or not at_end or not before.ndim or before.shape[-1] != classes:
                return None
        elif definition.reorder is not None and not at_end:  # classes, which are dim 1 of a loss, were the last
            order = definition.reorder(node.args[1:], before.ndim)
            if order != [0, before.ndim - 1, *range(1, before.ndim - 1)]:
                return None
            at_end = True
        elif node.target is aten.slice.Tensor and at_end:
            dim: Any = node.args[1] if len(node.args) > 1 else 0
            if dim % before.ndim == before.ndim - 1:
                return None
            slices.append(node.args[1:])
        elif definition.canonical != "copy":
            return None
        node = source
    return None


def _product(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(x, w) where a node is x wᵀ."""
    operands: Any = node.args
    if node.target is aten.linear.default:
        return None if any(operands[2:]) else operands[:2]
    if node.target not in (aten.matmul.default, aten.mm.default):
        return None
    x, turned = operands
    definition = find(op_name(turned.target)) if turned.op == "call_function" else None
    if definition is None or definition.reorder is None or turned.meta["val"].ndim != 2:
        return None
    return (x, turned.args[0]) if definition.reorder(turned.args[1:], 2) == [1, 0] else None


def _is_trained(w: fx.Node, exported: Exported) -> bool:
    kind, name = exported.kinds.get(shown(w).name, ("", ""))
    return kind == "param" and name in exported.eager_grads


def _pays(logits: fx.Node, x: fx.Node) -> bool:
    classes, width = logits.meta["val"].shape[1], x.meta["val"].shape[-1]
    return classes >= 2 * width and logits.meta["val"].numel() // classes >= 2 * chunk_rows(width)
