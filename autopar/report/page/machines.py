"""Where the axes of a plan's meshes lie on the machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.report.page.shown import Table, span_text
from autopar.report.program_facts import ProgramFacts
from autopar.runtime.comm.mesh import mesh_index

MOST_NODES = 4
MOST_RANKS_DRAWN = 16


@dataclass(frozen=True)
class Cell:
    """A rank as it is drawn: its number, its group of ranks, its place on the mesh."""

    rank: int
    group: int
    place: str


@dataclass(frozen=True)
class Machine:
    """A machine as it is drawn. more: ranks that are left out."""

    name: str
    cells: tuple[Cell, ...]
    more: int = 0


@dataclass(frozen=True)
class Placed:
    """The axes as a table, and the first machines of the picture. more: machines that are left out."""

    axes: Table
    machines: tuple[Machine, ...]
    more: int


def placed(program: ProgramFacts, plan: Plan) -> Placed:
    """The meshes of a plan on the machines of its program."""
    per_node = program.machines.ranks_per_node
    place_of = list(range(program.ranks))
    for place, rank in enumerate(plan.placement):
        if rank < program.ranks:
            place_of[rank] = place
    meshes: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for number, stage in enumerate(program.stages):
        meshes.setdefault(tuple((axis, int(size)) for axis, size in stage.mesh.axes), []).append(number)
    rows = []
    for numbers in meshes.values():
        mesh = program.stages[numbers[0]].mesh
        who = "all" if len(numbers) == len(program.stages) else f"stages {span_text(numbers[0], numbers[-1])}"
        for axis, size in mesh.axes:
            places = sorted(place_of[rank] for rank in mesh.group((axis,), mesh.offset))
            where, link, rate = _lying(places, per_node, program)
            rows.append((who, axis, where, link, f"{int(size):,}", rate))
    head = ("Stages", "Axis", "Where its ranks lie", "Link", "Ranks", "Bandwidth")
    caption = "Axes of the mesh on the machines"
    return Placed(Table(caption, head, tuple(rows), 4), *_drawn(program, place_of, per_node))


def _lying(places: Sequence[int], per_node: int, program: ProgramFacts) -> tuple[str, str, str]:
    """Where ranks that talk along an axis lie, the innermost level of links that joins them, and its bandwidth."""
    nodes = len({place // per_node for place in places})
    where = "one rank" if len(places) == 1 else "on one machine" if nodes == 1 else f"on {nodes:,} machines"
    if len(places) > 1 and places == list(range(places[0], places[-1] + 1)):
        where += ", side by side"
    elif len(places) > 1 and len({b - a for a, b in pairwise(places)}) == 1:
        where += f", {places[1] - places[0]:,} apart"
    for link in program.machines.links:
        if len(places) > 1 and len({place // link.group_size for place in places}) == 1:
            return where, link.name, f"{link.bytes_per_s / 1e9:.3g} GB/s"
    return where, "–", "–"


def _drawn(program: ProgramFacts, place_of: Sequence[int], per_node: int) -> tuple[tuple[Machine, ...], int]:
    rank_at = {place: rank for rank, place in enumerate(place_of)}
    group_of, meshes = dict[int, int](), dict[int, Mesh]()
    for g, stages in enumerate(program.schedule.graph.groups):
        mesh = program.stages[stages[0]].mesh
        meshes[g] = mesh
        group_of |= dict.fromkeys(range(mesh.offset, mesh.offset + mesh.size), g)
    nodes = -(-(max(rank_at, default=0) + 1) // per_node)
    machines = []
    for node in range(min(nodes, MOST_NODES)):
        ranks = [rank_at[p] for p in range(node * per_node, (node + 1) * per_node) if p in rank_at]
        cells = []
        for rank in ranks[:MOST_RANKS_DRAWN]:
            g = group_of.get(rank, 0)
            sizes = {axis: int(size) for axis, size in meshes[g].axes}
            index = mesh_index(sizes, rank - meshes[g].offset)
            cells.append(Cell(rank, g, " ".join(f"{axis}{index[axis]}" for axis in sizes)))
        machines.append(Machine(f"machine {node}", tuple(cells), max(0, len(ranks) - MOST_RANKS_DRAWN)))
    return tuple(machines), max(0, nodes - MOST_NODES)
