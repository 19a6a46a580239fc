"""Cutting a program into stages: submeshes, microbatches and interleaving.

In two rounds. Roughly: for every submesh the whole program is planned once, as if it ran on that submesh, at two
microbatch counts; the costs of every call at other counts are interpolated (`autopar.passes.search.stages.submesh`), and
the stage DP (`autopar.passes.stage`) cuts by them with memory left out: no cut is better than that says. Exactly, for the
most promising cuts in turn: planned at that count, within memory, and cut again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from autopar.errors import InfeasibleError, InputError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.lower.cut import cut_points
from autopar.passes.rules.per_axis import taken_by
from autopar.passes.schedule import schedule_row
from autopar.passes.search.lower_bounds import could_fit, host_s, least_busy_s, least_bytes, least_step_s
from autopar.passes.search.stages.draft import Draft
from autopar.passes.search.stages.finer import finer_submeshes
from autopar.passes.search.stages.limits import StageLimits, boundary_calls
from autopar.passes.search.stages.submesh import (
    Axes,
    PlansAtTwoCounts,
    SubmeshPlan,
    SubmeshPlans,
    flight_rule,
    held_apart,
    option_of,
    possible_schedules,
    two_counts,
)
from autopar.passes.search.task import Task
from autopar.passes.stage import StageProblem, StageShortage, evaluate, solve_stages

MOST_CHUNKED = 6
"""Cuts that are made again with several stages per group."""
_TIGHTER = (1.0, 0.85, 0.7)
"""Shares of the memory that submesh plans which recompute are planned for in turn, as no cut shares it out evenly."""
_STAGE_GAP = 0.002
"""Relative distance to its bound at which a cut is good enough."""
_BUSY = 2.0
"""Submeshes that keep their devices busy this many times as long as the best one are left out."""


class CutSearch:
    """One search over cuts. best_s: step time to beat. nearest: of the cuts that did not fit the one that is short of least."""

    def __init__(self, submeshes: SubmeshPlans, best_s: float) -> None:
        self.submeshes, self.best_s = submeshes, best_s
        self.task = submeshes.task
        self.limits = StageLimits.of(self.task)
        self.nearest: StageShortage | None = None
        self._least_bytes: dict[Program, tuple[float, float]] = {}
        self._first_plans: PlansAtTwoCounts | None = None

    # --- rough ----------------------------------------------------------------------------------------------------------

    def rough(self) -> list[Draft]:
        """Cuts by an optimistic estimate, best first."""
        task = self.task
        resting, _ = least_bytes(task)
        if resting > task.room_bytes or least_step_s(task) >= self.best_s:
            return []
        counts = self.submeshes.tasks.counts()
        if not counts:
            return []
        self._first_plans = self._plans(self.limits.submeshes(task), *two_counts(counts), self.best_s)
        return self._drafts(self._first_plans)

    def finer(self, cuts: Sequence[Draft], estimate_s: float) -> list[Draft]:
        """Cuts on finer meshes whose estimates are below estimate_s, best first. cuts: on the first meshes, best first."""
        first, to_beat_s = self._first_plans, min(estimate_s, self.best_s)
        meshes = finer_submeshes(self.task, cuts)
        if first is None or not meshes:
            return []
        self.submeshes.narrow(meshes, taken_by(plan.plan for pair in first.pairs for plan in pair))
        plans = self._plans(meshes, first.low, first.high, to_beat_s)
        return [draft for draft in self._drafts(plans) if draft.step_s < to_beat_s]

    def _drafts(self, plans: PlansAtTwoCounts) -> list[Draft]:
        """Cuts on the submeshes of these plans for every number of microbatches, best first."""
        task, chunks = self.task, self.task.options.chunks
        drafts: list[Draft] = []
        for M in self.submeshes.tasks.counts():
            cuts = self._cuts(self.submeshes.tasks.at(M), M, plans.at(M), math.inf, chunks or 1)
            drafts += [cut for cut in cuts if isinstance(cut, Draft)]
        drafts += self._on_one_mesh(drafts)
        if chunks is None and task.options.schedule == "auto" and task.program.training:
            drafts += self._chunked(drafts)
        return sorted(drafts, key=lambda draft: draft.step_s)

    def _plans(self, submeshes: Sequence[Mesh], low: int, high: int, best_s: float) -> PlansAtTwoCounts:
        """Plans on those of these submeshes that might win. best_s: step time to beat."""
        task, share = self.submeshes.tasks.at(high), 1 / self.task.cluster.size
        if len(self.limits.kinds) > 1:  # groups of a slow kind do less than their part
            best_s = math.inf
        meshes = [
            mesh
            for mesh in submeshes
            if low * least_busy_s(self.submeshes.tasks.at(low), mesh) * mesh.size * share < best_s
        ]
        pairs: list[tuple[SubmeshPlan, SubmeshPlan]] = []
        best_busy_s = math.inf
        too_busy: set[Axes] = set()
        with self.submeshes.ahead([(M, mesh) for M in dict.fromkeys((high, low)) for mesh in meshes]) as plans:
            high_plans: list[tuple[Mesh, SubmeshPlan]] = []
            for mesh in meshes:
                if too_busy.intersection(_halves(mesh)):
                    too_busy.add(mesh.axes)
                    plans.leave_out(high, mesh)
                    plans.leave_out(low, mesh)
                    continue
                at_high = plans.on(high, mesh)
                busy_s = self._busy_s(at_high) if at_high is not None else math.inf
                best_busy_s = min(best_busy_s, busy_s)
                # Even as a pipeline without bubble, in any memory, with fewer microbatches to launch; or much longer than on
                # the best submesh so far.
                launched_s = host_s(task, mesh) * mesh.size * share
                if high * busy_s - (high - low) * launched_s >= best_s or (
                    busy_s > _BUSY * best_busy_s and not self.limits.mixed
                ):
                    plans.leave_out(low, mesh)
                    if at_high is not None and not self.limits.mixed:
                        too_busy.add(mesh.axes)
                elif at_high is not None:
                    high_plans.append((mesh, at_high))
            for mesh, at_high in high_plans:
                at_low = plans.on(low, mesh)
                if at_low is not None:
                    pairs.append((at_low, at_high))
        return PlansAtTwoCounts(low, high, pairs)

    def _busy_s(self, plan: SubmeshPlan) -> float:
        """Seconds per microbatch that a group is busy at best."""
        u = plan.units
        total = float(u.forward_s.sum() + u.backward_s.sum() + u.weights_s.sum())
        return total * plan.mesh.size / self.task.cluster.size

    def _on_one_mesh(self, drafts: list[Draft]) -> list[Draft]:
        """Cuts whose stages all have one of the meshes of a cut that has several: what values cost that go from mesh to mesh is
        known once a cut is lowered, so the cut that is best without may be the slower one."""
        alike: list[Draft] = []
        seen: set[tuple[int, Mesh]] = set()
        for draft in drafts:
            meshes = draft.used_meshes() if len(self.limits.kinds) == 1 else []
            for mesh in meshes if len(meshes) > 1 else ():
                if (draft.microbatches, mesh) not in seen:
                    seen.add((draft.microbatches, mesh))
                    [plan] = (plan for plan in draft.submesh_plans if plan.mesh == mesh)
                    cuts = self._cuts(draft.task, draft.microbatches, [plan], math.inf, draft.chunks)
                    alike += [cut for cut in cuts if isinstance(cut, Draft)]
        return alike

    def _chunked(self, drafts: list[Draft]) -> list[Draft]:
        """The most promising cuts with stages alike again, in two and four stages per group."""
        chunked: list[Draft] = []
        seen: set[tuple[object, ...]] = set()
        for draft in sorted(drafts, key=lambda d: d.microbatches * d.solution.t_max_s):
            used = {s.option for s in draft.solution.stages}
            key = (draft.microbatches, *sorted(draft.submesh_plans[i].mesh.axes for i in used))
            if len(used) == 1 and key not in seen and len(seen) < MOST_CHUNKED:
                seen.add(key)
                plan = draft.submesh_plans[used.pop()]
                for V in (2, 4):
                    if draft.microbatches % (self.task.cluster.size // plan.mesh.size) == 0:
                        cuts = self._cuts(draft.task, draft.microbatches, [plan], math.inf, V)
                        chunked += [cut for cut in cuts if isinstance(cut, Draft)]
        return chunked

    # --- exact ----------------------------------------------------------------------------------------------------------

    def within_reach(self, rough: Draft) -> bool:
        """Whether the cut could fit if everything were sharded over all ranks, wherever the stages begin."""
        task, groups = rough.task, len(rough.solution.groups)
        if task.program not in self._least_bytes:
            self._least_bytes[task.program] = least_bytes(task)
        counts, M = [1.0], rough.microbatches
        if rough.chunks == 1 and len(rough.used_meshes()) == 1:  # else other cuts may have more or fewer groups
            rules = [row.in_flight(1) for row in possible_schedules(task) if row.serves(1)]
            counts = [min(rule(after, groups, M) for rule in rules) for after in range(groups)]
        room = [task.room_bytes / len(counts)] * len(counts)
        return could_fit(task, self._least_bytes[task.program], room, counts)

    def exact(self, rough: Draft, share: float, policy: str | None) -> Draft | None:
        """The best cut at this M and on these submeshes that fits in that share of the memory, under a recompute policy."""
        M, task = rough.microbatches, rough.task
        self.submeshes.use(M, task)
        for tight in _TIGHTER if policy == "auto" else (1.0,):
            plans = self.submeshes.within(M, rough.used_meshes(), share * tight, policy)
            cuts = list(self._cuts(task, M, plans, share, rough.chunks))
            for cut in cuts:
                if isinstance(cut, StageShortage):
                    self.note(cut)
            drafts = [cut for cut in cuts if isinstance(cut, Draft)]
            if drafts:
                method = rough.solution.method
                return min(drafts, key=lambda draft: (draft.solution.method != method, draft.step_s))
        return None

    def note(self, shortage: StageShortage | None) -> None:
        """A cut, if any, did not fit."""
        known = [s for s in (self.nearest, shortage) if s is not None]
        self.nearest = min(known, key=lambda s: (s.ratio, s.describe()), default=None)

    # --- both -----------------------------------------------------------------------------------------------------------

    def _cuts(
        self, task: Task, M: int, plans: list[SubmeshPlan], share: float, chunks: int | None
    ) -> Iterator[Draft | StageShortage]:
        """The best cut on these submeshes for every number of stages per group, and where none fits, what is short."""
        for members, V, shape, mixed in self._problems(task, plans, M, chunks):
            of_members = tuple(plans[i] for i in members)
            problem = self.stage_problem(task, M, of_members, share, V)
            for aim in _aims(problem, mixed):
                try:
                    cut = solve_stages(aim, mixed=mixed, chunks=V, shape=shape, gap=_STAGE_GAP)
                except InfeasibleError:
                    break
                if isinstance(cut, StageShortage):
                    yield cut
                    break
                cut = replace(evaluate(problem, cut.pieces, cut.groups), method=cut.method)
                if len(cut.groups) > 1:
                    yield Draft(task, M, V, shape, cut, of_members)

    def stage_problem(self, task: Task, M: int, plans: Sequence[SubmeshPlan], share: float, V: int) -> StageProblem:
        """The problem of the stage DP: V stages per group on these submeshes, each in a share of its memory."""
        limits = self.limits
        points = cut_points(task.program)
        boundaries = limits.boundaries
        if boundaries is not None and task.program is not self.task.program:
            boundaries = boundary_calls(task.program, task.options.stage_boundaries or ())
        return StageProblem(
            tuple(option_of(plan, limits.kinds, share * task.limit_at(plan.mesh)) for plan in plans),
            limits.available,
            M,
            plans[0].units.boundary_s,
            np.array([i in points for i in range(len(task.program.calls))]),
            flight_rule(task, V),
            limits.pp if boundaries is None and V == 1 else None,
            boundaries,
            0.0,
            *held_apart(task, V),
            no_idle=True,
            link_groups=tuple(
                level.starts or tuple(range(0, task.cluster.size, level.group_size)) for level in task.cluster.levels
            ),
        )

    def _problems(
        self, task: Task, plans: list[SubmeshPlan], M: int, chunks: int | None
    ) -> Iterator[tuple[list[int], int, str, bool]]:
        """(plans, stages per group, how they lie, whether submeshes may differ) of every stage problem to solve."""
        options, every, limits = task.options, list(range(len(plans))), self.limits
        if not plans:
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
            yield from [(every, 1, "loop", True)] if limits.mixed else [([i], 1, "loop", False) for i in every]
        several_kinds, named = len(limits.kinds) > 1, limits.boundaries is not None
        if wanted == 1 or several_kinds or named or not (wanted or task.program.training):
            return
        for i in every:
            groups = task.cluster.size // plans[i].mesh.size
            if (limits.pp is not None and groups != limits.pp) or groups * plans[i].mesh.size != task.cluster.size:
                continue
            for V in (wanted,) if wanted else (2, 4):
                if groups > 1 and groups * V <= limits.most_stages and (wanted or M % groups == 0):
                    yield [i], V, shape, False


def _halves(mesh: Mesh) -> Iterator[Axes]:
    """The axes of meshes of half as many ranks, each of which can do the work of two ranks of this one in twice the time: where
    such a mesh keeps its devices busy for too long, so does this one."""
    for i, (name, size) in enumerate(mesh.axes):
        if size % 2 == 0:
            half = ((name, size // 2),) if size > 2 else ()
            yield (*mesh.axes[:i], *half, *mesh.axes[i + 1 :])


def _aims(problem: StageProblem, mixed: bool) -> list[StageProblem]:
    """The problems that a cut should solve well. Where W is apart the least span, which no table may reach, and the
    span of 1F1B: a cut that is good at that leaves little to fill."""
    return [problem, replace(problem, weights_apart=False)] if mixed and problem.weights_apart else [problem]
