"""Schedules of one stage per group, for groups of several stages that form a DAG.

Where no values flow in a circle between groups (branches side by side: one group runs two encoders, another the third),
each group counts as one stage of a smaller pipeline. Its table is made, and every action of a group becomes those of its
stages: forwards in program order, backwards and weights in the opposite one.

    group 0 runs stages 0 and 2, group 1 stage 1:    F0.0 B0.0  ->  F0.0 F0.2 B0.2 B0.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import networkx as nx

from autopar.errors import PlanError
from autopar.ir.actions import Action, StageGraph, Table


def group_graph(graph: StageGraph) -> tuple[StageGraph, tuple[int, ...]]:
    """Groups as stages, numbered along the edges; and the number of each group. Raises PlanError where they circle."""
    flow = nx.DiGraph(_group_edges(graph, graph.edges))
    flow.add_nodes_from(range(len(graph.groups)))
    try:
        order = list(nx.lexicographical_topological_sort(flow))
    except nx.NetworkXUnfeasible:
        raise PlanError("values flow in a circle between the groups of these stages; use gpipe") from None
    number = tuple(order.index(g) for g in range(len(order)))

    def numbered(edges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple(sorted((number[a], number[b]) for a, b in _group_edges(graph, edges)))

    back = graph.edges if graph.gradients is None else graph.gradients
    return StageGraph(tuple((g,) for g in range(len(order))), numbered(graph.edges), numbered(back)), number


def _group_edges(graph: StageGraph, edges: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """Edges between stages as edges between different groups."""
    pairs = {(graph.group_of[u], graph.group_of[v]) for u, v in edges}
    return {(a, b) for a, b in pairs if a != b}


def grouped(make: Callable[[StageGraph, int], Table], graph: StageGraph, microbatches: int) -> Table:
    """The table of a schedule of one stage per group, for groups of several. Raises PlanError where groups circle."""
    small, number = group_graph(graph)
    rows = make(small, microbatches)
    return tuple(
        tuple(
            Action(action.kind, action.microbatch, stage)
            for action in rows[number[g]]
            for stage in (stages if action.kind == "F" else reversed(stages))
        )
        for g, stages in enumerate(graph.groups)
    )
