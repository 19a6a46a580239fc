"""Nodes of a graph that nobody reads."""

from __future__ import annotations

from torch import fx


def remove_dead_code(graph: fx.Graph) -> None:
    """Erase nodes that nobody reads and that have no effect, in place. `Graph.eliminate_dead_code` does it, and would ask every
    node whether it has an effect, those that are read too."""
    graph.eliminate_dead_code(lambda node: bool(node.users) or node.is_impure())
