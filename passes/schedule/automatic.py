"""The automatic zero-bubble scheduler: F, B, W for given seconds under a given memory (Qi et al., ICLR 2024, section 3).

Heuristics with a few open numbers make tables, and the one with the least simulated time is kept; the fixed schedules
that fit the memory are always among them, so the answer is never worse. A table comes from `greedy` under a policy, or
from `fill`, which puts W anew into the order of a fixed table. The allowance of microbatches in flight is what the time
before the first B has room for: with R(s) the seconds from the end of a stage's F to the start of the B of the same
microbatch at the earliest,

    R(s) = max over readers v of  comm + F(v) + R(v) + B(v) + comm,      flight(s) = 1 + x R(s)/F(s),

x = 1 fills that time exactly. Numbers are compared on a short pipeline, walked from the best ones to their neighbours,
and the best few built in full: the search is deterministic and its work does not grow with the microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import floor

from autopar.errors import PlanError
from autopar.ir import tables
from autopar.ir.actions import StageGraph, Table
from autopar.ir.schedules import Schedule, register
from autopar.passes.schedule.costs import ActionCosts, MemoryRoom, checked
from autopar.passes.schedule.fill import fill, without_W
from autopar.passes.schedule.greedy import Policy, greedy, most_in_flight
from autopar.passes.schedule.timed_pipeline import MAKESPAN_WEIGHT, TimedPipeline, TimedTable

SHORT = 3
"""Settings are compared on a pipeline of this many microbatches per group, or of more if it has few actions."""

FEW = 3000

FINALISTS = 3
BUDGETS = (0.0, 0.3, 1.0, 2.0, 4.0)
"""Idle seconds allowed in gaps shorter than a W, in W of the slowest stage."""


@dataclass(frozen=True)
class GreedySetting:
    """The open numbers of `greedy`; x: of the module's docstring."""

    x: float
    patience_F: float
    patience_W: float
    idle: float = 1.0
    deep: bool = True

    def neighbours(self) -> list[GreedySetting]:
        """Settings one step away."""
        near = [replace(self, x=max(0.0, self.x + d)) for d in (-0.125, 0.125)]
        near += [replace(self, patience_F=min(1.0, max(0.0, self.patience_F + d))) for d in (-0.2, 0.2)]
        near += [replace(self, patience_W=min(1.0, max(0.0, self.patience_W + d))) for d in (-0.3, -0.15, 0.15, 0.3)]
        return [*near, replace(self, idle=1.0 - self.idle)]


_START = [
    GreedySetting(x, f, w)
    for x in (0.5, 0.75, 1.0, 1.25, 1.5)
    for f, w in ((1.0, 0.0), (1.0, 0.5), (1.0, 1.0), (0.6, 0.0), (0.6, 0.5), (0.6, 1.0), (0.3, 0.3))
]

Order = Callable[[StageGraph, int], Table]


def zero_bubble(
    graph: StageGraph, m: int, costs: ActionCosts | None = None, memory: float | MemoryRoom | None = None
) -> Table:
    """The best table found. memory: microbatches a group may hold, or a MemoryRoom in bytes; default 1F1B's, depth + 1.

    Raises PlanError when not even one microbatch fits.
    """
    costs, room = checked(graph, costs, memory, max(graph.depth) + 1)
    return best(graph, m, costs, room, (tables.zb_h1, tables.zb_h2), _START)


