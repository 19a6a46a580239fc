"""Pipeline schedules by name: pure functions from (StageGraph, microbatches) to action tables.

`SCHEDULES` says what each is for; `build` makes its table. The orders that follow from the shape of the pipeline alone
are in `autopar.ir.tables`; the schedulers that look at seconds and bytes are `automatic` (zb-auto) and `vshape` (zb-v).
"""

from autopar.passes.schedule.costs import Costs, Room
from autopar.passes.schedule.held import held_after, in_flight, peak_bytes
from autopar.passes.schedule.names import SCHEDULES, build, needs_split, stages_per_group

__all__ = [
    "SCHEDULES",
    "Costs",
    "Room",
    "build",
    "held_after",
    "in_flight",
    "needs_split",
    "peak_bytes",
    "stages_per_group",
]
