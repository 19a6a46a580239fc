"""Nodes that rewrites add to a captured graph, with the values that their ops have on fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode


def made_like(like: fx.Node, mode: FakeTensorMode, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node of an op, from the same line of the model as `like`, put where its graph inserts. args, kwargs: with nodes of the
    graph."""
    node = like.graph.call_function(op, args, kwargs)
    values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    with mode, torch.no_grad():
        node.meta = {**like.meta, "val": op(*values, **named)}
    return node
