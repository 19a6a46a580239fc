"""What to change where nothing fits: the nearest changes of a request under which a plan is found.

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
from autopar.errors import AutoparError
from autopar.ir.memory_levers import CHANGES, MOST_TIMES_THE_RANKS, OFFLOAD_KINDS, forced_offload
from autopar.ir.mesh import Mesh
from autopar.ir.setting import Setting
from autopar.options import Options
from autopar.passes.batch.microbatch import in_microbatches
from autopar.passes.batch.rebatch import NoRebatch, rebatch
from autopar.passes.price.pricer import Pricer, Pricers
from autopar.passes.search.pipelines import asks_for_pipeline, search_pipelines
from autopar.passes.search.smallest import pricing, smallest_plans
from autopar.passes.search.spmd import Task
from autopar.passes.search.submesh import least_bytes
from autopar.passes.search.within_memory import fitting
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.report import size_text, time_text

EACH_S = 10.0
"""Seconds for one change, where the total allows it."""
SOLVER_S = 3.0


@dataclass(frozen=True)
class Change:
    """A request that can be met: `autopar.compile` with these options on this cluster, and a batch of that size.

    kind: "recompute", "microbatches", "offload", "batch" or "ranks". text: what is changed, in words.
    """

    kind: str
    text: str
    options: Options
    cluster: ClusterSpec
    batch: int
    step_time_s: float
    peak_bytes: float

    def __str__(self) -> str:
        return f"{self.text}: {time_text(self.step_time_s)} a step, {size_text(self.peak_bytes)} per rank"


@dataclass(frozen=True)
class _Try:
    """A change that is not planned yet."""

    kind: str
    text: str
    task: Task
    batch: int


class OutOfTime(Exception):
    """The time for a search is over."""


class TimedPricers(Pricers):
    """Prices that are given until a deadline (of time.monotonic). known: of the same cluster, to be shared."""

    def __init__(self, cluster: ClusterSpec, deadline: float, known: Pricers | None = None) -> None:
        super().__init__(cluster)
        self.deadline = deadline
        if known is not None and known.cluster == cluster:
            self.lowered, self._made = known.lowered, known._made

    def __getitem__(self, mesh: Mesh) -> Pricer:
        if time.monotonic() > self.deadline:
            raise OutOfTime
        return super().__getitem__(mesh)


def nearest(
    task: Task, batch: int, setting_for: Callable[[int], Setting], total_s: float
) -> tuple[tuple[Change, ...], tuple[str, ...]]:
    """Changes under which a plan was found, nearest first; and those whose search was cut off.

    batch: of the whole step. setting_for: the setting on so many ranks (what an optimizer updates as whole tensors may
    depend on them). total_s: seconds for all.
    """
    end = time.monotonic() + total_s
    found: list[Change] = []
    cut: list[str] = []
    for name in CHANGES:
        for attempt in _ATTEMPTS[name](task, batch, setting_for):
            if not _divides(attempt.task, attempt.batch):
                continue
            left = end - time.monotonic()
            if left <= 0:
                cut.append(attempt.text)
                break
            try:
                planned = best_of(attempt.task, attempt.batch, min(max(EACH_S, total_s / 6), left))
            except OutOfTime:
                cut.append(attempt.text)
                if attempt.kind in ("batch", "ranks"):
                    continue
                break
            if planned is not None:
                changed = attempt.task
                found.append(
                    Change(attempt.kind, attempt.text, changed.options, changed.cluster, attempt.batch, *planned)
                )
                break
    return tuple(found), tuple(cut)


def best_of(task: Task, batch: int, limit_s: float) -> tuple[float, float] | None:
    """(seconds a step, peak bytes) of the fastest plan that is found in time; None where nothing fits.

    Whether anything fits without a pipeline is known from the smallest plans; where one does, the fastest on the same meshes
    is looked for, then pipelines that are faster still. Raises OutOfTime where time ends before anything is found or ruled
    out.
    """
    end = time.monotonic() + limit_s
    options = replace(task.options, solver_time_limit_s=min(task.options.solver_time_limit_s, SOLVER_S, limit_s / 2))
    pricers = TimedPricers(task.cluster, end, task.pricers)
    task = _with(task, options, pricers)
    free = options.pp is None and options.strategy == "auto" and options.mesh is None
    best: list[tuple[float, float]] = []
    try:
        if not asks_for_pipeline(options):
            small = []
            for s in smallest_plans(task, batch):
                if s.peak_bytes <= task.limit:
                    small.append(s)
                    best.append((s.step_time_s, s.peak_bytes))
                if small and time.monotonic() > end - 2 * limit_s / 3:
                    break
            for s in sorted(small, key=lambda s: s.joint.free.seconds):
                s.joint.time_limit_s = max(min(SOLVER_S, end - time.monotonic()), 0.0)
                made = fitting(s.task, s.mesh, s.joint)
                best += [_figures(s.task, made)] if isinstance(made, PricedPlan) else []
        if asks_for_pipeline(options) or (free and task.cluster.size > 1):
            bar = min(best)[0] if best else math.inf
            best += [_figures(*row) for row in search_pipelines(task, batch, pricing(task), bar)[:1]]
    except OutOfTime:
        if not best:
            raise
    except AutoparError:  # the change is against the options, the batch or the tiers
        pass
    return min(best, default=None)


def _figures(task: Task, candidate: PricedPlan) -> tuple[float, float]:
    counted = task.finish(candidate).account
    assert counted is not None
    return counted.step_time_s, counted.peak_bytes


def _with(task: Task, options: Options, pricers: Pricers | None = None) -> Task:
    """The same task under other options."""
    made = Task(task.program, task.cluster, task.rules, task.setting, options)
    made.pricers = pricers or task.pricers
    return made


# --- changes ----------------------------------------------------------------------------------------------------------


def _recompute(task: Task, batch: int, setting_for: Callable[[int], Setting]) -> Iterator[_Try]:
    if task.program.training and task.options.recompute != "auto":
        options = replace(task.options, recompute="auto")
        text = CHANGES["recompute"].in_words.format(new="auto", old=task.options.recompute)
        yield _Try("recompute", text, _with(task, options), batch)


def _microbatches(task: Task, batch: int, setting_for: Callable[[int], Setting]) -> Iterator[_Try]:
    fixed = task.options.microbatches
    if fixed is None or not task.program.training:
        return
    times = 2
    while batch % (fixed * times) == 0:
        try:
            program = rebatch(task.program, times, task.rules)
        except NoRebatch:
            return
        if fixed == 1:
            program = in_microbatches(program, task.rules, task.program)
        options = replace(task.options, microbatches=fixed * times)
        setting = replace(task.setting, microbatches=fixed * times)
        text = CHANGES["microbatches"].in_words.format(new=fixed * times, old=fixed)
        yield _Try("microbatches", text, Task(program, task.cluster, task.rules, setting, options), batch)
        times *= 2


def _offload(task: Task, batch: int, setting_for: Callable[[int], Setting]) -> Iterator[_Try]:
    if not task.program.training:
        return
    cluster, whence = task.cluster, "the cluster's memory tiers"
    if all(device.tiers for _, device in cluster.devices):
        if task.options.offload == "auto":
            return
    else:
        cluster = cluster.with_tiers()
        tiers = ", ".join(f"{t.name} {size_text(t.capacity_bytes)} per rank" for t in cluster.device(0).tiers)
        whence = f"usual memory tiers, as the cluster describes none ({tiers})"
    for kind in OFFLOAD_KINDS.values():
        if not (kind.proposed and kind.moves > forced_offload(task.options.offload)):
            continue
        options = replace(task.options, offload=kind.name)
        setting = replace(task.setting, offload=kind.moves)
        made = Task(task.program, cluster, task.rules, setting, options)
        if not _hopeless(made, batch):
            text = CHANGES["offload"].in_words.format(new=kind.name, tiers=whence)
            yield _Try("offload", text, made, batch)


def _smaller_batch(task: Task, batch: int, setting_for: Callable[[int], Setting]) -> Iterator[_Try]:
    pieces, times = task.options.microbatches or 1, 2
    while batch % (pieces * times) == 0:
        try:
            program = rebatch(task.program, times, task.rules)
        except NoRebatch:
            return
        made = Task(program, task.cluster, task.rules, task.setting, task.options)
        if not _hopeless(made, batch // times):
            text = CHANGES["batch"].in_words.format(new=batch // times, old=batch)
            yield _Try("batch", text, made, batch // times)
        times *= 2


def _more_ranks(task: Task, batch: int, setting_for: Callable[[int], Setting]) -> Iterator[_Try]:
    times, ranks = 2, task.cluster.size
    while times <= MOST_TIMES_THE_RANKS:
        cluster, options = scaled(task.cluster, times), task.options
        if options.mesh is not None:
            axis = "dp" if "dp" in options.mesh else next(iter(options.mesh))
            options = replace(options, mesh={**options.mesh, axis: options.mesh[axis] * times})
        made = Task(task.program, cluster, task.rules, setting_for(ranks * times), options)
        if not _hopeless(made, batch):
            how = f" with mesh {dict(options.mesh)}" if options.mesh is not None else ""
            text = CHANGES["ranks"].in_words.format(new=ranks * times, old=ranks)
            yield _Try("ranks", text + how, made, batch)
        times *= 2


_ATTEMPTS = {
    "recompute": _recompute,
    "microbatches": _microbatches,
    "offload": _offload,
    "batch": _smaller_batch,
    "ranks": _more_ranks,
}


def _divides(task: Task, batch: int) -> bool:
    """Whether the batch divides by a data-parallel axis that the options force, as `autopar.compile` wants it."""
    options = task.options
    dp = int((options.mesh or {}).get("dp", 1))
    if options.strategy in ("dp", "zero1", "zero3") and options.mesh is None:
        dp = task.cluster.size // (options.pp or len(options.stage_boundaries or ()) + 1)
    return batch // (options.microbatches or 1) % dp == 0


def _hopeless(task: Task, batch: int) -> bool:
    """Whether no plan can fit: not even all that rests, and what one sample holds for backward, shared by all ranks."""
    resting, held = least_bytes(task)
    most = 1 if task.options.microbatches is not None else max(batch, 1)
    return (resting + held / most) / task.cluster.size > task.limit
