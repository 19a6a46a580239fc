"""The grouping as integers: CP-SAT over x[segment, group, option].

Groups are numbered so that group(u) <= group(v) on every edge; z[edge, h, g] says that an edge runs from group h to g.
Then start[g] >= start[h] + time[h] + hand-overs wherever some z is set, `busiest` is above every group's time, and bytes
are counted by how many groups come after (one boolean per number). Two sums that hold anyway tighten the bound: devices
times seconds fit in devices * busiest, and latency is at least every path of segments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil, floor, inf
from typing import TYPE_CHECKING

from autopar.passes.branch.grouping import BranchProblem, BranchSolution, SegmentGroup, SegmentOption, evaluate
from autopar.passes.solvers.cp_sat import counted_solver, cp_sat, solved

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

Weight = Callable[[SegmentOption], int]

UNITS = 10**8
"""Integer units in the time of the whole model; bytes are counted whole, upwards."""


def _resting_and_held(option: SegmentOption, waiting: float) -> int:
    return _whole(option.resting_bytes + waiting * option.held_bytes)


def _whole(value: float) -> int:
    return ceil(value - 1e-6)


class GroupingModel:
    """The CP-SAT model: least time under the memory limit, or (memory) least memory."""

    def __init__(self, problem: BranchProblem, G: int, memory: bool = False) -> None:
        self.problem, self.G, self.model = problem, G, cp_sat().CpModel()
        whole = sum(max(o.time_s + o.step_s for o in options) for options in problem.segments)
        whole += sum(problem.hand_over_s(e) for e in range(len(problem.edges)))
        self.scale = UNITS / max(whole, 1e-300)
        self.x = {
            (s, g, i): self.model.new_bool_var(f"x{s}_{g}_{i}")
            for s, options in enumerate(problem.segments)
            for g in range(G)
            for i, o in enumerate(options)
            if o.devices <= problem.available[o.kind]
        }
        self.y = [[self._sum(s, g, lambda o: 1) for g in range(G)] for s in range(len(problem.segments))]
        self._group()
        pairs = self._crossings()
        if memory:
            self.model.minimize(self._memory(pairs, None))
        else:
            if problem.limit_bytes < inf:
                self._memory(pairs, problem.limit_bytes)
            self._time(pairs)

    def _sum(self, s: int, g: int, weight: Weight) -> cp_model.LinearExpr | int:
        options = self.problem.segments[s]
        return sum(weight(o) * self.x[s, g, i] for i, o in enumerate(options) if (s, g, i) in self.x)

    def _all(self, g: int, weight: Weight) -> cp_model.LinearExpr | int:
        return sum(self._sum(s, g, weight) for s in range(len(self.problem.segments)))

    def _group(self) -> None:
        """Each segment in one group, groups in the order of the edges, one number of devices of one kind per group."""
        model, problem, n = self.model, self.problem, len(self.problem.segments)
        for kind, available in enumerate(problem.available):
            devices = [model.new_int_var(0, available, f"devices{kind}_{g}") for g in range(self.G)]
            model.add(sum(devices) == available if problem.every_device else sum(devices) <= available)
            for g in range(self.G):
                model.add(devices[g] <= available * sum(self.y[s][g] for s in range(n)))
            for (s, g, i), var in self.x.items():
                option = problem.segments[s][i]
                model.add(devices[g] == (option.devices if option.kind == kind else 0)).only_enforce_if(var)
        for s in range(n):
            model.add(sum(self.y[s]) == 1)
        for u, v, _ in problem.edges:
            for g in range(self.G - 1):
                model.add(sum(self.y[v][: g + 1]) <= sum(self.y[u][: g + 1]))
        for g in range(self.G - 1):
            for s in range(n):
                model.add(self.y[s][g + 1] <= sum(self.y[t][g] for t in range(n)))

    def _crossings(self) -> dict[tuple[int, int], list[tuple[int, cp_model.IntVar]]]:
        """Per pair of groups (h < g) the edges between them: (edge, whether it runs there)."""
        edges_between: dict[tuple[int, int], list[tuple[int, cp_model.IntVar]]] = {}
        for e, (u, v, _) in enumerate(self.problem.edges):
            for h in range(self.G):
                for g in range(h + 1, self.G):
                    z = self.model.new_bool_var(f"z{e}_{h}_{g}")
                    self.model.add(z >= self.y[u][h] + self.y[v][g] - 1)
                    self.model.add(z <= self.y[u][h])
                    self.model.add(z <= self.y[v][g])
                    edges_between.setdefault((h, g), []).append((e, z))
        return edges_between

    def _seconds(self, value: float) -> int:
        return round(value * self.scale)

    def _time(self, pairs: dict[tuple[int, int], list[tuple[int, cp_model.IntVar]]]) -> None:
        model, problem, top = self.model, self.problem, 4 * UNITS
        time = [self._all(g, lambda o: self._seconds(o.time_s)) for g in range(self.G)]
        start = [model.new_int_var(0, top, f"start{g}") for g in range(self.G)]
        latency, busiest, step = (model.new_int_var(0, top, n) for n in ("latency", "busiest", "step"))
        for g in range(self.G):
            entering = [
                self._seconds(problem.boundary_busy * problem.hand_over_s(e)) * z
                for h in range(g)
                for e, z in pairs.get((h, g), ())
            ]
            model.add(latency >= start[g] + time[g])
            model.add(busiest >= time[g] + sum(entering))
            model.add(step >= self._all(g, lambda o: self._seconds(o.step_s)))
        model.add(
            problem.devices * busiest
            >= sum(self._all(g, lambda o: o.devices * self._seconds(o.time_s)) for g in range(self.G))
        )
        each = [
            sum(self._sum(s, g, lambda o: self._seconds(o.time_s)) for g in range(self.G)) for s in range(len(self.y))
        ]
        end = [model.new_int_var(0, top, f"end{s}") for s in range(len(self.y))]
        for s, seconds in enumerate(each):
            model.add(end[s] >= seconds)
            model.add(latency >= end[s])
        for u, v, _ in problem.edges:
            model.add(end[v] >= end[u] + each[v])
        for (h, g), edges in pairs.items():
            handed = sum(self._seconds(problem.hand_over_s(e)) * z for e, z in edges)
            for _, z in edges:
                model.add(start[g] >= start[h] + time[h] + handed).only_enforce_if(z)
        model.minimize(latency + (problem.microbatches - 1) * busiest + step)

    def _memory(
        self, pairs: dict[tuple[int, int], list[tuple[int, cp_model.IntVar]]], limit: float | None
    ) -> cp_model.IntVar:
        """Bytes of each group by how many groups come after it; limit None: at most what is returned."""
        model, problem, G = self.model, self.problem, self.G
        largest = max(
            o.resting_bytes + problem.waiting(G - 1) * o.held_bytes + o.peak_bytes for w in problem.segments for o in w
        )
        top = len(problem.segments) * (ceil(largest) + 1)
        bound = model.new_int_var(0, top, "bytes")
        if limit is not None:
            model.add(bound <= floor(min(limit, top)))
        after = [model.new_int_var(0, G - 1 - g, f"after{g}") for g in range(G)]
        for (h, g), edges in pairs.items():
            for _, z in edges:
                model.add(after[h] >= after[g] + 1).only_enforce_if(z)
        for g in range(G):
            peak = model.new_int_var(0, top, f"peak{g}")
            for (s, group, i), var in self.x.items():
                if group == g and problem.segments[s][i].peak_bytes:
                    model.add(peak >= _whole(problem.segments[s][i].peak_bytes) * var)
            for k in range(G - g):
                here = model.new_bool_var(f"after{g}_{k}")
                model.add(after[g] == k).only_enforce_if(here)
                model.add(after[g] != k).only_enforce_if(here.negated())
                used = self._all(g, partial(_resting_and_held, waiting=problem.waiting(k)))
                model.add(used + peak <= bound).only_enforce_if(here)
        return bound

    def hint(self, solution: BranchSolution) -> None:
        """Starts the search from a known grouping."""
        chosen = {
            (s, g): o
            for g, group in enumerate(solution.groups)
            for s, o in zip(group.segments, group.options, strict=True)
        }
        for (s, g, i), var in self.x.items():
            self.model.add_hint(var, int(chosen.get((s, g)) == i))

    def solve(self, time_limit_s: float) -> tuple[BranchSolution | None, float]:
        """(best grouping found, lower bound of the total in seconds). time_limit_s: of the solver's own clock, which counts work,
        so that the grouping is the same on every machine."""
        solver = counted_solver(time_limit_s)
        status = solved(solver, self.model)
        if status not in (cp_sat().OPTIMAL, cp_sat().FEASIBLE):
            return None, 0.0
        groups = []
        for g in range(self.G):
            inside = [(s, i) for (s, group, i), var in self.x.items() if group == g and solver.value(var)]
            if inside:
                first = self.problem.segments[inside[0][0]][inside[0][1]]
                members, options = zip(*inside, strict=True)
                groups.append(SegmentGroup(members, first.devices, options, first.kind))
        terms = (self.problem.microbatches + 1) * (len(self.problem.segments) + len(self.problem.edges))
        return evaluate(self.problem, groups), (solver.best_objective_bound - terms / 2) / self.scale
