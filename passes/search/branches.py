"""Branches side by side: independent encoders and heads on device groups of their own, each with its own mesh.

Calls that neither feed nor follow each other are beside each other; where enough work is beside other work a program
branches. It is cut into *segments*, runs of calls with the same calls beside them (long ones in pieces, so that they may
be pipelined too). Every submesh shape prices every segment (`search.cuts`), `passes.branch` groups the segments, and
the groups become a plan: segments that follow each other in a group are one stage. As with cuts into stages, first
roughly for every number of microbatches and any memory, then exactly for the most promising ones.

Which group works when does not follow from a named schedule where a group has several stages. Groups form a DAG too, so
a schedule of one stage per group is made for that DAG, and every action of a group stands for those of its stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autopar.capture.apart import LEAST_BESIDE, LEAST_PIECE, beside
from autopar.errors import InfeasibleError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.account.calls import Units
from autopar.passes.branch import BranchProblem, BranchSolution, SegmentOption, solve_branches
from autopar.passes.lower.cut import Range, cut_points
from autopar.passes.search.cuts import Draft, Search
from autopar.passes.search.pipelines import Capture, _fitting, _settled, asks_for_pipeline
from autopar.passes.search.segment_chain import best_chain
from autopar.passes.search.spmd import Task
from autopar.passes.search.submesh import Way, between, flight_rule, microbatch_counts, possible_schedules
from autopar.passes.shard.mesh_plan import Candidate
from autopar.passes.stage import StageChoice, StageSolution

MOST_SEGMENTS, MOST_GROUPS = 10, 6
MOST_TRIED = 4
SOLVE_S = 5.0
HEAVY = 0.3
"""A segment with more than this share of the work is halved."""


@dataclass(frozen=True)
class BranchDraft(Draft):
    """Groups of segments before they are lowered."""

    @property
    def step_s(self) -> float:
        """Estimated seconds of a step. total_s is that of 1F1B; other schedules fill a part of what it idles."""
        found = self.solution
        idle = found.total_s - self.microbatches * found.t_max_s - found.step_s
        if not self.task.program.training or self.microbatches == 1:
            return float(found.total_s)
        left = min(row.branch_idle_left for row in possible_schedules(self.task))
        return float(found.total_s - (1 - left) * idle)


def search_branches(
    task: Task, batch: int, recapture: Capture, best_s: float, known: Search | None = None
) -> list[tuple[Task, Candidate]]:
    """Plans with branches side by side that are predicted faster than best_s, best first, with their tasks.

    Nothing for chains, for clusters of several kinds of devices, and where the options ask for a pipeline of their own.
    """
    if asks_for_pipeline(task.options) or task.cluster.size < 2 or not branches(task):
        return []
    search = BranchSearch(task, batch, recapture, best_s, known)
    made: list[tuple[Draft, Candidate]] = []
    for rough in search.rough()[:MOST_TRIED]:
        bar = made[0][1].solution.cost if made else best_s
        if rough.step_s >= bar * 1.05:
            break
        found = _fitting(search, rough, bar)
        if found is not None and found[1].solution.cost < best_s * 0.999:
            draft, candidate = found
            made.append((draft, replace(candidate, plan=replace(candidate.plan, origin="solver (branches)"))))
            made.sort(key=lambda m: m[1].solution.cost)
    return _settled(search, made, recapture)


# --- what lies beside what --------------------------------------------------------------------------------------------


def branches(task: Task) -> bool:
    """Whether enough work lies beside other work."""
    share = work_shares(task)
    sides = calls_beside(task.program, share)
    return any(
        s >= LEAST_PIECE and sum(share[j] for j in side) >= LEAST_BESIDE for s, side in zip(share, sides, strict=True)
    )


def work_shares(task: Task) -> list[float]:
    """Of every call, its part of the program's arithmetic."""
    pricer = task.pricers[Mesh.of(dp=1)]
    each = {
        name: sum(pricer.work_s(call, task.rules.rule(call)) for call in t.op_calls.values())
        for name, t in task.program.templates.items()
    }
    total = sum(each[c.template] for c in task.program.calls) or 1.0
    return [each[c.template] / total for c in task.program.calls]


def calls_beside(program: Program, share: Sequence[float]) -> list[frozenset[int]]:
    """Per call the calls with work that neither feed nor follow it."""
    edges = [sorted({r.index for r in call.inputs if r.kind == "call"}) for call in program.calls]
    return beside(edges, [s >= LEAST_PIECE for s in share])


