"""Segments, their options, what flows between them, and what a grouping costs, from the definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import networkx as nx

from autopar.errors import InputError, PlanError
from autopar.ir.schedules import InFlight, one_f_one_b


@dataclass(frozen=True)
class SegmentOption:
    """One way to run a segment: devices, seconds per microbatch (forward and backward), seconds once per step, bytes on a
    device (always, per microbatch in flight, and at the largest moment beside those); kind: of the devices."""

    devices: int
    time_s: float
    step_s: float = 0.0
    resting_bytes: float = 0.0
    held_bytes: float = 0.0
    peak_bytes: float = 0.0
    kind: int = 0


@dataclass(frozen=True)
class BranchProblem:
    """Segments in topological order (options per segment), and what flows between them.

    edges: (u, v, bytes of a microbatch that v reads from u, gradients back included). A hand-over between groups takes
    latency_s + bytes / bandwidth_Bps; the share `boundary_busy` of it keeps the reading group busy. limit_bytes: of one
    device. in_flight: asked with the number of groups after a group on the longest path, and one more than that as the
    number of stages. every_device: the groups' devices must add up to all. kinds: devices of every kind, where there are
    several; a group has devices of one. Raises InputError for edges that do not rise and for segments without options.
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
    kinds: tuple[int, ...] = ()

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

    @property
    def available(self) -> tuple[int, ...]:
        """The number of devices of every kind."""
        return self.kinds or (self.devices,)

    def used(self, groups: Sequence[SegmentGroup]) -> tuple[int, ...]:
        """How many devices of every kind groups take."""
        return tuple(sum(g.devices for g in groups if g.kind == kind) for kind in range(len(self.available)))

    def hand_over_s(self, edge: int) -> float:
        """Seconds of an edge between two groups."""
        return self.latency_s + self.edges[edge][2] / self.bandwidth_Bps

    def admits(self, solution: BranchSolution) -> bool:
        """Whether a grouping is within the memory of every device and uses as many devices as must be."""
        used = self.used(solution.groups)
        some = all(n <= most for n, most in zip(used, self.available, strict=True))
        enough = used == self.available if self.every_device else some
        return enough and max(solution.memory) <= self.limit_bytes

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Kinds and numbers of devices that a group may have."""
        options = {(o.kind, o.devices) for row in self.segments for o in row}
        return sorted((kind, devices) for kind, devices in options if devices <= self.available[kind])

    def fastest_options(self, devices: int, kind: int = 0) -> list[int]:
        """Per segment the index of its fastest option on that many devices of a kind; -1 where it has none."""

        def fastest(options: tuple[SegmentOption, ...]) -> int:
            fitting = [i for i, option in enumerate(options) if (option.kind, option.devices) == (kind, devices)]
            return min(fitting, key=lambda i: options[i].time_s, default=-1)

        return [fastest(options) for options in self.segments]

    def waiting(self, after: int) -> float:
        """Microbatches in flight in a group with so many groups after it."""
        return self.in_flight(after, after + 1, self.microbatches)


@dataclass(frozen=True)
class SegmentGroup:
    """Segments that share `devices` devices of a kind; options[i]: index of the option of segments[i]."""

    segments: tuple[int, ...]
    devices: int
    options: tuple[int, ...]
    kind: int = 0


@dataclass(frozen=True)
class BranchSolution:
    """groups in an order in which values flow. bound: no grouping is faster. memory: bytes on a device per group.

    latency_s: of one microbatch. busiest_s: seconds that the busiest group works per microbatch.
    """

    groups: tuple[SegmentGroup, ...]
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
        flow = nx.DiGraph(self.edges)
        flow.add_nodes_from(range(n))
        return nx.transitive_closure_dag(flow).number_of_edges() < n * (n - 1) // 2


def evaluate(problem: BranchProblem, groups: Sequence[SegmentGroup]) -> BranchSolution:
    """Predicted time and bytes of a grouping, from the definition; limits are reported, not enforced.

    Raises PlanError when segments are missing or doubled, devices disagree or values would flow in a circle.
    """
    _check_groups(problem, groups)
    flow = _flow(problem, groups)
    try:
        order = list(nx.lexicographical_topological_sort(flow))
    except nx.NetworkXUnfeasible:
        raise PlanError(
            "values would flow in a circle between groups; a group cannot hold what lies around another one"
        ) from None
    chosen = [[problem.segments[s][o] for s, o in zip(group.segments, group.options, strict=True)] for group in groups]
    time = [sum(option.time_s for option in options) for options in chosen]
    finish, after, entering = [0.0] * len(groups), [0] * len(groups), [0.0] * len(groups)
    for g in order:
        arrivals = [(h, flow.edges[h, g]["seconds"]) for h in flow.predecessors(g)]
        finish[g] = time[g] + max((finish[h] + seconds for h, seconds in arrivals), default=0.0)
        entering[g] = sum(seconds for _, seconds in arrivals)
    for g in reversed(order):
        after[g] = max((after[to] + 1 for to in flow.successors(g)), default=0)
    memory = [
        sum(option.resting_bytes + problem.waiting(after[g]) * option.held_bytes for option in options)
        + max(option.peak_bytes for option in options)
        for g, options in enumerate(chosen)
    ]
    busiest = max(t + problem.boundary_busy * e for t, e in zip(time, entering, strict=True))
    step = max(sum(option.step_s for option in options) for options in chosen)
    total = max(finish) + (problem.microbatches - 1) * busiest + step
    rank = {g: i for i, g in enumerate(order)}
    return BranchSolution(
        tuple(groups[g] for g in order),
        total,
        total,
        max(finish),
        busiest,
        step,
        tuple(memory[g] for g in order),
        tuple(sorted((rank[a], rank[b]) for a, b in flow.edges)),
    )


def _check_groups(problem: BranchProblem, groups: Sequence[SegmentGroup]) -> None:
    """Raises PlanError where segments are missing or doubled, or devices disagree."""
    if sorted(s for group in groups for s in group.segments) != list(range(len(problem.segments))):
        raise PlanError(f"groups must hold each of the {len(problem.segments)} segments once")
    for group in groups:
        for s, o in zip(group.segments, group.options, strict=True):
            option = problem.segments[s][o]
            if (option.devices, option.kind) != (group.devices, group.kind):
                raise PlanError(
                    f"{problem.name(s)} is given an option for another number of devices than {group.devices}"
                )
    for used, available in zip(problem.used(groups), problem.available, strict=True):
        if used > available:
            raise PlanError(f"groups take {used} devices, there are {available}")


def _flow(problem: BranchProblem, groups: Sequence[SegmentGroup]) -> nx.DiGraph:
    """Groups, and the seconds to hand over what flows between them."""
    home = {s: g for g, group in enumerate(groups) for s in group.segments}
    flow = nx.DiGraph()
    flow.add_nodes_from(range(len(groups)))
    for e, (u, v, _) in enumerate(problem.edges):
        pair = home[u], home[v]
        if pair[0] != pair[1]:
            seconds = flow.edges[pair]["seconds"] if flow.has_edge(*pair) else 0.0
            flow.add_edge(*pair, seconds=seconds + problem.hand_over_s(e))
    return flow
