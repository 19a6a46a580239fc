"""Changes of a request for which nothing fits: the nearest ones under which a plan is found.

A change is never guessed: the request with that one thing changed is planned, by the searches that plan every request,
and what comes out is told with its predicted step time and peak. Everything else that the user asked for stays in force.
Kinds of change, nearest first: recompute where the options forbid it, more microbatches where they are fixed, memory
tiers (the cluster's, or those that such machines usually have), a batch of a half, a quarter, …, and 2, 4, 8, … times as
many ranks. Of the last two the least power of two that does is looked for; what a lower bound of the bytes already rules
out is not planned. Planning stops where the time for it ends: prices are asked for at every step of a search, and a price
list with a deadline ends it there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autopar.cluster import ClusterSpec, scaled
from autopar.errors import AutoparError, Change
from autopar.ir.memory_levers import OFFLOAD_KINDS, forced_offload
from autopar.ir.setting import Setting
from autopar.ir.text import size_text, time_text
from autopar.options import Options
from autopar.passes.account.program import Account
from autopar.passes.price.pricer import OutOfTime
from autopar.passes.search.lower_bounds import could_fit, least_bytes
from autopar.passes.search.microbatches import TasksByCount
from autopar.passes.search.one_mesh.within_memory import fastest_within_limit
from autopar.passes.search.refused.smallest import SOLVER_S, smallest_plans
from autopar.passes.search.stages.limits import check_pipeline_options
from autopar.passes.search.stages.pipelines import PipelineSearch
from autopar.passes.search.stages.submesh import SubmeshPlans
from autopar.passes.search.task import Task, account_of
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.runtime.data.schema import MOST_RANKS

SettingFor = Callable[[int], Setting]
"""The setting on so many ranks: what an optimizer updates as whole tensors may depend on them."""

EACH_S = 10.0
"""Seconds for one change, where the total allows it."""
_MOST_TIMES = 1024
"""Times as many ranks as there are, at most."""


PlannedChange = Change[Options, ClusterSpec]


@dataclass(frozen=True)
class _Attempt:
    """A changed request that is not planned yet. kind, text, batch: as in `Change`."""

    kind: str
    text: str
    task: Task
    batch: int

    def met_by(self, plan: Account) -> PlannedChange:
        """The change, with what its plan costs."""
        step_s, peak_bytes, task = plan.step_time_s, plan.peak_bytes, self.task
        words = f"{self.text}: {time_text(step_s)} a step, {size_text(peak_bytes)} per rank"
        return Change(self.kind, self.text, task.options, task.cluster, self.batch, step_s, peak_bytes, words)


def nearest_changes(
    task: Task, batch: int, setting_for: SettingFor, total_s: float
) -> tuple[tuple[PlannedChange, ...], tuple[str, ...]]:
    """The nearest change of every kind under which a plan was found; and, in words, those for which time was too short.

    batch: of the whole step. total_s: seconds for all.
    """
    end = time.monotonic() + total_s
    changes: list[PlannedChange] = []
    cut_off: list[str] = []
    for attempts in (
        _recompute(task, batch),
        _microbatches(task, batch),
        _offload(task, batch),
        _smaller_batch(task, batch),
        _more_ranks(task, batch, setting_for),
    ):
        for attempt in attempts:
            if not _divides(attempt.task, attempt.batch):
                continue
            left_s = end - time.monotonic()
            if left_s <= 0:
                cut_off.append(attempt.text)
                break
            try:
                counted = fastest_in_time(attempt.task, attempt.batch, min(max(EACH_S, total_s / 6), left_s))
            except OutOfTime:
                cut_off.append(attempt.text)
                if attempt.kind in ("batch", "ranks"):
                    continue
                break
            if counted is not None:
                changes.append(attempt.met_by(counted))
                break
    return tuple(changes), tuple(cut_off)


def fastest_in_time(task: Task, batch: int, limit_s: float) -> Account | None:
    """The account of the fastest plan that is found in so many seconds; None where nothing fits.

    These are parts of `search_plans` in another order: that search starts with the fastest plans and tells nothing until it
    ends, this one starts with the smallest, so that it soon knows whether anything fits, and whenever it is stopped it has
    an answer. Where a smallest plan fits, the fastest on the same mesh is looked for, then pipelines that are faster still.
    Raises OutOfTime where time ends before anything is found or ruled out.
    """
    end = time.monotonic() + limit_s
    options = replace(task.options, solver_time_limit_s=min(task.options.solver_time_limit_s, SOLVER_S, limit_s / 2))
    task = task.changed(options=options)
    task.pricers = task.pricers.until(lambda: time.monotonic() > end)
    fitting: list[Account] = []
    try:
        if not options.asks_for_pipeline:
            for counted in _on_one_mesh(task, batch, end, limit_s):
                fitting.append(counted)
        if options.asks_for_pipeline or _stages_are_open(task):
            fitting += _pipeline(task, batch, min((a.step_time_s for a in fitting), default=math.inf))
    except OutOfTime:
        if not fitting:
            raise
    except AutoparError:  # the change is against the options, the batch or the tiers
        pass
    return min(fitting, key=lambda a: (a.step_time_s, a.peak_bytes), default=None)


def _on_one_mesh(task: Task, batch: int, end: float, limit_s: float) -> Iterator[Account]:
    """Accounts of the smallest plans that fit, for a third of the time, and then of the fastest plans on the same meshes."""
    smallest = []
    for small in smallest_plans(task, batch):
        if task.short_bytes(small.candidate.plan, small.account) <= 0:
            smallest.append(small)
            yield small.account
        if smallest and time.monotonic() > end - 2 * limit_s / 3:
            break
    for small in sorted(smallest, key=lambda small: small.joint.fastest.seconds):
        small.joint.time_limit_s = max(min(SOLVER_S, end - time.monotonic()), 0.0)
        result = fastest_within_limit(small.task, small.joint)
        if isinstance(result, PricedPlan):
            yield account_of(result)


def _stages_are_open(task: Task) -> bool:
    """Whether the options leave it to the search whether there is a pipeline."""
    options = task.options
    return options.pp is None and options.strategy == "auto" and options.mesh is None and task.cluster.size > 1


def _pipeline(task: Task, batch: int, best_s: float) -> list[Account]:
    """The account of the fastest pipeline that is predicted faster than best_s, if there is one."""
    check_pipeline_options(task)
    submeshes = SubmeshPlans(TasksByCount(task, batch))
    *_, plans = [], *PipelineSearch(submeshes).plans(best_s)
    return [account_of(candidate) for _, candidate in plans[:1]]


# --- changes ----------------------------------------------------------------------------------------------------------


def _recompute(task: Task, batch: int) -> Iterator[_Attempt]:
    if task.program.training and task.options.recompute != "auto":
        options = replace(task.options, recompute="auto")
        text = f'recompute="auto" instead of "{task.options.recompute}"'
        yield _Attempt("recompute", text, task.changed(options=options), batch)


def _microbatches(task: Task, batch: int) -> Iterator[_Attempt]:
    fixed = task.options.microbatches
    if fixed is None or not task.program.training:
        return
    for times in _divisions(task, batch, fixed):
        changed = task.at(fixed * times).changed(options=replace(task.options, microbatches=fixed * times))
        yield _Attempt("microbatches", f"microbatches={fixed * times} instead of {fixed}", changed, batch)


def _offload(task: Task, batch: int) -> Iterator[_Attempt]:
    if not task.program.training:
        return
    cluster, whence = task.cluster, "the cluster's memory tiers"
    if all(device.tiers for _, device in cluster.devices):
        if task.options.offload == "auto":
            return
    else:
        cluster = cluster.with_tiers()
        tiers = ", ".join(
            f"{t.name} {size_text(t.capacity_bytes)} per rank" for t in cluster.pace(0, cluster.size).tiers
        )
        whence = f"usual memory tiers, as the cluster describes none ({tiers})"
    for kind in OFFLOAD_KINDS.values():
        if not (kind.proposed and kind.moves > forced_offload(task.options.offload)):
            continue
        options = replace(task.options, offload=kind.name)
        changed = task.changed(cluster=cluster, options=options).offloading(kind.moves)
        if not _hopeless(changed, batch):
            yield _Attempt("offload", f'offload="{kind.name}" to {whence}', changed, batch)


def _smaller_batch(task: Task, batch: int) -> Iterator[_Attempt]:
    fixed = task.options.microbatches or 1
    for times in _divisions(task, batch, fixed):
        batches = task.batches.of_smaller_batch(times)
        changed = task.changed(program=batches.at(fixed), batches=batches)
        if not _hopeless(changed, batch // times):
            yield _Attempt("batch", f"a batch of {batch // times} instead of {batch}", changed, batch // times)


def _divisions(task: Task, batch: int, microbatches: int) -> Iterator[int]:
    """2, 4, 8, …: as many times smaller as the batch, or what there is of it in a microbatch, can be."""
    times = 2
    while batch % (microbatches * times) == 0 and task.batches.may_be(microbatches * times):
        yield times
        times *= 2


def _more_ranks(task: Task, batch: int, setting_for: SettingFor) -> Iterator[_Attempt]:
    times, ranks = 2, task.cluster.size
    while times <= _MOST_TIMES and ranks * times <= MOST_RANKS:
        options = task.options
        if options.mesh is not None:
            axis = "dp" if "dp" in options.mesh else next(iter(options.mesh))
            options = replace(options, mesh={**options.mesh, axis: options.mesh[axis] * times})
        setting = setting_for(ranks * times)
        changed = task.changed(cluster=scaled(task.cluster, times), setting=setting, options=options)
        if not _hopeless(changed, batch):
            how = f" with mesh {dict(options.mesh)}" if options.mesh is not None else ""
            yield _Attempt("ranks", f"{ranks * times} ranks instead of {ranks}{how}", changed, batch)
        times *= 2


def _divides(task: Task, batch: int) -> bool:
    """Whether the batch divides by a data-parallel axis that the options force, as `autopar.compile` wants it."""
    options = task.options
    return batch // (options.microbatches or 1) % options.least_data_parallel(task.cluster.size) == 0


def _hopeless(task: Task, batch: int) -> bool:
    """Whether no plan can fit: not even all that rests, and what one sample holds for backward, shared by all ranks."""
    most = 1 if task.options.microbatches is not None else max(batch, 1)
    return not could_fit(task, least_bytes(task), [task.room_bytes], [1 / most])