def segments(program: Program, share: Sequence[float]) -> tuple[Range, ...]:
    """Runs of calls with the same calls beside them: at most MOST_SEGMENTS, heavy ones in pieces."""
    sides = calls_beside(program, share)
    points = cut_points(program)
    starts = [i for i in range(1, len(sides)) if sides[i] != sides[i - 1] and i in points]
    marks = [0, *starts, len(sides)]

    def work(i: int, j: int) -> float:
        return sum(share[i:j])

    while len(marks) - 1 > MOST_SEGMENTS:
        least = min(range(1, len(marks) - 1), key=lambda k: work(marks[k - 1], marks[k + 1]))
        del marks[least]
    while len(marks) - 1 < MOST_SEGMENTS:
        halves = []
        for i, j in pairwise(marks):
            inside = [p for p in range(i + 1, j) if p in points]
            if work(i, j) > HEAVY and inside:
                halves.append((work(i, j), min(inside, key=lambda p, i=i, j=j: abs(work(i, p) - work(p, j)))))  # type: ignore[misc]
        if not halves:
            break
        marks = sorted([*marks, max(halves)[1]])
    return tuple(pairwise(marks))


def crossing_bytes(program: Program, ranges: Sequence[Range]) -> dict[tuple[int, int], float]:
    """Bytes of a microbatch from segment to segment, gradients back included."""
    home = {i: s for s, (first, last) in enumerate(ranges) for i in range(first, last)}
    found: dict[tuple[int, int], float] = {}
    for ref, readers in program.readers.items():
        if ref.kind != "call":
            continue
        owner = program.template_of(program.calls[ref.index])
        ways = 2 if owner.tangents[ref.output] is not None and ref.index in program.backward_calls else 1
        source = home[ref.index]
        for target in {home[i] for i, _ in readers} - {source}:
            found[source, target] = found.get((source, target), 0.0) + ways * program.type_of(ref).nbytes
    return found


# --- the search -------------------------------------------------------------------------------------------------------


