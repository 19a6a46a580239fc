"""Bags of look-ups are captured as the op that they are (`autopar.ops.embedding_bag`).

torch takes the rows of an index of two dims for bags by flattening it, with offsets that count them. Which bag an index is in
is then data, and no dim is the batch. Here the index has its dims back:

    ids ─ reshape [-1] ─ embedding_bag(w, ·, arange(0, b n, n)) ─ getitem 0        becomes        look_up_bags(w, ids)

Bags that begin at offsets of the user's own become the same op with these. torch's op stays where anything but its first result
is read, and where gradients are scaled by frequency, which on a CPU it does by the frequencies of other rows.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.call import bind
from autopar.ir.program import is_getitem
from autopar.ops.embedding_bag import look_up_bags

aten = torch.ops.aten


def with_bags(node: fx.Node) -> None:
    """Put the op in place of a node that is torch's, whose other results nobody reads."""
    results = list(node.users)
    if not all(is_getitem(one) and (one.args[1] == 0 or not one.users) for one in results):
        return
    given = bind(node.target, node.args, node.kwargs)
    if given["scale_grad_by_freq"]:
        return
    w, index, offsets, weights = (given[name] for name in ("weight", "indices", "offsets", "per_sample_weights"))
    last, padding = given["include_last_offset"], given.get("padding_idx")
    ids = None if last else _ids(index, offsets)
    with node.graph.inserting_before(node):
        if ids is not None:
            index, offsets = ids, None
            weights = None if weights is None else _shaped(weights, ids)
        padding = -1 if padding is None else padding % w.meta["val"].shape[0]
        args = (w, index, offsets, weights, given["mode"], padding, last)
        bags = node.graph.create_node("call_function", look_up_bags, args, name="bags")
    for result in results:
        if result.args[1] == 0:
            bags.meta = {**result.meta, **node.meta, "val": result.meta["val"]}
            result.replace_all_uses_with(bags)


def _ids(index: fx.Node, offsets: fx.Node) -> fx.Node | None:
    """The index of two dims that was flattened, where the offsets are those of its rows."""
    source = index.args[0] if index.target is aten.reshape.default else None
    if not isinstance(source, fx.Node) or offsets.target is not aten.arange.start_step:
        return None
    shape = source.meta["val"].shape
    return source if len(shape) == 2 and tuple(offsets.args) == (0, shape.numel(), shape[1]) else None


def _shaped(weights: fx.Node, ids: fx.Node) -> fx.Node:
    """Weights with the dims of the index."""
    shape = ids.meta["val"].shape
    source = weights.args[0] if weights.target is aten.reshape.default else None
    if isinstance(source, fx.Node) and source.meta["val"].shape == shape:
        return source
    shaped = weights.graph.call_function(aten.reshape.default, (weights, list(shape)))
    shaped.meta = {**weights.meta, "val": weights.meta["val"].reshape(shape)}
    return shaped
