"""The costs that a scheduler knows of a pipeline beside its shape: seconds of every action and room for what it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.costmodel.simulate import Comm, link_seconds
from autopar.errors import PlanError
from autopar.ir.actions import StageGraph
from autopar.passes.rules.memo import Memo


@dataclass(frozen=True)
class ActionCosts:
    """seconds: of (stage, kind), kinds F, B, W. comm_s: of every edge between groups, or by (sender, receiver). memo: what
    schedulers made with these costs, for as long as they are tried in one room after another."""

    seconds: Mapping[tuple[int, str], float]
    comm_s: Comm = 0.0
    memo: Memo = field(default_factory=Memo, compare=False, repr=False)

    @staticmethod
    def uniform(stages: int, tf: float = 1.0, tb: float = 1.0, tw: float = 1.0, comm_s: Comm = 0.0) -> ActionCosts:
        """The costs of a pipeline of equal stages."""
        return ActionCosts({(s, k): t for s in range(stages) for k, t in (("F", tf), ("B", tb), ("W", tw))}, comm_s)


def least_span_s(graph: StageGraph, microbatches: int, costs: ActionCosts, most_held: Sequence[float]) -> float:
    """Seconds that no table takes less than. most_held[s]: microbatches that stage s can hold at once.

    All the work of a group comes after its first microbatch has reached it; and its first B comes after that microbatch has
    been to the end and back, before which a group runs nothing but F, and no more than it can hold. A stage that can hold h
    microbatches begins the one after the next h when the first of these has come back, so M of them take M / h round trips.
    """
    seconds, M, n = costs.seconds, microbatches, graph.stages

    def on_its_way_s(u: int, v: int) -> float:
        return 0.0 if graph.group_of[u] == graph.group_of[v] else link_seconds([(u, v)], costs.comm_s)[0]

    arrives_s, returns_s, trip_s = [0.0] * n, [0.0] * n, [0.0] * n
    for s in range(n):
        for u in graph.feeds[s]:
            arrives_s[s] = max(arrives_s[s], arrives_s[u] + seconds[u, "F"] + on_its_way_s(u, s))
    for s in reversed(range(n)):
        returns_s[s] = arrives_s[s] + seconds[s, "F"]
        away_s = 0.0
        for v in graph.returns[s]:
            returns_s[s] = max(returns_s[s], returns_s[v] + seconds[v, "B"] + on_its_way_s(v, s))
            away_s = max(away_s, on_its_way_s(s, v) + trip_s[v] + on_its_way_s(v, s))
        trip_s[s] = seconds[s, "F"] + away_s + seconds[s, "B"]
    spans_s = []
    for stages in graph.groups:
        forward_s = M * sum(seconds[s, "F"] for s in stages)
        backward_s = M * sum(seconds[s, "B"] + seconds[s, "W"] for s in stages)
        held_s = sum(min(M, most_held[s]) * seconds[s, "F"] for s in stages)
        spans_s.append(min(arrives_s[s] for s in stages) + forward_s + backward_s)
        spans_s.append(min(returns_s[s] for s in stages) + forward_s - held_s + backward_s)
    for s in range(n):
        trips, more = divmod(M - 1, min(M, most_held[s]))
        spans_s.append(arrives_s[s] + (trips + 1) * trip_s[s] + more * seconds[s, "F"] + seconds[s, "W"])
    return max(spans_s)


@dataclass(frozen=True)
class MemoryRoom:
    """bound[g]: bytes that group g may hold between actions. after_F[s], after_B[s]: bytes that stage s keeps of a
    microbatch between F and B, and between B and W: less, as B needs some for the last time, or more, as it makes again
    what W reads too. Any unit will do."""

    bound: tuple[float, ...]
    after_F: tuple[float, ...]
    after_B: tuple[float, ...] = field(default=())

    @property
    def later(self) -> tuple[float, ...]:
        """after_B, or what is held after F where it is not given."""
        return self.after_B or self.after_F

    def growth(self, stages: Sequence[int]) -> float:
        """Bytes by which the B of one of these stages may grow what is held."""
        return max(max(self.later[s] - self.after_F[s], 0.0) for s in stages)

    def least(self, stages: Sequence[int]) -> float:
        """Bytes of one microbatch on these stages, one of which is between B and W."""
        return sum(self.after_F[s] for s in stages) + self.growth(stages)

    @staticmethod
    def microbatches(graph: StageGraph, limit: float) -> MemoryRoom:
        """Room for `limit` microbatches on all stages of a group, each kept whole until W."""
        share = tuple(1 / len(graph.groups[graph.group_of[s]]) for s in range(graph.stages))
        return MemoryRoom((float(limit),) * len(graph.groups), share)


def checked(
    graph: StageGraph, costs: ActionCosts | None, room: float | MemoryRoom | None, default: float
) -> tuple[ActionCosts, MemoryRoom]:
    """Costs and room with defaults filled in. Raises PlanError for what is missing or too small for one microbatch."""
    costs = costs or ActionCosts.uniform(graph.stages)
    for s in range(graph.stages):
        for kind in "FBW":
            if not costs.seconds.get((s, kind), -1.0) >= 0:
                raise PlanError(f"costs need seconds of {kind} on stage {s}, got {costs.seconds.get((s, kind))}")
    if room is None:
        room = default
    if not isinstance(room, MemoryRoom):
        room = MemoryRoom.microbatches(graph, room)
    if len(room.bound) != len(graph.groups) or not len(room.after_F) == len(room.later) == graph.stages:
        raise PlanError(
            f"memory is given for {len(room.bound)} groups and {len(room.after_F)} stages, the pipeline has "
            f"{len(graph.groups)} and {graph.stages}"
        )
    for g, stages in enumerate(graph.groups):
        need = room.least(stages)
        if need > room.bound[g] * (1 + 1e-9):
            raise PlanError(
                f"group {g} has room for {room.bound[g]:g}, one microbatch needs {need:g}; use smaller microbatches, "
                "recompute more, or give the group more memory"
            )
    return costs, room