class BranchSearch(Search):
    """One search over groupings. known: a search over cuts of the same compilation; what it planned is used again."""

    def __init__(self, task: Task, batch: int, recapture: Capture, best_s: float, known: Search | None = None) -> None:
        super().__init__(task, batch, recapture, best_s)
        if known is not None:
            self._tasks, self._ways = dict(known._tasks), dict(known._ways)

    def rough(self) -> list[Draft]:
        """Groupings by estimate in any memory, best first; one per number of microbatches."""
        if len(self.kinds) > 1:
            return []
        counts = [M for M in microbatch_counts(self.task, self.batch) if self.at(M) is not None]
        if not counts or self._least_s() >= self.best_s:
            return []
        low, high = counts[len(counts) // 4], counts[(3 * len(counts)) // 4]
        pairs: list[tuple[Way, Way]] = []
        for mesh in self._meshes():
            first = self.way(high, mesh)
            second = self.way(low, mesh) if first is not None else None
            if first is not None and second is not None:
                pairs.append((second, first))
        found = []
        for M in counts if self.task.options.microbatches is not None or counts[0] == 1 else [1, *counts]:
            task = self.at(M)
            assert task is not None
            if low <= M:
                ways = [between(a, low, b, high, M) for a, b in pairs]
            elif low < high:
                small = self.at(low)
                assert small is not None
                early = [i for i, call in enumerate(small.program.calls) if call.early and M == 1]
                ways = [_larger(a, low, b, high, M, early) for a, b in pairs]
            else:
                ways = [way for a, _ in pairs if (way := self.way(M, a.mesh)) is not None]
            found += list(self._grouped(task, M, ways, math.inf))
        return sorted(found, key=lambda d: d.step_s)

    def exact(self, rough: Draft, share: float = 0.95, policy: str | None = None) -> Draft | None:
        """The best grouping at this M that fits in that share of the memory: on the draft's submeshes, or on any."""
        M, task = rough.microbatches, self.adopt(rough)
        used = dict.fromkeys(rough.ways[s.option].mesh for s in rough.solution.stages)
        for meshes in (used, dict.fromkeys(way.mesh for way in rough.ways)):
            ways = self.ways_within(M, meshes, share, policy)
            for draft in self._grouped(task, M, ways, task.limit * share):
                return draft
        return None

    def _grouped(self, task: Task, M: int, ways: list[Way], limit: float) -> Iterator[Draft]:
        """The best grouping of these submeshes."""
        if not ways:
            return
        share = work_shares(task)
        ranges = segments(task.program, share)
        if len(ranges) < 2:
            return
        sizes = crossing_bytes(task.program, ranges)
        options, of_way = zip(*(_options(ways, span, M) for span in ranges), strict=True)
        shared = sum(min(o.devices * o.time_s for o in row) for row in options) / task.cluster.size
        if M * shared >= self.best_s:  # even with every device busy all the time
            return
        latency_s, rate = _link(task, max(sizes.values(), default=1.0))
        problem = BranchProblem(
            options,
            tuple((u, v, b) for (u, v), b in sorted(sizes.items())),
            task.cluster.size,
            M,
            rate,
            latency_s,
            limit,
            0.0,
            flight_rule(task, 1),
            tuple(task.program.calls[first].path or f"calls {first}–{last - 1}" for first, last in ranges),
            True,
        )
        try:
            chain = best_chain(problem)
            known = () if chain is None else (chain,)
            found = solve_branches(problem, known=known, max_groups=MOST_GROUPS, time_limit_s=SOLVE_S)
        except InfeasibleError:
            return
        if found.side_by_side:
            yield _draft(task, M, ranges, found, of_way, ways, limit)


def _options(ways: Sequence[Way], span: Range, M: int) -> tuple[tuple[SegmentOption, ...], tuple[int, ...]]:
    """What a segment costs on every submesh, and which way that is; those that another one beats in all are left out."""
    first, last = span
    rows = []
    for way in ways:
        u = way.units
        time = float(sum(row[first:last].sum() for row in (u.forward_s, u.backward_s, u.weights_s)))
        rows.append(
            SegmentOption(
                way.mesh.size,
                time,
                float(u.step_s[first:last].sum()),
                float(u.resting_bytes[first:last].sum()),
                float(u.held_bytes[first:last].sum()),
                float(u.peak_bytes[first:last].max()),
            )
        )

    def better(a: SegmentOption, b: SegmentOption) -> bool:
        return (
            a.devices == b.devices
            and M * a.time_s + a.step_s < M * b.time_s + b.step_s
            and a.resting_bytes + a.held_bytes <= (b.resting_bytes + b.held_bytes) * 1.01
        )

    kept = [i for i, row in enumerate(rows) if not any(better(other, row) for other in rows)]
    return tuple(rows[i] for i in kept), tuple(kept)


def _larger(a: Way, low: int, b: Way, high: int, M: int, early: list[int]) -> Way:
    """A guess about larger microbatches: nothing takes less than in small ones, or more than in proportion.

    early: calls that there are only with several microbatches.
    """
    way = between(a, low, b, high, M)
    rows = {n: getattr(a.units, n) for n in Units.__dataclass_fields__}
    guess = {n: np.clip(getattr(way.units, n), row, row * low / M) for n, row in rows.items()}
    return replace(way, units=Units(**{n: np.delete(row, early) for n, row in guess.items()}))


def _link(task: Task, nbytes: float) -> tuple[float, float]:
    """(latency, bytes/s) of a hand-over between groups of a quarter of the ranks, which share its bytes."""
    ranks = max(task.cluster.size // 4, 1)
    pricer = task.pricers[Mesh.of(dp=ranks)]
    least, most = pricer.hand_over_s(1.0), pricer.hand_over_s(1.0 + nbytes / ranks)
    return least, nbytes / max(most - least, 1e-15)


def _draft(
    task: Task,
    M: int,
    ranges: Sequence[Range],
    found: BranchSolution,
    of_way: Sequence[tuple[int, ...]],
    ways: Sequence[Way],
    limit: float,
) -> BranchDraft:
    """The groups as stages: segments that follow each other in one group are one, on the mesh that suits them best."""
    home = {s: g for g, group in enumerate(found.groups) for s in group.segments}
    runs: list[list[int]] = []
    for s in range(len(ranges)):
        if runs and home[runs[-1][-1]] == home[s]:
            runs[-1].append(s)
        else:
            runs.append([s])
    stages = []
    for run in runs:
        group = found.groups[home[run[0]]]
        chosen = {of_way[s][o] for s, o in zip(group.segments, group.options, strict=True) if s in run}
        first, last = ranges[run[0]][0], ranges[run[-1]][1]
        costs = {w: _options([ways[w]], (first, last), M)[0][0] for w in chosen}
        w = min(costs, key=lambda w: (M * costs[w].time_s + costs[w].step_s, w))
        stages.append(StageChoice(first, last, w, costs[w].time_s, costs[w].step_s, found.memory[home[run[0]]], limit))
    largest_first = sorted(range(len(found.groups)), key=lambda g: -found.groups[g].devices)
    groups = tuple(tuple(k for k, run in enumerate(runs) if home[run[0]] == g) for g in largest_first)
    solution = StageSolution(
        tuple(stages),
        found.total_s,
        found.busiest_s,
        found.step_s,
        groups,
        tuple(found.memory[g] for g in largest_first),
        found.bound,
        "branches",
    )
    return BranchDraft(task, M, max(map(len, groups)), "any", solution, tuple(ways))
