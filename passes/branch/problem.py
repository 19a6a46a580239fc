"""Segments, their options, what flows between them, and what a grouping costs, from the definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from autopar.errors import InputError, PlanError
from autopar.ir.schedules import InFlight, one_f_one_b


@dataclass(frozen=True)
class SegmentOption:
    """One way to run a segment: devices, seconds per microbatch (forward and backward), seconds once per step, bytes on a
    device (always, per microbatch in flight, and at the largest moment beside those)."""

    devices: int
    time_s: float
    step_s: float = 0.0
    resting_bytes: float = 0.0
    held_bytes: float = 0.0
    peak_bytes: float = 0.0


@dataclass(frozen=True)
class BranchProblem:
    """Segments in topological order (options per segment), and what flows between them.

    edges: (u, v, bytes of a microbatch that v reads from u, gradients back included). A hand-over between groups takes
    latency_s + bytes / bandwidth_Bps; the share `boundary_busy` of it keeps the reading group busy. limit_bytes: of one
    device. in_flight: asked with the number of groups after a group on the longest path, and one more than that as the
    number of stages. every_device: the groups' devices must add up to all. Raises InputError for edges that do not rise
    and for segments without options.
    """

    segments: tuple[tuple[SegmentOption, ...], ...]
    edges: tuple[tuple[int, int, float], ...]
    devices: int
    microbatches: int
    bandwidth_Bps: float
    latency_s: float = 0.0
    limit_bytes: float = inf
    boundary_busy: float = 1.0
    in_flight: InFlight = one_f_one_b
    names: tuple[str, ...] = ()
    every_device: bool = False

    def __post_init__(self) -> None:
        for s, options in enumerate(self.segments):
            if not options:
                raise InputError(f"{self.name(s)} has no option; give at least one way to run it")
        for u, v, size in self.edges:
            if not 0 <= u < v < len(self.segments) or size < 0:
                raise InputError(
                    f"edge {u} -> {v} of {size} bytes: segments must be in topological order, 0 to {len(self.segments) - 1}"
                )
        if not self.segments or self.microbatches < 1 or self.bandwidth_Bps <= 0:
            raise InputError("a branch problem needs at least one segment, one microbatch and a positive bandwidth")

    def name(self, segment: int) -> str:
        return self.names[segment] if segment < len(self.names) else f"segment {segment}"

    def hand_over_s(self, edge: int) -> float:
        """Seconds of an edge between two groups."""
        return self.latency_s + self.edges[edge][2] / self.bandwidth_Bps

    def admits(self, solution: BranchSolution) -> bool:
        """Whether a grouping is within the memory of every device and uses as many devices as must be."""
        used = sum(group.devices for group in solution.groups)
        enough = used == self.devices if self.every_device else used <= self.devices
        return enough and max(solution.memory) <= self.limit_bytes

    def waiting(self, after: int) -> float:
        """Microbatches in flight in a group with so many groups after it."""
        return self.in_flight(after, after + 1, self.microbatches)


@dataclass(frozen=True)
class Group:
    """Segments that share `devices` devices; options[i]: index of the option of segments[i]."""

    segments: tuple[int, ...]
    devices: int
    options: tuple[int, ...]


@dataclass(frozen=True)
class BranchSolution:
    """groups in an order in which values flow. bound: no grouping is faster. memory: bytes on a device per group.

    latency_s: of one microbatch. busiest_s: seconds that the busiest group works per microbatch.
    """

    groups: tuple[Group, ...]
    total_s: float
    bound: float
    latency_s: float
    busiest_s: float
    step_s: float
    memory: tuple[float, ...]
    edges: tuple[tuple[int, int], ...]

    @property
    def side_by_side(self) -> bool:
        """Whether some two groups work at the same time on the same microbatch: neither waits for the other."""
        n = len(self.groups)
        reach = [{v for u, v in self.edges if u == g} for g in range(n)]
        for g in reversed(range(n)):
            reach[g] |= {w for v in tuple(reach[g]) for w in reach[v]}
        return any(b not in reach[a] for a in range(n) for b in range(a + 1, n))


def evaluate(problem: BranchProblem, groups: Sequence[Group]) -> BranchSolution:
    """Predicted time and bytes of a grouping, from the definition; limits are reported, not enforced.

    Raises PlanError when segments are missing or doubled, devices disagree or values would flow in a circle.
    """
    home = {s: g for g, group in enumerate(groups) for s in group.segments}
    if sorted(s for group in groups for s in group.segments) != list(range(len(problem.segments))):
        raise PlanError(f"groups must hold each of the {len(problem.segments)} segments once")
    chosen = {s: problem.segments[s][o] for group in groups for s, o in zip(group.segments, group.options, strict=True)}
    for group in groups:
        if wrong := [s for s in group.segments if chosen[s].devices != group.devices]:
            raise PlanError(
                f"{problem.name(wrong[0])} is given an option for another number of devices than {group.devices}"
            )
    if sum(group.devices for group in groups) > problem.devices:
        raise PlanError(f"groups take {sum(g.devices for g in groups)} devices, there are {problem.devices}")
    flow: dict[tuple[int, int], float] = {}
    for e, (u, v, _) in enumerate(problem.edges):
        if home[u] != home[v]:
            pair = (home[u], home[v])
            flow[pair] = flow.get(pair, 0.0) + problem.hand_over_s(e)
    order = _topological(len(groups), set(flow))
    if order is None:
        raise PlanError(
            "values would flow in a circle between groups; a group cannot hold what lies around another one"
        )
    time = [sum(chosen[s].time_s for s in group.segments) for group in groups]
    finish, after, entering = [0.0] * len(groups), [0] * len(groups), [0.0] * len(groups)
    for g in order:
        finish[g] = time[g] + max((finish[h] + seconds for (h, to), seconds in flow.items() if to == g), default=0.0)
        entering[g] = sum(seconds for (_, to), seconds in flow.items() if to == g)
    for g in reversed(order):
        after[g] = max((after[to] + 1 for h, to in flow if h == g), default=0)
    memory = [
        sum(chosen[s].resting_bytes + problem.waiting(after[g]) * chosen[s].held_bytes for s in group.segments)
        + max(chosen[s].peak_bytes for s in group.segments)
        for g, group in enumerate(groups)
    ]
    busiest = max(t + problem.boundary_busy * e for t, e in zip(time, entering, strict=True))
    step = max(sum(chosen[s].step_s for s in group.segments) for group in groups)
    total = max(finish) + (problem.microbatches - 1) * busiest + step
    rank = {g: i for i, g in enumerate(order)}
    edges = tuple(sorted((rank[a], rank[b]) for a, b in flow))
    return BranchSolution(
        tuple(groups[g] for g in order),
        total,
        total,
        max(finish),
        busiest,
        step,
        tuple(memory[g] for g in order),
        edges,
    )


def _topological(n: int, edges: set[tuple[int, int]]) -> list[int] | None:
    order: list[int] = []
    while len(order) < n:
        ready = [g for g in range(n) if g not in order and all(a in order for a, b in edges if b == g)]
        if not ready:
            return None
        order.append(ready[0])
    return order
