"""The plans of a request that no other plan beats in seconds of a step, bytes of a rank, devices and joules at once.

They are sought where `search_plans` looks anyway: on the cluster and on parts of it, and there once more within less memory,
as far as there are plans. Every plan that a search comes back with is lowered and accounted for, as it is and with overlap,
unless by its bounds, which leave overlap out as the search's own do, another one beats it.

    8 devices: 10 ms, 40 GB, 56 J        beats        8 devices: 11 ms, 40 GB, 62 J
    4 devices: 18 ms, 60 GB, 50 J        is beaten by neither
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from autopar.cluster import ClusterSpec
from autopar.errors import ConstraintError, InfeasibleError, NoRoomError
from autopar.passes.account.energy import least_energy_J, step_energy_J
from autopar.passes.search.best_plans import search_plans
from autopar.passes.search.by_microbatch import finished
from autopar.passes.search.one_mesh.by_strategy import CLOSE
from autopar.passes.search.overlap import overlapped
from autopar.passes.search.task import RankedPlans, Task, account_of
from autopar.passes.shard.priced_plan import PricedPlan

HALVINGS = 1
"""How often the memory of the fastest plan is halved, for plans that take less. Such a search takes several times as long."""


@dataclass(frozen=True)
class Costs:
    """The costs of a plan. peak_bytes: of the fullest rank; energy_J: of a step on all devices, None where nobody knows what they
    draw."""

    step_s: float
    peak_bytes: float
    devices: int
    energy_J: float | None

    def beats(self, other: Costs) -> bool:
        """Whether it costs no more of anything, and less of something. Joules count where both are known."""
        own, others = self._numbers, other._numbers
        pairs = [*zip(own, others, strict=True)]
        if self.energy_J is not None and other.energy_J is not None:
            pairs.append((self.energy_J, other.energy_J))
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    @property
    def _numbers(self) -> tuple[float, float, int]:
        return self.step_s, self.peak_bytes, self.devices


@dataclass(frozen=True)
class Option:
    """A plan with its costs, the task that it is a plan of, and the cluster that it was sought on. is_bound: it was not lowered,
    and costs at least that."""

    task: Task
    plan: PricedPlan
    costs: Costs
    cluster: ClusterSpec
    is_bound: bool = False


def whole_parts(cluster: ClusterSpec) -> list[int]:
    """Numbers of first ranks to search on: 1, 2, 4, … nodes and all of them; of one node 1, 2, 4, … devices and all of them."""
    node = cluster.levels[0].group_size if cluster.levels else cluster.size
    unit = node if node < cluster.size and not cluster.levels[0].starts else 1
    powers = (unit * 2**k for k in range(cluster.size.bit_length()))
    return [*(ranks for ranks in powers if ranks < cluster.size), cluster.size]


def not_beaten(options: Sequence[Option]) -> list[Option]:
    """Options that no other one beats, the fastest first; of those that cost the same the first."""
    kept: list[Option] = []
    for one in sorted(options, key=lambda option: (option.costs.step_s, option.costs.peak_bytes, option.costs.devices)):
        if not any(other.costs.beats(one.costs) for other in options) and all(o.costs != one.costs for o in kept):
            kept.append(one)
    return kept


def comparable(options: Sequence[Option]) -> list[Option]:
    """The options, without joules where those of any of them are not known."""
    if all(one.costs.energy_J is not None for one in options):
        return [*options]
    return [replace(one, costs=replace(one.costs, energy_J=None)) for one in options]


def options_of(task: Task, batch: int, cluster: ClusterSpec, halvings: int) -> Iterator[Option]:
    """The plans of a task that searches come back with, within its memory and, so many times, within the half of what the fastest
    plan takes, a quarter, and so on. Nothing where nothing fits. batch: size of the global batch; cluster: as it is listed."""
    seen: list[Option] = []
    for halving in range(halvings + 1):
        within = task
        if halving:
            fastest = min((one.costs for one in seen if not one.is_bound), key=lambda costs: costs.step_s)
            within = task.changed(options=replace(task.options, memory_bytes=fastest.peak_bytes / 2**halving))
        try:
            plans = search_plans(within, batch)
        except (NoRoomError, InfeasibleError):
            return
        options = [*_accounted(task, plans, seen, cluster)]
        yield from options
        seen += options
        if not plans or all(one.is_bound for one in seen):
            return


def _accounted(task: Task, plans: RankedPlans, seen: Iterable[Option], cluster: ClusterSpec) -> Iterator[Option]:
    """Plans with what they cost; those alone by bounds that others beat by these already. task: whose memory they may take."""
    exact = [one.costs for one in seen if not one.is_bound]
    for owner, plan in plans:
        bounds = _bounds(owner, plan)
        if plan.account is None and any(costs.beats(bounds) for costs in exact):
            yield Option(owner, plan, bounds, cluster, is_bound=True)
            continue
        with suppress(NoRoomError, ConstraintError):  # a memory tier is too small
            lowered = finished(owner, plan)
            ((_, other),) = overlapped([(owner, lowered)])
            for one in [lowered] if other.plan == lowered.plan else [lowered, owner.finish(other)]:
                if owner.changed(options=task.options).short_bytes(one.plan, account_of(one)) <= 0:
                    exact.append(_costs(owner, one))
                    yield Option(owner, one, exact[-1], cluster)


def _costs(task: Task, plan: PricedPlan) -> Costs:
    counted = account_of(plan)
    energy_J = step_energy_J(plan.plan, counted, task.cluster)
    return Costs(counted.step_time_s, counted.peak_bytes, plan.plan.ranks, energy_J)


def _bounds(task: Task, plan: PricedPlan) -> Costs:
    """The least that a plan costs without overlap, by what the solver said of it."""
    least_s = plan.step_s / CLOSE
    return Costs(least_s, plan.solution.memory, plan.plan.ranks, least_energy_J(plan.plan, least_s, task.cluster))
