"""Which collectives of a lowered program go by node, and from which size on: by price, axis by axis."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cluster import ClusterSpec
from autopar.costmodel.by_node import least_bytes, nodes_of
from autopar.ir.by_node import ALL_FLAT, AxisByNode, ByNode
from autopar.ir.lowered import LoweredProgram
from autopar.ir.mesh import Mesh
from autopar.runtime.comm.hierarchical import KINDS, grid_of
from autopar.runtime.comm.mesh import group_ranks


def by_node(lowered: LoweredProgram, cluster: ClusterSpec, placement: Sequence[int] = ()) -> ByNode:
    """The axes along which messages go by node when rank placement[p] is at the cluster's place p; by default every
    rank is at its own."""
    if cluster.device(0).kind != "cpu" or len(cluster.levels) < 2:
        return ALL_FLAT
    place_of = {rank: place for place, rank in enumerate(placement)}
    first_stages = {(stage.mesh.axes, stage.mesh.offset): stage for stage in reversed(lowered.stages)}
    axes = []
    for stage in sorted(first_stages.values(), key=lambda one: one.index):
        for axis in stage.mesh.names:
            groups = {tuple(place_of.get(rank, rank) for rank in ranks) for ranks in _groups(stage.mesh, axis)}
            grids = {grid_of(nodes_of(cluster.levels, group)) for group in groups}
            if None not in grids and len(grids) == 1:
                least = {kind: _least_of_all(cluster, kind, groups) for kind in KINDS}
                taken = {kind: nbytes for kind, nbytes in least.items() if nbytes is not None}
                (grid,) = grids
                assert grid is not None
                if taken:
                    axes.append(AxisByNode(stage.index, axis, grid.nodes, grid.places, taken))
    if not axes:
        return ALL_FLAT
    ranks = range(sum(lowered.stages[stages[0]].mesh.size for stages in lowered.graph.groups))
    on_node: dict[int, list[int]] = {}
    for rank in ranks:
        on_node.setdefault(cluster.levels[0].group_of(place_of.get(rank, rank)), []).append(rank)
    return ByNode(tuple(tuple(on_node[node]) for node in sorted(on_node)), tuple(axes))


def _groups(mesh: Mesh, axis: str) -> set[tuple[int, ...]]:
    ranks = range(mesh.offset, mesh.offset + mesh.size)
    return {group_ranks(mesh.sizes, rank, (axis,), mesh.offset) for rank in ranks}


def _least_of_all(cluster: ClusterSpec, kind: str, groups: set[tuple[int, ...]]) -> int | None:
    """The largest of the sizes from which on groups go by node, where groups differ, as their links do: all go one way."""
    least = [least_bytes(cluster.levels, kind, group) for group in groups]
    return None if None in least else max(one for one in least if one is not None)
