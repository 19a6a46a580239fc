"""Plans on one mesh where memory is short: mesh, microbatches, sharding, recompute and offload chosen together.

More microbatches hold less for backward and pay for it in smaller products, and in parameters gathered again for each;
what rests in memory tiers costs its transfers. For every kind of offload, every mesh is tried with growing microbatch
counts. The fastest plan that any memory would allow bounds what a mesh can give, so a mesh is left as soon as its bound
is no better than the best plan so far, or as soon as its plan runs nothing again: then memory was enough.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from itertools import chain

from autopar.errors import ConstraintError, InfeasibleError
from autopar.ir.memory_levers import OFFLOAD_KINDS
from autopar.ir.mesh import Mesh
from autopar.passes.rules.per_axis import PerAxis, taken_by
from autopar.passes.search.lower_bounds import could_fit, least_bytes
from autopar.passes.search.microbatches import TasksByCount, microbatch_counts
from autopar.passes.search.one_mesh.finer import WORTH, meshes_worth_trying, walked
from autopar.passes.search.one_mesh.joint import JointSearch
from autopar.passes.search.one_mesh.within_memory import (
    HOPELESS,
    NEAR,
    UNLIKE,
    fastest_within_limit,
    joint_on,
    relieved,
    share_s,
    tighter_room,
)
from autopar.passes.search.task import RankedPlans, Task, account_of
from autopar.passes.shard.meshes import candidate_meshes
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.passes.shard.solve import Shortage
from autopar.passes.shard.uneven import rows_of

Question = tuple[Mesh, int, frozenset[str]]
"""A mesh, a number of microbatches, and the kinds of bytes that rest in memory tiers."""

_GOOD = 1.1
"""Plans that take up to this many times as long as the best one say what ops may take along axes of finer meshes."""
_MOMENT = 0.8
"""The share of the bytes that live for a moment in one plan that another one is taken to need as well."""


class ShortMemorySearch:
    """One search for plans on one mesh within memory; what it looked at once it does not look at again.

    best_s: seconds of a step to beat. byte_price: seconds per byte at the best plan so far; where plans of another kind are
    faster than all that fit, at the first of these, whose step took share_s of the seconds that the solver counts.
    moment_bytes: about what lives for a moment at the best plan, beside the bytes that the solver counts. faster: plans that
    were each faster than all before; near: others, which may be the faster ones once lines run while messages travel.
    without_room: meshes on which no plan fits in so many microbatches, with these kinds of offload.
    """

    def __init__(self, tasks: TasksByCount, without_room: Collection[Question] = ()) -> None:
        """without_room: what is known to be so of the same program in another order, which has as many bytes."""
        self.tasks, self.best_s = tasks, math.inf
        self.byte_price, self.share_s, self.moment_bytes = 0.0, 1.0, 0.0
        self.faster: RankedPlans = []
        self.near: RankedPlans = []
        self.without_room = set(without_room)
        self._begun: Iterator[PricedPlan | None] | None = None
        self._per_axis: dict[Mesh, PerAxis] = {}
        self._may_fit: dict[int, bool] = {}
        self._first_count: dict[frozenset[str], int] = {}
        self._begun_on: dict[Question, JointSearch] = {}

    def plans(self, best_s: float) -> Iterator[RankedPlans]:
        """Plans that are predicted faster than best_s, best first, whenever there is another one."""
        self.best_s = min(self.best_s, best_s)
        if self._ranked() and self.best_s < best_s:
            yield self._ranked()
        for offload in _offload_kinds(self.tasks.task):
            for found in self._looks(offload):
                if found is not None:
                    yield self._ranked()
        if self.faster and self.near:
            yield self._ranked()

    def _looks(self, offload: frozenset[str]) -> Iterator[PricedPlan | None]:
        """Faster plans in growing microbatch counts, None for a count of a mesh that has none: on the first meshes by turns,
        until one has room for a count; on that one; on the others and on finer meshes, the likeliest first.

        A mesh that has no room in few microbatches may have plans in ever more that take far longer than those of others.
        """
        looks = {mesh: self._look_on(mesh, joint, offload) for mesh, joint in self._meshes}
        if self._begun is not None:
            looks[self._meshes[0][0]], self._begun = self._begun, None
            if offload in self._first_count:
                yield from looks.pop(self._meshes[0][0])
        waiting = deque(looks)
        while waiting and offload not in self._first_count:
            mesh = waiting.popleft()
            for found in looks[mesh]:
                yield found
                if offload not in self._first_count:
                    waiting.append(mesh)
                    break
        left = [(mesh, joint) for mesh, joint in self._meshes if mesh in waiting]
        for mesh, joint in self._likeliest_first([*left, *self._finer], offload):
            yield from looks.get(mesh) or self._look_on(mesh, joint, offload)

    def first_s(self, rival_s: float, best_s: float) -> float:
        """Seconds of the best plan of the whole batch on the mesh whose bound is best, where that bound is better than what a
        rival is expected to take; infinite where there is none that beats best_s. What it finds bounds the rival."""
        task = self.tasks.at(self.counts[0])
        if self.counts[0] > 1 or self._begun is not None or not self._could_fit(task) or not self._meshes:
            return math.inf
        mesh, joint = self._meshes[0]
        if joint.fastest.seconds >= rival_s:
            return math.inf
        self.best_s = min(self.best_s, best_s)
        self._begun = self._look_on(mesh, joint, _offload_kinds(task)[0])
        found = next(self._begun, None)
        return math.inf if found is None else found.step_s

    def _ranked(self) -> RankedPlans:
        near = (plan for plan in self.near if plan[1].step_s < NEAR * self.best_s)
        return sorted([*self.faster, *near], key=lambda plan: plan[1].step_s)

    @cached_property
    def counts(self) -> list[int]:
        """The microbatch counts to try, for which the program is cut once memory is known to be short."""
        counts = microbatch_counts(self.tasks.task, self.tasks.batch)
        return [1, *(M for M in counts if M > 1)] if self.tasks.task.options.microbatches is None else counts

    @cached_property
    def _meshes(self) -> list[tuple[Mesh, JointSearch]]:
        """Meshes whose fastest plan any memory would allow is known, the fastest first."""
        task = self.tasks.task
        return self._fastest_first(
            map(task.sharing, candidate_meshes(task.cluster, task.options, rows=rows_of(task.program)))
        )

    @cached_property
    def _finer(self) -> list[tuple[Mesh, JointSearch]]:
        """The same of the finer meshes that are worth it, of plans that take along axes what the best plans on the others
        take."""
        task, searches = self.tasks.task, dict[Mesh, JointSearch]()
        meshes = meshes_worth_trying(task, self.best_s) if self._meshes else []
        if not meshes:
            return []
        fastest = (joint.fastest.plan for _, joint in self._meshes)
        good = (plan.plan.stages[0] for _, plan in self.faster if plan.step_s < _GOOD * self.best_s)
        taken = taken_by(chain(fastest, good))
        self._per_axis = dict.fromkeys(meshes, taken)

        def seconds(mesh: Mesh) -> float:
            searches[mesh] = joint_on(task, mesh, per_axis=taken)
            with suppress(InfeasibleError, ConstraintError):
                return searches[mesh].fastest.seconds
            return math.inf

        found = walked(meshes, {mesh: joint.fastest.seconds for mesh, joint in self._meshes}, seconds)
        return [
            (mesh, searches[mesh]) for mesh in sorted(found, key=lambda mesh: found[mesh]) if found[mesh] < math.inf
        ]

    def _fastest_first(self, meshes: Iterable[Mesh]) -> list[tuple[Mesh, JointSearch]]:
        found: list[tuple[float, Mesh, JointSearch]] = []
        for mesh in meshes:
            joint = joint_on(self.tasks.task, mesh)
            with suppress(InfeasibleError, ConstraintError):
                found.append((joint.fastest.seconds, mesh, joint))
        return [(mesh, joint) for _, mesh, joint in sorted(found, key=lambda found: found[0])]

    def _could_fit(self, task: Task) -> bool:
        """Whether bounds leave room for a plan in as many microbatches. What the second one holds is beside sums of gradients."""
        M, room = task.setting.microbatches, task.limit * task.cluster.size
        if M not in self._may_fit:
            resting, held = least_bytes(task)
            fits = could_fit(task, (resting, held), [room], [1.0])
            self._may_fit[M] = fits and (M == 1 or resting + held <= room)
        return self._may_fit[M]

    def _likeliest_first(
        self, meshes: list[tuple[Mesh, JointSearch]], offload: frozenset[str]
    ) -> list[tuple[Mesh, JointSearch]]:
        """Meshes by what a step takes within memory, about, in the first count that had room on one before: a good plan rules
        out most questions of those after it. They stay in order where none had."""
        if offload not in self._first_count or not self.byte_price:
            return meshes
        task, seconds = self.tasks.at(self.counts[self._first_count[offload]]).offloading(offload), dict[Mesh, float]()
        for mesh, whole in meshes:
            if not self._may_win(whole.fastest.seconds):
                continue
            joint = whole if task is self.tasks.task else joint_on(task, mesh, per_axis=self._per_axis.get(mesh))
            with suppress(InfeasibleError, ConstraintError):
                seconds[mesh] = self._at_price_s(task, joint)
                self._begun_on[mesh, task.setting.microbatches, offload] = joint
        return sorted(meshes, key=lambda pair: seconds.get(pair[0], math.inf))

    def _counts_on(self, mesh: Mesh, offload: frozenset[str]) -> Iterator[tuple[int, bool]]:
        """The microbatch counts to look at on a mesh, and whether those after it grow. First come those below the first that had
        room on the mesh before, largest first: where one has none, those below it have none either (`_plan`)."""
        first = self._first_count.get(offload, 0)
        yield from ((M, False) for M in reversed(self.counts[:first]))
        yield from ((M, True) for M in self.counts[first:])

    def _look_on(self, mesh: Mesh, whole: JointSearch, offload: frozenset[str]) -> Iterator[PricedPlan | None]:
        """Faster plans on one mesh in growing microbatch counts; None for a count that has none. whole: the search of the
        request as it stands, of which no plan on this mesh takes less than the fastest.

        At a price of a byte the seconds over the counts have one valley: more microbatches hold less, and gather parameters more
        often. So after a count that has room and does not win one that takes more is not looked at, nor are those after it.
        """
        bound_s, had_room, is_enough = whole.fastest.seconds, False, False
        before, lost = (0.0, math.inf), False
        for M, grows in self._counts_on(mesh, offload):
            if not self._may_win(bound_s if grows else whole.fastest.seconds) or (grows and is_enough):
                return
            task = self.tasks.at(M)
            if (mesh, M, offload) in self.without_room or not (offload or self._could_fit(task)):
                continue
            task = task.offloading(offload)
            joint = whole if task is self.tasks.task else self._begun_on.pop((mesh, M, offload), None)
            joint = joint or joint_on(task, mesh, per_axis=self._per_axis.get(mesh))
            try:
                count_s = joint.fastest.seconds
            except (InfeasibleError, ConstraintError):  # too small a batch for the mesh and so many microbatches
                count_s = math.inf
            bound_s = max(bound_s, count_s)
            if not self._may_win(_least_s(task, count_s)):
                if grows:
                    return
                continue
            if grows:
                at_price_s = self._at_price_s(task, joint)
                if lost and before[0] == self.byte_price and at_price_s > before[1]:
                    return
                before, lost = (self.byte_price, at_price_s or math.inf), True
                if not self._may_win(self._within_s(task, joint, at_price_s)):
                    continue
            answer = self._plan(task, joint, (mesh, M, offload))
            candidate = answer if isinstance(answer, PricedPlan) else None
            faster = None if candidate is None else self._kept(task, joint, candidate)
            lost = faster is None and not isinstance(answer, Shortage)
            if candidate is not None:
                if not (had_room and grows):
                    self._first_count[offload], had_room = self.counts.index(M), True
                is_enough = not any(t.recompute for t in candidate.plan.stages[0].templates.values())
                if faster is None:
                    self.near.append((task, candidate))
                    if not self.byte_price:
                        self.byte_price, self.share_s = joint.price_paid, share_s(candidate)
            yield faster
            if is_enough and grows:
                return

    def _at_price_s(self, task: Task, joint: JointSearch) -> float:
        """Seconds that a plan which fits takes at least, about: at the price of a byte at the best plan so far; before there is
        one at what the mesh's own bytes cost, where plans of another kind are to be beaten and the fastest point is too large
        (else 0)."""
        if self.byte_price:
            return self.share_s * _least_s(task, joint.bound_s(self.byte_price, task.limit - self.moment_bytes))
        room = task.limit * HOPELESS
        if self.best_s == math.inf or joint.fastest.nbytes <= room or joint.smallest().nbytes > room:
            return 0.0
        return _least_s(task, joint.bound_s(joint.hull_price(), room))

    def _within_s(self, task: Task, joint: JointSearch, at_price_s: float) -> float:
        """The same by the mesh's hull near the budget, where what it takes at the price may win."""
        if not (self.byte_price and self._may_win(at_price_s)):
            return at_price_s
        slow_s = NEAR * self.best_s
        bound_s = joint.hull_bound_s(task.limit - self.moment_bytes, slow_s / self.share_s)
        on_hull_s = self.share_s * _least_s(task, bound_s)
        return on_hull_s if on_hull_s >= slow_s else at_price_s

    def _may_win(self, bound_s: float) -> bool:
        return bound_s < self.best_s * WORTH

    def _plan(self, task: Task, joint: JointSearch, question: Question) -> PricedPlan | Shortage | None:
        """The fastest plan that fits; None where what fits is of no interest. A shortage where none fits, or memory tiers are too
        small, or none that could win once its ops are held to fewer bytes.

        The fewer microbatches, the more each holds; but where there is one, no sums of gradients are beside that. So where the
        smallest plan does not fit, and would not with a share less for a moment, none of fewer microbatches does, from two on.
        """
        mesh, M, offload = question
        try:
            result = fastest_within_limit(task, joint, self.best_s)
            room = least_bytes_before = math.inf
            while isinstance(result, Shortage):
                tighter = tighter_room(joint, task.limit_at(mesh), result.least_bytes, room)
                if tighter >= room or result.least_bytes >= least_bytes_before:
                    break
                least_bytes_before = result.least_bytes
                room, joint = tighter, joint_on(task, mesh, per_axis=self._per_axis.get(mesh), room_bytes=tighter)
                if not self._may_win(_least_s(task, joint.fastest.seconds)):
                    return result
                result = fastest_within_limit(task, joint, self.best_s)
        except InfeasibleError:
            return Shortage(math.inf, ())
        if isinstance(result, Shortage):
            counted = joint.smallest_so_far.nbytes
            is_clear = counted + (1 - UNLIKE) * (result.least_bytes - counted) > task.limit_at(mesh)
            below = (fewer for fewer in self.counts if 1 < fewer < M and is_clear)
            self.without_room |= {question, *((mesh, fewer, offload) for fewer in below)}
        return result

    def _kept(self, task: Task, joint: JointSearch, candidate: PricedPlan) -> PricedPlan | None:
        """The plan with as little recomputed as fits, where it is faster than all before."""
        if candidate.step_s * WORTH >= self.best_s:
            return None
        best = relieved(task, joint, candidate)
        if best.step_s >= self.best_s:
            return None
        self.best_s, self.byte_price, self.share_s = best.step_s, joint.price_paid, share_s(candidate)
        self.moment_bytes = _MOMENT * max(account_of(candidate).peak_bytes - candidate.solution.memory, 0.0)
        self.faster.append((task, best))
        return best


def _least_s(task: Task, counted_s: float) -> float:
    """Seconds that a step takes at least for which the solver counts so many. With microbatches it counts messages in full that
    computation may hide, so these are a bound as they stand at best."""
    return task.pricers.least_step_s(counted_s) if task.setting.microbatches == 1 else counted_s


def _offload_kinds(task: Task) -> list[frozenset[str]]:
    """The kinds of state that may rest in memory tiers: those of the options; or, where they leave it open and there
    are tiers, none, then more."""
    if task.options.offload != "auto" or not task.cluster.pace(0, task.cluster.size).tiers:
        return [task.setting.offload]
    return [kind.moves for kind in OFFLOAD_KINDS.values() if kind.tried]
