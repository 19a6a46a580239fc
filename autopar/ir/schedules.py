"""Pipeline schedules as data: one row per schedule holds every fact that the rest of the compiler asks about it.

A row says how to make the schedule's table, which pipelines it serves, whether it takes backward apart, and what a search
may count on before there is a table. The rows here are those whose tables follow from the shape of the pipeline alone
(`autopar.ir.tables`); a schedule that needs more, such as zb-auto, registers its row where its solver is. To add a
schedule, register its row: nobody else lists names.

    register(Schedule("eager", "1F1B with one more forward ahead", eager_one_f_one_b))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.ir import tables
from autopar.ir.actions import StageGraph, Table

InFlight = Callable[[int, int, int], float]
"""(stages after this one, stages, microbatches M) -> microbatches whose values a stage holds at once."""


def one_f_one_b(after: int, stages: int, M: int) -> float:
    """1F1B and ZB-H1: the last stage holds one microbatch, every stage before it one more."""
    return min(M, after + 1)


def twice_one_f_one_b(after: int, stages: int, M: int) -> float:
    """ZB-H2: the last stage holds one microbatch, every stage before it two more."""
    return min(M, 2 * after + 1)


def every_microbatch(after: int, stages: int, M: int) -> float:
    """GPipe: all that there are."""
    return M


def as_the_first(rule: InFlight, V: int = 1) -> InFlight:
    """Every group of V stages holds as many as the first by another rule: what one of them does not wait for before B, it has
    left for W."""

    def first(after: int, stages: int, M: int) -> float:
        p = max(1, stages // V)
        return rule(stages - 1 - (stages - 1 - after) // p * p, stages, M)

    return first


def interleaved(V: int, ahead: int = 2) -> InFlight:
    """Interleaved 1F1B with V stages per group: what is in flight per stage when the warm-up of its group ends, which is `ahead`
    forwards longer for every group after it."""

    def rule(after: int, stages: int, M: int) -> float:
        p = max(1, stages // V)
        chunk, group = divmod(stages - 1 - after, p)
        alive = min(ahead * (p - 1 - group) + (V - 1) * p + 1, -(-M // p) * p * V)
        rounds, rest = divmod(alive, p * V)
        return min(M, rounds * p + min(p, max(0, rest - chunk * p)))

    return rule


def one_at_a_time(after: int, stages: int, M: int) -> float:
    """Inference: nothing is kept for a backward."""
    return 1.0


def as_one_f_one_b(V: int) -> InFlight:
    """The rule of 1F1B with V stages per group."""
    return one_f_one_b if V == 1 else interleaved(V)


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: its action table, and the facts that the search has of it.

    what: one line for people. table: (StageGraph, microbatches) to Table; where `timed`, (StageGraph, microbatches,
    costs, memory), because the table depends on seconds and bytes, and a plan has to hold it in full. stages: least and
    most stages per group (None: any number). groups: the number of groups it is for, if only one will do. shape: how
    the stages of a chain must lie on the groups, "loop" or "v" (`StageGraph.chain`); "any" for any DAG. splits_backward:
    whether B (inputs) and W (weights) are apart.

    For the search: tried is its place among the schedules that are tried unless the user names one (0: only when it is
    named), most_actions the longest step for which it is. in_flight(V) is what a stage of a chain holds from F to B with V stages
    per group, which cuts count on; of a timed schedule it is the least, and a table that holds more is refused later, by its
    bytes. until_weights(V): the same from F to W (None: B has all of backward). branch_idle_left is the share that is left of
    what 1F1B idles on branches side by side.
    """

    name: str
    what: str
    table: Callable[..., Table]
    stages: tuple[int, int | None] = (1, 1)
    groups: int | None = None
    shape: str = "any"
    splits_backward: bool = False
    timed: bool = False
    tried: int = 0
    most_actions: int | None = None
    in_flight: Callable[[int], InFlight] = as_one_f_one_b
    until_weights: Callable[[int], InFlight] | None = None
    branch_idle_left: float = 0.4

    def serves(self, stages_per_group: int) -> bool:
        """Whether groups may run that many stages each."""
        least, most = self.stages
        return least <= stages_per_group and (most is None or stages_per_group <= most)

    def held_by_group(self, group: int, p: int, M: int, V: int = 1) -> float:
        """Microbatches, of all its V stages together, that a group of a chain of p groups holds until backward has done with
        them."""
        rule = (self.until_weights or self.in_flight)(V)
        stages = StageGraph.chain(p, V, "v" if self.shape == "v" else "loop").groups[group]
        return sum(rule(p * V - 1 - stage, p * V, M) for stage in stages) / V


