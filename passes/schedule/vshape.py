"""ZB-V: two stages per group in a V, F, B and W apart, under 1F1B's memory (Qi et al., 2024).

The fixed order of `tables.zb_v` has no bubble when F, B and W take equal seconds and nothing is paid for sending. For
other seconds W is put into it anew, and list scheduling is tried beside it; the best by simulation is kept.
"""

from __future__ import annotations

from autopar.ir import tables
from autopar.ir.actions import StageGraph, Table
from autopar.ir.schedules import Schedule, register
from autopar.passes.schedule.automatic import GreedySetting, best
from autopar.passes.schedule.costs import ActionCosts, MemoryRoom, checked

_START = [
    GreedySetting(x, f, w, i)
    for x in (1.0, 3.0)
    for f, w in ((1.0, 0.3), (0.6, 0.6), (0.3, 0.3), (0.0, 0.0))
    for i in (0.0, 1.0)
]


def v_shape(
    graph: StageGraph, m: int, costs: ActionCosts | None = None, memory: float | MemoryRoom | None = None
) -> Table:
    """The best table found. memory: microbatches a group may hold on both its stages, or a MemoryRoom; default 1F1B's, p."""
    costs, room = checked(graph, costs, memory, len(graph.groups))
    return best(graph, m, costs, room, (tables.zb_v,), _START)


register(
    Schedule(
        "zb-v",
        "B and W apart, two stages per group in a V: 1F1B's memory, no bubble when F, B and W are equal",
        v_shape,
        stages=(2, 2),
        shape="v",
        splits_backward=True,
        timed=True,
        tried=6,
    )
)
