"""The advice on a program, planned.

No change is guessed: the request with that one thing changed is planned by the search, and priced by the price, of every request,
and it is said only where it is better by more than `WORTH`. Only levers are planned that could move a limit of more than that.
Where a run lies apart from its prediction that is said first, and the rest is planned for the machines as the run found them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from autopar.cluster import ClusterSpec
from autopar.compiled import Compiled
from autopar.errors import AutoparError, InputError
from autopar.ir.text import time_text
from autopar.passes.account.limits import limit_of
from autopar.plan import Plan
from autopar.report.advice.advice import Advice, GroupAdvice, Suggestion
from autopar.report.advice.levers import Lever, levers
from autopar.report.advice.limits import measured_limits
from autopar.report.advice.mismatch import as_measured, mismatches
from autopar.report.advice.replanned import Replanner
from autopar.report.advice.scaling import Bases, Scaling, measured_scaling, samples
from autopar.report.facts import facts
from autopar.report.predicted_vs_measured import Profile
from autopar.report.program_facts import GroupLimits, ProgramFacts
from autopar.request import Request

P = TypeVar("P", bound=Compiled)
WORTH = 0.02
"""Share of a step by which a change is better at least."""


def limits_of(known: ProgramFacts, profile: Profile | None) -> tuple[GroupAdvice, ...]:
    """The limits of the groups of a program, in a recorded run or as it is predicted; those alike are one. Raises InputError
    where the profile is of another number of ranks."""
    if profile is not None and len(profile.ranks) != known.ranks:
        raise InputError(f"this profile is of {len(profile.ranks)} ranks, the program has {known.ranks}")
    found: tuple[GroupLimits, ...] = known.limits if profile is None else measured_limits(known, profile)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for g, own in enumerate(found):
        alike.setdefault((tuple(own.seconds.items()), tuple(map(limit_of, own.stages))), []).append(g)
    return tuple(
        GroupAdvice(
            tuple(groups),
            tuple(stage for g in groups for stage in known.schedule.graph.groups[g]),
            dict(seconds),
            stage_limits,
        )
        for (seconds, stage_limits), groups in alike.items()
    )


def measured_step_s(profile: Profile | None) -> float | None:
    """Seconds from step to step of a recorded run, with the wait for batches where it was noted."""
    return None if profile is None else profile.step_s + (profile.input_s or 0.0)


def saved_advice(known: ProgramFacts, cluster: ClusterSpec, profile: Profile | None) -> Advice:
    """The advice that a program's facts and its profile give by themselves: limits, causes of a difference, and the wait for the
    loader. Nothing is planned. cluster: in the order of the program's ranks. Raises InputError."""
    groups = limits_of(known, profile)
    apart = () if profile is None else mismatches(known, cluster, profile)
    suggestions = tuple(_loader(known, profile)) if profile is not None else ()
    return Advice(
        known.predicted.step_time_s, measured_step_s(profile), groups, mismatches=apart, suggestions=suggestions
    )


def _loader(known: ProgramFacts, profile: Profile) -> Iterator[Suggestion]:
    """The saving of a loader that keeps up, where the run waited for it. Where kernels queue behind the host a batch is read
    while the step before it runs, so that the loader takes that long and what is waited for beside."""
    wait_s, step_s = profile.input_s, profile.step_s
    if wait_s is None or wait_s <= WORTH * (wait_s + step_s):
        return
    reads_s = wait_s + (step_s if known.machines.gpu else 0.0)
    times = max(math.ceil(reads_s / step_s), 2)
    batch = known.work.batch or 1
    text = f"a loader {times} × as fast (workers that read batches ahead; a batch was waited for {time_text(wait_s)})"
    yield Suggestion(text, "input", {}, batch, batch, wait_s + step_s, step_s)


