"""Cutting a program into stages: submeshes, microbatches and interleaving.

In two rounds. Roughly: for every submesh shape the whole program is planned once, as if it ran on that submesh, at two
microbatch counts M; what each call costs there (`passes.units`) is a + c / M in between, and the stage DP cuts by it
with memory left out: no cut is better than that says. Exactly, for the most promising cuts in turn: planned at that M,
within memory, and cut again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from autopar.errors import InfeasibleError, InputError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.lower.cut import cut_points
from autopar.passes.schedule import schedule_row
from autopar.passes.search.joint import Joint
from autopar.passes.search.spmd import Task
from autopar.passes.search.submesh import (
    MOST_GROUPS,
    Capture,
    Way,
    between,
    boundary_calls,
    derived,
    device_kinds,
    flight_rule,
    flying,
    least_bytes,
    microbatch_counts,
    option_of,
    plan_way,
    possible_schedules,
)
from autopar.passes.search.within_memory import joint_on
from autopar.passes.shard.mesh_plan import candidate_meshes
from autopar.passes.stage import StageProblem, StageShortage, StageSolution, solve_stages

MIXED_RANKS = 16
"""Up to here stages may have submeshes of different sizes."""
MOST_CHUNKED = 6
_TIGHTER = (1.0, 0.85, 0.7)
"""Shares of the memory that ways which recompute are planned for in turn, as no cut shares it out evenly."""


@dataclass(frozen=True)
class Draft:
    """A cut into stages before it is lowered."""

    task: Task
    microbatches: int
    chunks: int
    shape: str
    solution: StageSolution
    ways: tuple[Way, ...]

    @property
    def step_s(self) -> float:
        """Estimated seconds of a step: the slowest group's work, and what is left of filling the pipeline.

        Chunks divide the fill; with one stage per group the schedule's row says how much is left of it.
        """
        found = self.solution
        fill = sum(s.seconds for s in found.stages) - found.t_max_s
        left = 1 / self.chunks
        if self.chunks == 1 and self.task.program.training:
            left = min(row.fill_left for row in possible_schedules(self.task))
        return float(self.microbatches * found.t_max_s + fill * left + found.step_s)


class Search:
    """One search over cuts. best_s: step time to beat; shortages: what did not fit."""

    def __init__(self, task: Task, batch: int, recapture: Capture, best_s: float) -> None:
        self.task, self.batch, self.recapture, self.best_s = task, batch, recapture, best_s
        self.shortages: list[StageShortage] = []
        options, program = task.options, task.program
        self.boundaries = (
            boundary_calls(program, options.stage_boundaries) if options.stage_boundaries is not None else None
        )
        self.pp = len(self.boundaries) + 1 if self.boundaries is not None else options.pp
        points = cut_points(program)
        self.most_stages = len(points) + 1
        self.kinds = device_kinds(task.cluster)
        ends = [*self.kinds[1:], task.cluster.size]
        self.available = tuple(b - a for a, b in zip(self.kinds, ends, strict=True))
        self.mixed = task.cluster.size <= MIXED_RANKS or len(self.kinds) > 1
        self._tasks: dict[int, Task | None] = {}
        self._ways: dict[tuple[int, Mesh, float, str], Way | None] = {}
        self._joints: dict[tuple[int, Mesh], tuple[Task, Joint]] = {}
        self._least: dict[Program, tuple[float, float]] = {}

    # --- rough ----------------------------------------------------------------------------------------------------------

    def rough(self) -> list[Draft]:
        """Cuts by optimistic estimate, best first."""
        resting, _ = least_bytes(self.task)
        if resting / self.task.cluster.size > self.task.limit or self._least_s() >= self.best_s:
            return []
        counts = [M for M in microbatch_counts(self.task, self.batch) if self.at(M) is not None]
        if not counts:
            return []
        low, high = counts[len(counts) // 4], counts[(3 * len(counts)) // 4]
        pairs: list[tuple[Way, Way]] = []
        least = math.inf
        for mesh in self._meshes():
            first = self.way(high, mesh)
            if first is None or self._hopeless(first, high):
                continue
            busy = self._busy_s(first)
            least = min(least, busy)
            if busy > 2 * least and not self.mixed:
                continue
            second = self.way(low, mesh) if low != high else first
            if second is not None:
                pairs.append((second, first))
        found: list[Draft] = []
        chunks = self.task.options.chunks
        for M in counts:
            task = self.at(M)
            assert task is not None
            ways = [between(a, low, b, high, M) for a, b in pairs]
            found += [d for d in self._cuts(task, M, ways, math.inf, chunks or 1) if isinstance(d, Draft)]
        if chunks is None and self.task.options.schedule == "auto" and self.task.program.training:
            found += self._chunked(found)
        return sorted(found, key=lambda d: d.step_s)

    def _chunked(self, plain: list[Draft]) -> list[Draft]:
        """The most promising cuts with stages alike again, in two and four stages per group."""
        found: list[Draft] = []
        known: set[tuple[object, ...]] = set()
        for draft in sorted(plain, key=lambda d: d.microbatches * d.solution.t_max_s):
            used = {s.option for s in draft.solution.stages}
            key = (draft.microbatches, *sorted(draft.ways[i].mesh.axes for i in used))
            if len(used) == 1 and key not in known and len(known) < MOST_CHUNKED:
                known.add(key)
                way = draft.ways[used.pop()]
                for V in (2, 4):
                    if draft.microbatches % (self.task.cluster.size // way.mesh.size) == 0:
                        made = self._cuts(draft.task, draft.microbatches, [way], math.inf, V)
                        found += [d for d in made if isinstance(d, Draft)]
        return found

    def _busy_s(self, way: Way) -> float:
        """Seconds per microbatch that a group is busy at best."""
        u = way.units
        total = float(u.forward_s.sum() + u.backward_s.sum() + u.weights_s.sum())
        return total * way.mesh.size / self.task.cluster.size

    def _hopeless(self, way: Way, M: int) -> bool:
        """Whether even a pipeline without bubble and memory is no better than what there is."""
        return M * self._busy_s(way) >= self.best_s

    def _least_s(self) -> float:
        """No plan is faster: all products perfectly shared."""
        task, total = self.task, 0.0
        pricer = task.pricers[Mesh.of(dp=1)]
        for name, times in task.program.multiplicity.items():
            for call in task.program.templates[name].op_calls.values():
                total += times * pricer.work_s(call, task.rules.rule(call))
        return task.setting.microbatches * total / task.cluster.size

    def _meshes(self) -> list[Mesh]:
        """Submeshes of stages, fast links filled first."""
        ranks, pp = self.task.cluster.size, self.pp
        if pp is not None and ranks % pp == 0 and not (self.mixed and self.task.options.mesh is None):
            sizes = [ranks // pp]
        else:
            sizes = [n for n in range(1, ranks) if self._sensible(n)]
        return [
            Mesh(m.axes, first)
            for first in self.kinds
            for n in sizes
            for m in reversed(candidate_meshes(self.task.cluster, self.task.options, n))
        ]

    def _sensible(self, n: int) -> bool:
        ranks = self.task.cluster.size
        groups = ranks // n
        if self.mixed:
            return ranks % n == 0 or n & (n - 1) == 0
        return ranks % n == 0 and 2 <= groups <= min(self.most_stages, MOST_GROUPS) and groups & (groups - 1) == 0

    # --- exact ----------------------------------------------------------------------------------------------------------

    def within_reach(self, rough: Draft) -> bool:
        """Whether the cut could fit if everything were sharded over all ranks and every stage held the same."""
        task, groups = rough.task, len(rough.solution.groups)
        if task.program not in self._least:
            self._least[task.program] = least_bytes(task)
        resting, held = self._least[task.program]
        return (resting + held * min(groups, rough.microbatches)) / task.cluster.size <= task.limit

    def exact(self, rough: Draft, share: float = 0.95, policy: str | None = None) -> Draft | None:
        """The best cut at this M and on these submeshes that fits in that share of the memory, under a recompute policy."""
        M, task = rough.microbatches, self.adopt(rough)
        used = dict.fromkeys(rough.ways[s.option].mesh for s in rough.solution.stages)
        for tight in _TIGHTER if policy == "auto" else (1.0,):
            ways = self.ways_within(M, used, share * tight, policy)
            found = [d for d in self._cuts(task, M, ways, share, rough.chunks) if self._fits(d)]
            if found:
                return min((d for d in found if isinstance(d, Draft)), key=lambda d: d.step_s)
        return None

    def _fits(self, draft: Draft | StageShortage) -> bool:
        if isinstance(draft, StageShortage):
            self.shortages.append(draft)
            return False
        return True

    def adopt(self, rough: Draft) -> Task:
        """The draft's task, from here on the one for its microbatch count: what was planned for another is forgotten."""
        M = rough.microbatches
        if self._tasks.get(M) is not rough.task:
            self._ways = {key: way for key, way in self._ways.items() if key[0] != M}
        self._tasks[M] = rough.task
        return rough.task

    def ways_within(self, M: int, meshes: Iterable[Mesh], share: float, policy: str | None) -> list[Way]:
        """Ways on these submeshes within a share of the memory, where there are any."""
        found = (self.way(M, mesh, share, self.task.cluster.size // mesh.size, policy) for mesh in meshes)
        return [way for way in found if way is not None]

    # --- both -----------------------------------------------------------------------------------------------------------

    def at(self, M: int) -> Task | None:
        """The task for M microbatches, for pricing; None where the batch cannot be cut so."""
        if M not in self._tasks:
            self._tasks[M] = derived(self.task, M, self.recapture)
        return self._tasks[M]

    def way(self, M: int, mesh: Mesh, share: float = 0.0, pp: int = 1, policy: str | None = None) -> Way | None:
        """The whole program planned for one submesh, within a share of the memory of pp of them (0: any memory).

        policy: of recompute; by default the one that the options force, or none.
        """
        task = self.at(M)
        wanted = self.task.options.recompute
        policy = policy or (wanted if wanted != "auto" else "none")
        key = (M, mesh, share, policy)
        if task is not None and key not in self._ways:
            joint = self._joint(task, M, mesh, pp) if policy == "auto" else None
            self._ways[key] = plan_way(task, mesh, share * pp * task.limit_at(mesh.offset), pp, policy, joint)
        return self._ways.get(key)

    def _joint(self, task: Task, M: int, mesh: Mesh, pp: int) -> Joint:
        """Sharding and recompute of the whole program on one submesh; budgets that are asked in turn share its points."""
        known = self._joints.get((M, mesh))
        if known is None or known[0] is not task:
            known = self._joints[M, mesh] = task, joint_on(task, mesh, flying(task, pp))
        return known[1]

    def _cuts(
        self, task: Task, M: int, ways: list[Way], share: float, chunks: int | None = None
    ) -> Iterator[Draft | StageShortage]:
        points = cut_points(task.program)
        cuts = np.array([i in points for i in range(len(task.program.calls))])
        boundaries = self.boundaries
        if boundaries is not None and task.program is not self.task.program:
            boundaries = boundary_calls(task.program, task.options.stage_boundaries or ())
        problems = list(self._problems(task, ways, M, chunks))
        while problems:
            members, V, shape, mixed = problems.pop(0)
            try:
                problem = StageProblem(
                    tuple(option_of(ways[i], self.kinds, share * task.limit_at(ways[i].mesh.offset)) for i in members),
                    self.available,
                    M,
                    ways[members[0]].units.boundary_s,
                    cuts,
                    flight_rule(task, V),
                    self.pp if boundaries is None and V == 1 else None,
                    boundaries,
                    0.0,
                )
                found = solve_stages(problem, mixed=mixed, chunks=V, shape=shape, gap=0.002)
            except InfeasibleError:
                continue
            if isinstance(found, StageShortage):
                yield found
                continue
            used = sum(ways[members[found.stages[g[0]].option]].mesh.size for g in found.groups)
            if used == task.cluster.size and len(found.groups) > 1:
                yield Draft(task, M, V, shape, found, tuple(ways[i] for i in members))
            elif used < task.cluster.size and len(members) > 1 and len(self.kinds) == 1:
                # It would leave devices idle; stages that are alike use all of them.
                problems += [([i], 1, "loop", False) for i in members if task.cluster.size % ways[i].mesh.size == 0]

    def _problems(
        self, task: Task, ways: list[Way], M: int, chunks: int | None
    ) -> Iterator[tuple[list[int], int, str, bool]]:
        """(ways, stages per group, how they lie, whether submeshes may differ) of every stage problem to solve."""
        options, every = task.options, list(range(len(ways)))
        if not ways:
            return
        wanted, shape = chunks or options.chunks, "loop"
        if options.schedule != "auto":
            row = schedule_row(options.schedule)
            least, most = row.stages
            wanted = options.chunks or least
            shape = "v" if row.shape == "v" else "loop"
            if not row.serves(wanted):
                runs = str(least) if least == most else f"{least} or more"
                raise InputError(
                    f"schedule {options.schedule} runs {runs} {'stage' if runs == '1' else 'stages'} per group of ranks, "
                    f"Options.chunks is {wanted}; leave it out, or choose another schedule"
                )
        if wanted in (None, 1):
            yield from [(every, 1, "loop", True)] if self.mixed else [([i], 1, "loop", False) for i in every]
        if wanted == 1 or len(self.kinds) > 1 or self.boundaries is not None or not (wanted or task.program.training):
            return
        for i in every:
            groups = task.cluster.size // ways[i].mesh.size
            if (self.pp is not None and groups != self.pp) or groups * ways[i].mesh.size != task.cluster.size:
                continue
            for V in (wanted,) if wanted else (2, 4):
                if groups > 1 and groups * V <= self.most_stages and (wanted or M % groups == 0):
                    yield [i], V, shape, False