def best(
    graph: StageGraph,
    m: int,
    costs: ActionCosts,
    room: MemoryRoom,
    orders: Sequence[Order],
    start: Sequence[GreedySetting],
) -> Table:
    """The table of least time from the orders, as they are and with W put in anew, and from settings near `start`.

    Raises PlanError when no table fits into the room.
    """
    no_room = PlanError(f"no zero-bubble schedule of {m} microbatches fits into {room.bound}; give it more memory")
    if any(room.least((s,)) > room.bound[g] * (1 + 1e-9) for s, g in graph.group_of.items()):
        raise no_room
    full = TimedPipeline(graph, m, costs, room)
    short = TimedPipeline(graph, min(m, max(SHORT * len(graph.groups), FEW // (3 * graph.stages))), costs, room)
    tables_in_time = [
        *(full.timed(order(graph, m)) for order in orders),
        *_refilled(full, short, orders),
        *_scheduled(full, _Settings(short, start).best_policies(full)),
    ]
    fitting = [timed for timed in tables_in_time if timed is not None]
    if not fitting:
        raise no_room
    return min(fitting, key=lambda timed: timed.score).table


def _refilled(full: TimedPipeline, short: TimedPipeline, orders: Sequence[Order]) -> Iterator[TimedTable | None]:
    """The order whose table of the short pipeline is best with W put in anew, in full."""
    slowest = max(full.w)
    tries = []
    for n, order in enumerate(orders):
        played = without_W(short.graph, order(short.graph, short.m))
        tries += [(timed.score, b, n) for b in BUDGETS if (timed := fill(short, played, b * slowest)) is not None]
    if tries:
        _, budget, n = min(tries)
        yield fill(full, without_W(full.graph, orders[n](full.graph, full.m)), budget * slowest)


def _scheduled(full: TimedPipeline, policies: Iterable[Policy]) -> Iterator[TimedTable | None]:
    """The tables of these policies, as they are and with W put in anew."""
    for policy in policies:
        timed = greedy(full, policy)
        yield timed
        if timed is not None:
            yield fill(full, without_W(full.graph, timed.rows), BUDGETS[1] * max(full.w))


class _Settings:
    """Settings and what each scores on the short pipeline (infinite: worse than the finalists); settings of one policy are
    scored once."""

    def __init__(self, short: TimedPipeline, start: Sequence[GreedySetting]) -> None:
        self.short, self.away = short, _round_trips(short)
        self.scores: dict[GreedySetting, float] = {}
        self.of_policy: dict[Policy, float] = {}
        for setting in start:
            self._score(setting)
        for _ in range(2):
            for leader in self._ranked()[:FINALISTS]:
                for near in leader.neighbours():
                    self._score(near)

    def best_policies(self, full: TimedPipeline) -> list[Policy]:
        """The policies of the best settings on the full pipeline."""
        return list(dict.fromkeys(_policy(setting, full, self.away) for setting in self._ranked()))[:FINALISTS]

    def _ranked(self) -> list[GreedySetting]:
        return sorted(self.scores, key=self.scores.__getitem__)

    def _longest_s(self) -> float:
        """Seconds of a group from which on a table is none of the finalists: its score is more than that by the end of all."""
        best = sorted(self.of_policy.values())[:FINALISTS]
        return best[-1] / (1 + MAKESPAN_WEIGHT) * (1 + 1e-9) if len(best) == FINALISTS else float("inf")

    def _score(self, setting: GreedySetting) -> None:
        if setting in self.scores:
            return
        policy = _policy(setting, self.short, self.away)
        if policy not in self.of_policy:
            timed = greedy(self.short, policy, self._longest_s())
            self.of_policy[policy] = timed.score if timed else float("inf")
        self.scores[setting] = self.of_policy[policy]


def _policy(setting: GreedySetting, pipeline: TimedPipeline, away: Sequence[float]) -> Policy:
    """The policy of a setting. What no room lets in flight is left out, so settings that the room makes one are one policy."""
    flight = tuple(
        min(most, 1 + floor(setting.x * r / max(f, 1e-12) + 0.01))
        for most, r, f in zip(most_in_flight(pipeline), away, pipeline.f, strict=True)
    )
    return Policy(flight, setting.patience_F, setting.patience_W, setting.idle, setting.deep)


def _round_trips(pipeline: TimedPipeline) -> list[float]:
    """R of the module's docstring."""
    away = [0.0] * pipeline.graph.stages
    for s in reversed(range(pipeline.graph.stages)):
        for v, back in pipeline.returns[s]:
            there = dict(pipeline.feeds[v]).get(s, 0.0)
            away[s] = max(away[s], there + pipeline.f[v] + away[v] + pipeline.b[v] + back)
    return away


register(
    Schedule(
        "zb-auto",
        "B and W apart, searched for given seconds and memory",
        zero_bubble,
        splits_backward=True,
        timed=True,
        tried=4,
        most_actions=20_000,
    )
)
