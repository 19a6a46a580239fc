"""The table of a named schedule for a given pipeline, and the refusal of what the schedule cannot serve."""

from __future__ import annotations

from autopar.errors import PlanError
from autopar.ir.actions import StageGraph, Table
from autopar.ir.schedules import Schedule, schedule_row
from autopar.passes.schedule.costs import ActionCosts, MemoryRoom, checked
from autopar.passes.schedule.held import peak_bytes
from autopar.passes.schedule.proof import deadlock


def build(
    name: str,
    graph: StageGraph,
    microbatches: int,
    *,
    costs: ActionCosts | None = None,
    memory: float | MemoryRoom | None = None,
) -> Table:
    """The table of a named schedule.

    costs, memory: for timed schedules, seconds of the actions (default: all alike) and what a group may hold, in
    microbatches of all its stages or as bytes in a MemoryRoom (default: as 1F1B). The other schedules do not depend on them,
    but are refused when they need more memory. Raises PlanError for what a schedule cannot serve, saying what would do.
    """
    row = schedule_row(name)
    if microbatches < 1:
        raise PlanError(f"{name} needs at least 1 microbatch, got {microbatches}")
    _check_groups(row, graph)
    made_for = graph
    if row.shape != "any":  # made for the chain; values that skip stages come along in its order
        made_for = _chain_of(row, graph)
    table = row.table(made_for, microbatches, costs, memory) if row.timed else row.table(made_for, microbatches)
    if made_for.edges != graph.edges and (stuck := deadlock(table, graph)):
        raise PlanError(f"{name} does not serve the way these stages read each other ({stuck}); use 1f1b or gpipe")
    if memory is not None and not row.timed:
        _check_memory(name, table, graph, memory)
    return table


def _chain_of(row: Schedule, graph: StageGraph) -> StageGraph:
    """The chain of a row's shape with as many groups and stages."""
    return StageGraph.chain(len(graph.groups), len(graph.groups[0]), row.shape)


def _check_groups(row: Schedule, graph: StageGraph) -> None:
    """Raises PlanError where the groups are too many, run too few or too many stages, or lie in another shape."""
    name, p = row.name, len(graph.groups)
    if row.groups is not None and p != row.groups:
        raise PlanError(f"schedule {name!r} is for one group of ranks, this pipeline has {p}; use 1f1b")
    least, most = row.stages
    for g, stages in enumerate(graph.groups):
        if not row.serves(len(stages)):
            wanted = str(least) if least == most else f"at least {least}"
            instead = "1f1b or zb-auto" if len(stages) == 1 else "interleaved, zb-v (two stages in a V) or gpipe"
            raise PlanError(
                f"{name} needs {wanted} {'stage' if wanted == '1' else 'stages'} on every group, group {g} has "
                f"{len(stages)}; use {instead}, or cut the model differently"
            )
    if row.shape != "any" and graph.groups != (wanted_groups := _chain_of(row, graph).groups):
        raise PlanError(f"{name} needs stages placed as {wanted_groups}, got {graph.groups}; gpipe runs any placement")


def _check_memory(name: str, table: Table, graph: StageGraph, memory: float | MemoryRoom) -> None:
    """Raises PlanError where a group holds more than it may."""
    _, room = checked(graph, None, memory, 1)
    for g, peak in enumerate(peak_bytes(table, graph, room.after_F, room.after_B or None)):
        if peak > room.bound[g] * (1 + 1e-9):
            raise PlanError(
                f"{name} holds {peak:g} on group {g}, {room.bound[g]:g} is allowed; "
                "use zb-auto, which keeps to a limit, 1f1b, smaller microbatches, or recompute more"
            )
