"""Cutting a program into stages: submeshes, microbatches and interleaving.

In two rounds. Roughly: for every submesh the whole program is planned once, as if it ran on that submesh, at two
microbatch counts; the costs of every call at other counts are interpolated (`autopar.passes.search.stages.submesh`), and
the stage DP (`autopar.passes.stage`) cuts by them with memory left out: no cut is better than that says. Exactly, for the
most promising cuts in turn: planned at that count, within memory, and cut again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autopar.errors import InfeasibleError, InputError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.lower.cut import cut_points
from autopar.passes.rules.per_axis import taken_by
from autopar.passes.schedule import schedule_row
from autopar.passes.search.lower_bounds import could_fit, least_bytes, least_step_s
from autopar.passes.search.stages.draft import Draft
from autopar.passes.search.stages.finer import finer_submeshes
from autopar.passes.search.stages.limits import StageLimits, boundary_calls
from autopar.passes.search.stages.submesh import (
    Axes,
    PlansAhead,
    PlansByCount,
    SubmeshPlan,
    SubmeshPlans,
    flight_rule,
    held_apart,
    option_of,
    possible_schedules,
    two_counts,
)
from autopar.passes.search.task import Task
from autopar.passes.stage import StageProblem, StageShortage, evaluate, solve_stages_below

MOST_CHUNKED = 6
"""Cuts that are made again with several stages per group."""
_TIGHTER = (1.0, 0.85, 0.7)
"""Shares of the memory that submesh plans which recompute are planned for in turn, as no cut shares it out evenly."""
_STAGE_GAP = 0.002
"""Relative distance to its bound at which a cut is good enough."""
_NEAR = 1.25
"""Seconds that are up to this many times others are near them."""
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
        self._first_plans: list[PlansByCount] = []

    # --- rough ----------------------------------------------------------------------------------------------------------

    def rough(self) -> list[Draft]:
        """Cuts by an optimistic estimate, best first."""
        task = self.task
        resting, _ = least_bytes(task)
        if resting > task.room_bytes or least_step_s(task) >= self.best_s:
            return []
        self._first_plans, drafts = self._cut_on(self.limits.submeshes(task), self.best_s)
        return drafts

    def finer(self, cuts: Sequence[Draft], estimate_s: float) -> list[Draft]:
        """Cuts on finer meshes whose estimates are below estimate_s, best first. cuts: on the first meshes, best first."""
        to_beat_s = min(estimate_s, self.best_s)
        meshes = finer_submeshes(self.task, cuts)
        if not self._first_plans or not meshes:
            return []
        first = (plan.plan for plans in self._first_plans for plan in plans.planned.values())
        self.submeshes.narrow(meshes, taken_by(first))
        return [draft for draft in self._cut_on(meshes, to_beat_s)[1] if draft.step_s < to_beat_s]

    def _cut_on(self, submeshes: Sequence[Mesh], best_s: float) -> tuple[list[PlansByCount], list[Draft]]:
        """Plans on those of these submeshes that might win, and the cuts on them, best first. best_s: step time to beat."""
        open_counts = {mesh: self._counts(mesh, submeshes, best_s) for mesh in submeshes}
        for mesh, counts in open_counts.items():
            if counts and mesh.size not in self.submeshes.planned_at:
                self.submeshes.planned_at[mesh.size] = self._two_counts(mesh, counts)
        pairs = {mesh: self.submeshes.planned_at[mesh.size] for mesh, counts in open_counts.items() if counts}
        questions = [(pair[k], mesh) for k in (1, 0) for mesh, pair in pairs.items()]
        with self.submeshes.ahead(list(dict.fromkeys(questions))) as ahead:
            plans = self._at_high_counts(pairs, open_counts, best_s, ahead)
            lacking = {mesh: pairs[mesh][0] for mesh, on_mesh in plans.items() if pairs[mesh][0] not in on_mesh.planned}
            while True:
                for mesh, M in lacking.items():
                    second, first = ahead.on(M, mesh), plans.pop(mesh)
                    if second is not None:
                        plans[mesh] = self.submeshes.by_count({**first.planned, M: second}, first.counts)
                in_order = [plans[mesh] for mesh in submeshes if mesh in plans]
                drafts = self._drafts(in_order, best_s)
                lacking = self.lacking(drafts, plans, best_s)
                if not lacking:
                    return in_order, drafts

    def counts_on(self, meshes: Sequence[Mesh], best_s: float) -> list[int]:
        """The microbatch counts in which a pipeline with stages on all of these submeshes, and on no others, might take less than
        best_s."""
        open_counts = [self._counts(mesh, meshes, best_s) for mesh in dict.fromkeys(meshes)]
        return [M for M in self.submeshes.tasks.counts() if all(M in counts for counts in open_counts)]

    def _counts(self, mesh: Mesh, submeshes: Sequence[Mesh], best_s: float) -> list[int]:
        """The microbatch counts in which a pipeline with a stage on this one of the submeshes might take less than best_s."""
        if len(self.limits.kinds) > 1:  # groups of a slow kind do less than their part
            return self.submeshes.tasks.counts()
        sizes = {other.size for other in submeshes} if self.limits.mixed else {mesh.size}

        def worth(smaller: int, M: int) -> bool:
            launches_s = self.submeshes.least_work(smaller).launches_s(M, self.task.cluster.size, min(sizes))
            return self.task.pricers.least_step_s(launches_s) < best_s

        return [M for M in self.submeshes.tasks.counts(worth) if self._least_s(M, mesh, sizes) < best_s]

    def _two_counts(self, mesh: Mesh, counts: Sequence[int]) -> tuple[int, int]:
        """The counts to plan at, of these; of those alone that take little more than the best, where launches make the higher one
        take long anyway."""
        least_s = {M: self._least_s(M, mesh, {mesh.size}) for M in counts}
        near = [M for M in counts if least_s[M] <= _NEAR * min(least_s.values())]
        low, high = two_counts(counts)
        return (low, high) if high in near else two_counts(near)

    def _least_s(self, M: int, mesh: Mesh, sizes: Collection[int]) -> float:
        """Seconds of a step in M microbatches at least, with a stage on this mesh and others on submeshes of these sizes."""
        least_s = self.submeshes.least_work(M).pipeline_s(M, self.task.cluster.size, mesh.size, sizes)
        return self.task.pricers.least_step_s(least_s)

    def _at_high_counts(
        self,
        pairs: Mapping[Mesh, tuple[int, int]],
        open_counts: Mapping[Mesh, Sequence[int]],
        best_s: float,
        ahead: PlansAhead,
    ) -> dict[Mesh, PlansByCount]:
        """Plans at the higher counts of pairs on the submeshes that might win in one of the open counts."""
        if len(self.limits.kinds) > 1:
            best_s = math.inf
        plans: dict[Mesh, PlansByCount] = {}
        best_busy_s = math.inf
        too_busy: set[Axes] = set()
        for mesh, (low, high) in pairs.items():
            if too_busy.intersection(_halves(mesh)):
                too_busy.add(mesh.axes)
                ahead.leave_out(high, mesh)
                ahead.leave_out(low, mesh)
                continue
            at_high = ahead.on(high, mesh)
            if at_high is None:
                ahead.leave_out(low, mesh)
                continue
            on_mesh = self.submeshes.by_count({high: at_high}, open_counts[mesh])
            busy_s, fewer = high * self._busy_s(at_high), max(high - min(on_mesh.counts), 0)
            best_busy_s = min(best_busy_s, busy_s)
            # Even as a pipeline without bubble, in any memory, with fewer microbatches to launch; or much longer than on the best
            # submesh so far.
            saved_s = fewer * float(on_mesh.launched_s.sum()) * mesh.size / self.task.cluster.size
            if busy_s - saved_s < best_s and (busy_s <= _BUSY * best_busy_s or self.limits.mixed):
                plans[mesh] = on_mesh
                continue
            ahead.leave_out(low, mesh)
            if not self.limits.mixed:
                too_busy.add(mesh.axes)
        return plans

    @staticmethod
    def lacking(drafts: Sequence[Draft], plans: Mapping[Mesh, PlansByCount], best_s: float) -> dict[Mesh, int]:
        """Submeshes of good cuts in numbers of microbatches for which costs were taken from the only plan, at another count; and
        the counts that second plans are to be made at. drafts: the best first."""
        lacking: dict[Mesh, int] = {}
        enough_s = best_s
        for draft in drafts:
            M = draft.microbatches
            if draft.step_s >= enough_s:
                break
            meshes = draft.used_meshes()
            of_cut = ((mesh, on_mesh) for mesh, on_mesh in plans.items() if M in on_mesh.counts)
            used = {mesh: on_mesh for mesh, on_mesh in of_cut if on_mesh.decided(M).mesh in meshes}
            if all(M in on_mesh.planned for on_mesh in used.values()):
                enough_s = min(enough_s, _NEAR * draft.step_s)
            for mesh, on_mesh in used.items():
                if len(on_mesh.planned) == 1 and M not in on_mesh.planned:
                    lacking.setdefault(mesh, M)
        return lacking

    def _drafts(self, plans: Sequence[PlansByCount], cutoff_s: float) -> list[Draft]:
        """Cuts on these submeshes for every number of microbatches, best first; those that take cutoff_s are of no interest."""
        task, chunks = self.task, self.task.options.chunks
        drafts: list[Draft] = []
        for M in sorted({M for on_mesh in plans for M in on_mesh.counts}):
            at_M = [on_mesh.at(M) for on_mesh in plans if M in on_mesh.counts]
            cuts = self._cuts(self.submeshes.tasks.at(M), M, at_M, math.inf, chunks or 1, cutoff_s)
            drafts += [cut for cut in cuts if isinstance(cut, Draft)]
        drafts += self._on_one_mesh(drafts, cutoff_s)
        if chunks is None and task.options.schedule == "auto" and task.program.training:
            drafts += self._chunked(drafts)
        return sorted(drafts, key=lambda draft: draft.step_s)

    def _busy_s(self, plan: SubmeshPlan) -> float:
        """Seconds per microbatch that a group is busy at best."""
        u = plan.units
        total = float(u.forward_s.sum() + u.backward_s.sum() + u.weights_s.sum())
        return total * plan.mesh.size / self.task.cluster.size

    def _on_one_mesh(self, drafts: list[Draft], cutoff_s: float) -> list[Draft]:
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
                    cuts = self._cuts(draft.task, draft.microbatches, [plan], math.inf, draft.chunks, cutoff_s)
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
        self, task: Task, M: int, plans: list[SubmeshPlan], share: float, chunks: int | None, cutoff_s: float = math.inf
    ) -> Iterator[Draft | StageShortage]:
        """The best cut on these submeshes for every number of stages per group, and where none fits, what is short. cutoff_s:
        cuts that take as long are of no interest, unless they may become others in several stages per group."""
        for members, V, shape, mixed in self._problems(task, plans, M, chunks):
            of_members = tuple(plans[i] for i in members)
            problem = self.stage_problem(task, M, of_members, share, V)
            for aim in _aims(problem, mixed):
                below_s = cutoff_s if aim is problem else math.inf
                try:
                    cut = solve_stages_below(aim, below_s, mixed=mixed, chunks=V, shape=shape, gap=_STAGE_GAP)
                except InfeasibleError:
                    break
                if cut is None:
                    continue
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
            link_groups=self._link_groups(task),
        )

    @staticmethod
    def _link_groups(task: Task) -> tuple[tuple[int, ...], ...]:
        """By level the first rank of every group that its links join; none where the mesh of all stages is given, as it is known
        then where each of them lies."""
        levels = task.cluster.levels if task.options.mesh is None else ()
        return tuple(level.starts or tuple(range(0, task.cluster.size, level.group_size)) for level in levels)

    def _problems(
        self, task: Task, plans: list[SubmeshPlan], M: int, chunks: int | None
    ) -> Iterator[tuple[list[int], int, str, bool]]:
        """(plans, stages per group, how they lie, whether submeshes may differ) of every stage problem to solve."""
        options, every, limits = task.options, list(range(len(plans))), self.limits
        if not plans:
            return
        wanted, shape = chunks or limits.chunks, "loop"
        if options.schedule != "auto":
            row = schedule_row(options.schedule)
            least, most = row.stages
            wanted = limits.chunks or least
            shape = "v" if row.shape == "v" else "loop"
            if not row.serves(wanted):
                runs = str(least) if least == most else f"{least} or more"
                raise InputError(
                    f"schedule {options.schedule} runs {runs} {'stage' if runs == '1' else 'stages'} per group of ranks, "
                    f"Options.chunks is {wanted}; leave it out, or choose another schedule"
                )
        if wanted in (None, 1):
            yield from [(every, 1, "loop", True)] if limits.mixed else [([i], 1, "loop", False) for i in every]
        several_kinds, named_otherwise = (
            len(limits.kinds) > 1,
            limits.boundaries is not None and wanted != limits.chunks,
        )
        if wanted == 1 or several_kinds or named_otherwise or not (wanted or task.program.training):
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
