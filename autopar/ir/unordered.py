"""Nodes of a DAG that lie beside each other: they are *unordered* where neither reads the other, directly or not.

Where work of some weight is unordered with other such work, a model branches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import networkx as nx

LEAST_PIECE, LEAST_UNORDERED = 0.01, 0.05
"""Shares of the model's work: of a piece that counts, and of what is unordered with it."""


def unordered(edges: Sequence[Collection[int]], share: Sequence[float]) -> list[frozenset[int]]:
    """For each node of a DAG the heavy nodes that neither reach it nor are reached by it. edges[v]: the nodes that v reads;
    share[v]: its part of the work."""
    graph = nx.DiGraph((u, v) for v, reads in enumerate(edges) for u in reads)
    graph.add_nodes_from(range(len(edges)))
    heavy = {v for v, s in enumerate(share) if s >= LEAST_PIECE}
    ordered = {v: {v} | nx.ancestors(graph, v) | nx.descendants(graph, v) for v in heavy}
    return [frozenset(v for v in heavy if u not in ordered[v]) for u in range(len(edges))]


def branch(share: Sequence[float], sides: Sequence[frozenset[int]]) -> bool:
    """Whether enough work lies beside other work. sides: as `unordered` gives them."""
    return any(
        s >= LEAST_PIECE and sum(share[j] for j in side) >= LEAST_UNORDERED
        for s, side in zip(share, sides, strict=True)
    )
