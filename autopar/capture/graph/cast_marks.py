"""Marks on the casts that mixed precision puts into a captured graph, for the passes that come after it.

A cast weighs nothing where work is weighed, shows the value that it casts, and stays with the op that it was made for.
"""

from __future__ import annotations

from torch import fx

CAST = "precision"  # meta of a cast made for mixed precision
TIED = "tied"  # meta of a node that stays with its neighbour: "next" or "previous"


def is_cast(node: fx.Node) -> bool:
    return bool(node.meta.get(CAST))


def shown(node: fx.Node) -> fx.Node:
    """The value behind casts."""
    while is_cast(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def may_part(before: fx.Node, after: fx.Node) -> bool:
    """Whether a border may be between two neighbours."""
    return before.meta.get(TIED) != "next" and after.meta.get(TIED) != "previous"
