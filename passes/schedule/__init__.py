"""Pipeline schedules: from a named row (`autopar.ir.schedules`) to the table of actions of a pipeline.

`build` makes the table of a row. The orders that follow from the shape of the pipeline alone are in `autopar.ir.tables`;
the schedulers that look at seconds and bytes are `automatic` (zb-auto) and `vshape` (zb-v), which register their rows.
"""

from autopar.ir.schedules import SCHEDULES, Schedule, register, schedule_row, tried_by_default
from autopar.passes.schedule.automatic import zero_bubble
from autopar.passes.schedule.build import build
from autopar.passes.schedule.costs import ActionCosts, MemoryRoom, least_span_s
from autopar.passes.schedule.held import held_after, in_flight, peak_bytes
from autopar.passes.schedule.vshape import v_shape

__all__ = [
    "SCHEDULES",
    "ActionCosts",
    "MemoryRoom",
    "Schedule",
    "build",
    "held_after",
    "in_flight",
    "least_span_s",
    "peak_bytes",
    "register",
    "schedule_row",
    "tried_by_default",
    "v_shape",
    "zero_bubble",
]
