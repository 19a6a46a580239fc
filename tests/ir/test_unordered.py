"""Which heavy nodes of a DAG are unordered, against reachability in networkx."""

from __future__ import annotations

import random

import networkx as nx

from autopar.ir.unordered import LEAST_PIECE, unordered


def test_unordered_nodes_neither_reach_each_other_nor_are_reached() -> None:
    draw = random.Random(0)
    for _ in range(50):
        size = draw.randrange(1, 14)
        edges = [sorted({draw.randrange(v) for _ in range(draw.randrange(3))}) if v else [] for v in range(size)]
        share = [LEAST_PIECE * draw.choice((0.5, 1, 2)) for _ in range(size)]
        graph = nx.DiGraph((u, v) for v, reads in enumerate(edges) for u in reads)
        graph.add_nodes_from(range(size))
        apart = [
            {u for u in range(size) if not nx.has_path(graph, u, v) and not nx.has_path(graph, v, u)} for v in graph
        ]
        expected = {v: {u for u in others if share[u] >= LEAST_PIECE} for v, others in zip(graph, apart, strict=True)}
        assert unordered(edges, share) == [expected[v] for v in range(size)]
