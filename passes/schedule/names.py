"""The registry of schedules, and what each asks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.ir import tables
from autopar.ir.actions import StageGraph, Table
from autopar.passes.schedule.automatic import zero_bubble
from autopar.passes.schedule.costs import Costs, Room, checked
from autopar.passes.schedule.held import peak_bytes
from autopar.passes.schedule.proof import deadlock
from autopar.passes.schedule.vshape import v_shape


@dataclass(frozen=True)
class Schedule:
    """what: one line. stages: least and most stages per group (None: any number). shape: of the chain it needs, if any.

    timed: whether the table depends on seconds and memory. split: whether B and W are apart.
    """

    what: str
    make: Callable[..., Table]
    stages: tuple[int, int | None] = (1, 1)
    shape: str = ""
    split: bool = False
    timed: bool = False
    groups: int | None = None


_KNOWN = {
    "none": Schedule(
        "one group: forward and backward of every microbatch in turn", tables.one_by_one, (1, None), groups=1
    ),
    "forward": Schedule("inference: forwards alone", tables.forward, (1, None)),
    "gpipe": Schedule("all forwards, then all backwards; holds every microbatch", tables.gpipe, (1, None)),
    "1f1b": Schedule(
        "one forward, one backward in turn; GPipe's time, holds at most p microbatches", tables.one_f_one_b
    ),
    "interleaved": Schedule(
        "1F1B with V stages per group: 1/V of the bubble, V times the sends", tables.interleaved, (2, None), "loop"
    ),
    "zb-h1": Schedule(
        "B and W apart, 1F1B's memory, a third of its bubble when F, B and W are equal", tables.zb_h1, split=True
    ),
    "zb-h2": Schedule(
        "B and W apart, twice 1F1B's memory, no bubble when F, B and W are equal", tables.zb_h2, split=True
    ),
    "zb-auto": Schedule("B and W apart, searched for given seconds and memory", zero_bubble, split=True, timed=True),
    "zb-v": Schedule(
        "B and W apart, two stages per group in a V: 1F1B's memory, no bubble when F, B and W are equal",
        v_shape,
        (2, 2),
        "v",
        split=True,
        timed=True,
    ),
}

SCHEDULES: dict[str, str] = {name: s.what for name, s in _KNOWN.items()}
"""Name -> one line of description."""


def needs_split(name: str) -> bool:
    """Whether the schedule runs B and W apart. Raises PlanError for an unknown name."""
    return _find(name).split


def stages_per_group(name: str) -> tuple[int, int | None]:
    """(least, most) stages on a group; None: any number. Raises PlanError for an unknown name."""
    return _find(name).stages


def build(
    name: str, graph: StageGraph, microbatches: int, *, costs: Costs | None = None, memory: float | Room | None = None
) -> Table:
    """The table of a named schedule.

    costs, memory: for zb-auto and zb-v, seconds of the actions (default: all alike) and what a group may hold, in
    microbatches of all its stages or as bytes in a Room (default: as 1F1B). The other schedules do not depend on them,
    but are refused when they need more memory. Raises PlanError for what a schedule cannot serve, saying what would do.
    """
    schedule = _find(name)
    if microbatches < 1:
        raise PlanError(f"{name} needs at least 1 microbatch, got {microbatches}")
    _fits(name, schedule, graph)
    made_for = graph
    if schedule.shape:  # made for the chain; values that skip stages come along in its order
        made_for = StageGraph.chain(len(graph.groups), len(graph.groups[0]), schedule.shape)
    if schedule.timed:
        table = schedule.make(made_for, microbatches, costs, memory)
    else:
        table = schedule.make(made_for, microbatches)
    if made_for.edges != graph.edges and (stuck := deadlock(table, graph)):
        raise PlanError(f"{name} does not serve the way these stages read each other ({stuck}); use 1f1b or gpipe")
    if schedule.timed:
        return table
    if memory is not None:
        _, room = checked(graph, None, memory, 1)
        for g, peak in enumerate(peak_bytes(table, graph, room.after_F, room.after_B or None)):
            if peak > room.bound[g] * (1 + 1e-9):
                raise PlanError(
                    f"{name} holds {peak:g} on group {g}, {room.bound[g]:g} is allowed; "
                    "use zb-auto, which keeps to a limit, 1f1b, smaller microbatches, or recompute more"
                )
    return table


def _find(name: str) -> Schedule:
    if name not in _KNOWN:
        raise PlanError(f"unknown schedule {name!r}; known: {', '.join(_KNOWN)}")
    return _KNOWN[name]


def _fits(name: str, schedule: Schedule, graph: StageGraph) -> None:
    p = len(graph.groups)
    if schedule.groups is not None and p != schedule.groups:
        raise PlanError(f"schedule {name!r} is for one group of ranks, this pipeline has {p}; use 1f1b")
    least, most = schedule.stages
    for g, stages in enumerate(graph.groups):
        if len(stages) < least or (most is not None and len(stages) > most):
            wanted = str(least) if least == most else f"at least {least}"
            instead = "1f1b or zb-auto" if len(stages) == 1 else "interleaved, zb-v (two stages in a V) or gpipe"
            raise PlanError(
                f"{name} needs {wanted} {'stage' if wanted == '1' else 'stages'} on every group, group {g} has "
                f"{len(stages)}; use {instead}, or cut the model differently"
            )
    if schedule.shape:
        V = len(graph.groups[0])
        wanted_graph = StageGraph.chain(p, V, schedule.shape)
        if graph.groups != wanted_graph.groups:
            raise PlanError(
                f"{name} needs stages placed as {wanted_graph.groups}, got {graph.groups}; gpipe runs any placement"
            )
