"""Random small calls of the ops of bags of look-ups."""

from __future__ import annotations

import torch

from autopar.ops import embedding_bag
from tests.ops.execution import Case
from tests.ops.generators import Draw, call, makes


@makes(
    *(
        f"autopar.{name}"
        for name in ("embedding_bag", "embedding_bag_grad", "embedding_bag_dweights", "embedding_bag_max")
    )
)
def _embedding_bag(draw: Draw, name: str) -> Case:
    """Bags are rows of the index, or begin at offsets; some are empty."""
    v, h, last = draw.size(), draw.size(), False
    if draw.pick(True, False):
        index, offsets, bags = draw.i(v, draw.size(), draw.size()), None, 0
        bags = len(index)
    else:
        index, bags, last = draw.i(v, draw.size()), draw.size(), draw.pick(True, False)
        ends = torch.sort(draw.i(len(index) + 1, bags - 1)).values
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends, torch.full([int(last)], len(index))])
    padding = draw.pick(-1, 0, v - 1)
    w, g = draw.f(v, h), draw.f(bags, h)
    weights = draw.pick(None, draw.f(*index.shape))
    if name == "autopar.embedding_bag":
        return call(embedding_bag.embedding_bag, w, index, offsets, weights, padding, last)
    if name == "autopar.embedding_bag_grad":
        return call(embedding_bag.embedding_bag_grad, g, index, offsets, weights, v, padding, last)
    if name == "autopar.embedding_bag_dweights":
        return call(embedding_bag.embedding_bag_dweights, w, g, index, offsets, padding, last)
    return call(embedding_bag.embedding_bag_max, w, index, offsets, padding, last)