def advice_on(
    program: P,
    compile_again: Callable[[Request], P],
    profile: Profile | None,
    baseline: tuple[P, Profile] | None,
    seconds: float,
) -> Advice:
    """The advice on a program. profile: of a run of it; baseline: a program for fewer devices, one node or one device, with its
    profile; seconds: after which no further lever is planned. Raises InputError."""
    end_s = time.monotonic() + seconds
    known = facts(program)
    own = saved_advice(known, program.cluster, profile)
    apart, replanner = own.mismatches, Replanner(program, compile_again)
    if apart:
        cluster = as_measured(program.request.cluster, program.plan, apart)
        replanner = replace(replanner, program=replanner.on_cluster(cluster))
    bases = Bases(replanner)
    told = bases.scaling(replanner.program)
    found, left_out = planned(replanner, _worth_planning(program, own.groups, bool(apart)), bases, end_s)
    if baseline is not None:
        told = _measured_scaling(program, profile, *baseline)
    return replace(
        own,
        scaling=told if isinstance(told, Scaling) else None,
        unscaled=told if isinstance(told, str) else "",
        suggestions=(*own.suggestions, *found),
        left_out=left_out,
    )


def _measured_scaling(program: P, profile: Profile | None, base: P, base_profile: Profile) -> Scaling:
    """Raises InputError where only one of the steps was measured."""
    own_s, base_s = measured_step_s(profile), measured_step_s(base_profile)
    if own_s is None or base_s is None:
        raise InputError("advice: baseline= is a measured step, which nothing stands beside; give profile= too")
    return measured_scaling(program, own_s, base, base_s)


def _worth_planning(program: Compiled, groups: Sequence[GroupAdvice], apart: bool) -> list[tuple[Lever, str]]:
    """The levers that could move a limit of more than `WORTH` of some group's step, each with the largest of its limits. apart:
    whether machines are not as they were described, so that the search may choose otherwise."""
    share = {
        limit: max(one.seconds.get(limit, 0.0) / one.step_s for one in groups if one.step_s > 0)
        for limit in dict.fromkeys(limit for one in groups for limit in one.seconds)
    }
    again = Lever("planned again for the machines as they were measured", tuple(share))
    candidates = [*([again] if apart else ()), *levers(program)]
    largest = [(lever, max(lever.limits, key=lambda limit: share.get(limit, 0.0))) for lever in candidates]
    return [(lever, limit) for lever, limit in largest if share.get(limit, 0.0) > WORTH]


def planned(
    replanner: Replanner[P], candidates: Sequence[tuple[Lever, str]], bases: Bases[P], end_s: float
) -> tuple[tuple[Suggestion, ...], tuple[str, ...]]:
    """The levers that are better, best first, those before all that change nothing of what is computed; and those for which
    time was too short. Of levers that come to one plan the first is said, and a larger batch only where it is better than a
    smaller one."""
    base, plans, left_out = replanner.program, list[Plan](), []
    found: list[Suggestion] = []
    for lever, limit in candidates:
        if time.monotonic() > end_s:
            left_out.append(lever.text if lever.times == 1 else f"{lever.text} of {lever.times} × the batch")
            continue
        try:
            other = replanner.replanned(replace(base.options, **lever.options), times=lever.times)
        except AutoparError:  # there is no plan with it
            continue
        before_s, after_s = (program.decision.predicted.step_time_s for program in (base, other))
        changed = (lever.options, samples(base), samples(other), before_s, after_s, lever.alters)
        one = Suggestion(lever.text, limit, *changed)
        rivals = [known.gain for known in found if lever.times > 1 and known.batch_after > known.batch_before]
        if one.gain > (1 + WORTH) * max(rivals, default=1.0) and other.plan not in plans:
            found.append(replace(one, **_efficiency(bases, base, other, lever.times)))
            plans.append(other.plan)
    return tuple(sorted(found, key=lambda one: (bool(one.alters), -one.gain))), tuple(left_out)


def _efficiency(bases: Bases[P], base: Compiled, other: Compiled, times: int) -> dict[str, Any]:
    """The scaling efficiencies of two programs, where both are known. times: as large the batch of the other is, whose efficiency
    has another base where that is not 1."""
    if times != 1:
        return {}
    before, after = bases.scaling(base), bases.scaling(other)
    if isinstance(before, str) or isinstance(after, str):
        return {}
    return {"efficiency_before": before.efficiency, "efficiency_after": after.efficiency}
