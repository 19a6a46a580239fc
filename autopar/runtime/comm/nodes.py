"""Which collectives go by node (hierarchical.py): what pipeline.py says, held to the machines that the ranks are on.

NODES are the ranks of each machine as the cluster is described, BY_NODE the axes whose collectives go by node. Where ranks are on
other machines than that, these go flat, and rank 0 says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import RuntimeProgramError
from .comm import Comm
from .hierarchical import TwoLevels, grid_of
from .mesh import Group, group_ranks, mesh_size

Nodes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class ByNode:
    """The collectives along an axis of a stage's mesh. least: by kind, bytes of the full array from which on they go by node."""

    stage: int
    axis: str
    least: Mapping[str, int]


def use_nodes(
    comm: Comm,
    parts: Sequence[Comm | None],
    meshes: Sequence[tuple[Mapping[str, int], int]],
    nodes: Nodes,
    rows: Sequence[ByNode],
) -> None:
    """From now on collectives go by node as the rows say. comm: of all ranks, which all call it alike and make every group in
    the same order; parts, meshes: of the stages. Raises RuntimeProgramError where a row does not fit the nodes."""
    if not rows:
        return
    if other := other_machines(nodes, comm.machines()):
        if comm.rank == 0:
            warnings.warn(f"{other}; collectives between them go flat, which is slower than predicted", stacklevel=2)
        return
    node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
    for row in rows:
        (mesh, first), part = meshes[row.stage], parts[row.stage]
        everyone = range(first, first + mesh_size(mesh))
        for ranks in dict.fromkeys(group_ranks(mesh, rank, (row.axis,), first) for rank in everyone):
            grid = grid_of([node_of[rank] for rank in ranks])
            if grid is None:
                raise RuntimeProgramError(
                    f"BY_NODE of pipeline.py: the ranks {ranks} along {row.axis} do not lie evenly on the nodes {nodes}; "
                    "emit the program again"
                )
            inside = {on: comm.new_group(on) for on in (grid.on_node(ranks, a) for a in range(grid.nodes))}
            between = {at: comm.new_group(at) for at in (grid.at_place(ranks, b) for b in range(grid.places))}
            if comm.rank in ranks and part is not None:
                levels = TwoLevels(Group((row.axis,), ranks, ranks.index(comm.rank)), grid, row.least)
                part.go_by_node(levels, inside[levels.inside.ranks], between[levels.between.ranks])


def other_machines(nodes: Nodes, machines: Sequence[str] | None) -> str:
    """In words, how ranks are on other machines than described; empty where they are not. machines: by rank."""
    if machines is None:
        return ""
    ranks_of: dict[str, list[int]] = {}
    for rank, machine in enumerate(machines):
        ranks_of.setdefault(machine, []).append(rank)
    if sorted(map(tuple, ranks_of.values())) == sorted(nodes):
        return ""

    def shown(groups: Sequence[Sequence[int]]) -> str:
        return " | ".join(", ".join(map(str, one)) for one in groups[:8]) + (" | …" if len(groups) > 8 else "")

    return f"the program is for machines with the ranks {shown(nodes)}, and they have {shown(list(ranks_of.values()))}"