SCHEDULES: dict[str, Schedule] = {}
"""Every registered schedule by name."""


def register(row: Schedule) -> Schedule:
    """Makes a schedule known by its name. Raises PlanError for a name that is taken, or that means the search's choice."""
    if row.name in SCHEDULES or row.name == "auto":
        raise PlanError(f"a schedule {row.name!r} exists already; give it another name")
    SCHEDULES[row.name] = row
    return row


def schedule_row(name: str) -> Schedule:
    """The row of a schedule. Raises PlanError for an unknown name."""
    if name not in SCHEDULES:
        raise PlanError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def tried_by_default() -> list[Schedule]:
    """The rows that are tried unless the user names a schedule, simple ones first."""
    return sorted((row for row in SCHEDULES.values() if row.tried), key=lambda row: row.tried)


for _row in (
    Schedule(
        "none",
        "one group: forward and backward of every microbatch in turn",
        tables.one_by_one,
        stages=(1, None),
        groups=1,
    ),
    Schedule("forward", "inference: forwards alone", tables.forward, stages=(1, None)),
    Schedule(
        "gpipe",
        "all forwards, then all backwards; holds every microbatch",
        tables.gpipe,
        stages=(1, None),
        tried=5,
        in_flight=lambda V: every_microbatch,
        branch_idle_left=1.0,
    ),
    Schedule(
        "1f1b",
        "one forward, one backward in turn; GPipe's time, holds at most p microbatches",
        tables.one_f_one_b,
        tried=1,
    ),
    Schedule(
        "interleaved",
        "1F1B with V stages per group: 1/V of the bubble, V times the sends",
        tables.interleaved,
        stages=(2, None),
        shape="loop",
        tried=1,
    ),
    Schedule(
        "zb-h1",
        "B and W apart, 1F1B's memory, a third of its bubble when F, B and W are equal",
        tables.zb_h1,
        splits_backward=True,
        tried=2,
        until_weights=lambda V: as_the_first(one_f_one_b),
    ),
    Schedule(
        "zb-h2",
        "B and W apart, twice 1F1B's memory, no bubble when F, B and W are equal",
        tables.zb_h2,
        splits_backward=True,
        tried=3,
        in_flight=lambda V: twice_one_f_one_b,
        until_weights=lambda V: as_the_first(twice_one_f_one_b),
    ),
    Schedule(
        "interleaved-zb",
        "ZB-H1 with V stages per group: 1/V of its bubble, V times the sends",
        tables.interleaved_zb,
        stages=(2, None),
        shape="loop",
        splits_backward=True,
        tried=4,
        in_flight=lambda V: interleaved(V, 1),
        until_weights=lambda V: as_the_first(interleaved(V, 1), V),
    ),
    Schedule(
        "dualpipev",
        "two stages per group in a V, forwards of one way beside backwards of the other: half a microbatch more than 1F1B holds",
        tables.dualpipe_v,
        stages=(2, 2),
        shape="v",
        splits_backward=True,
        in_flight=lambda V: one_f_one_b,
        until_weights=lambda V: one_f_one_b,
    ),
):
    register(_row)
