"""The limit of every group of ranks, as it is predicted and as a recorded run had it.

A record tells what a rank computed, for what it waited, and when it was idle. It does not tell arithmetic from memory: what a
rank computed is split as the prediction splits it, but where the device was done as soon as the host had started its last
kernel: then it waited for the host, and all that it took beyond the prediction is the host's.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from autopar.compiled import Compiled
from autopar.passes.account.limits import limits, stage_limits
from autopar.passes.price.pricer import Pricers
from autopar.passes.price.roofline import calls_roofline
from autopar.report.predicted_vs_measured import Profile, action_of, group_of
from autopar.report.program_facts import GroupLimits, ProgramFacts
from autopar.runtime.comm.recorder import StepRecord

COMPUTED = ("compute", "memory", "tiers", "host")
"""Limits that a record does not tell apart."""
DRAINED = 0.05
"""A device that is done within this share of a step after its host had started all of it waited for the host."""


def predicted_limits(program: Compiled) -> tuple[GroupLimits, ...]:
    """Every group of ranks, by what limits it."""
    counted, pricers = program.account, Pricers(program.cluster)
    by_function = {}
    for stage, plan in zip(program.stages, program.plan.stages, strict=True):
        if id(stage.forward) not in by_function:
            pricer = pricers[stage.mesh]
            by_function[id(stage.forward)] = calls_roofline(stage, plan, program.ir.templates, pricer, program.rules)
    rooflines = [by_function[id(stage.forward)] for stage in program.stages]
    by_stage = [
        stage_limits(stage, roofline, counted.microbatches, counted.software)
        for stage, roofline in zip(counted.stages, rooflines, strict=True)
    ]
    return tuple(
        GroupLimits(seconds, tuple(by_stage[s] for s in group))
        for group, seconds in zip(counted.graph.groups, limits(counted, rooflines), strict=True)
    )


def measured_limits(facts: ProgramFacts, profile: Profile) -> tuple[GroupLimits, ...]:
    """The same in the typical step of a recorded run, on average over the ranks of a group, which wait for different things."""
    at = profile.typical
    wall_s = max(_input_s(steps) + steps[at].seconds for steps in profile.ranks)
    by_group: list[list[dict[str, float]]] = [[] for _ in facts.limits]
    for rank, steps in enumerate(profile.ranks):
        g = group_of(facts, rank)
        parts = _measured(steps[at], facts.limits[g])
        parts["bubble"] += wall_s - _input_s(steps) - steps[at].seconds
        if profile.input_s is not None:
            parts["input"] = _input_s(steps)
        by_group[g].append(parts)
    return tuple(
        GroupLimits({limit: statistics.fmean(part[limit] for part in parts) for limit in parts[0]}, expected.stages)
        for parts, expected in zip(by_group, facts.limits, strict=True)
    )


def _input_s(steps: tuple[StepRecord, ...]) -> float:
    """Seconds that a rank waits for a batch; 0 where nobody noted it, as it is then in no sum."""
    return Profile((steps,)).input_s or 0.0


def _measured(step: StepRecord, expected: GroupLimits) -> dict[str, float]:
    """The parts of one rank's step, in which it waits for no batch."""
    spans = [(span.start_s, span.end_s, action_of(span.name) is not None) for span in step.spans]
    action_s = _covered_s((start, end) for start, end, is_action in spans if is_action)
    all_s = _covered_s((start, end) for start, end, _ in spans)
    waits = {"action": 0.0, "once": 0.0, "beside": 0.0}
    seconds = {"message": 0.0, "bubble": 0.0}
    for m in step.messages:
        inside = [is_action for start, end, is_action in spans if start <= m.wait_s <= end]
        waits["beside" if not inside else "action" if any(inside) else "once"] += m.non_overlapped_s
        seconds["bubble" if m.kind in ("send", "recv") else "message"] += m.non_overlapped_s
    busy_s = max(action_s - waits["action"], 0.0)
    once_s = max(all_s - action_s - waits["once"], 0.0)
    seconds |= _told_apart(busy_s, step, expected)
    seconds["memory"] += once_s
    return seconds | {"overhead": max(step.seconds - busy_s - once_s - sum(waits.values()), 0.0)}


def _told_apart(busy_s: float, step: StepRecord, expected: GroupLimits) -> dict[str, float]:
    """The seconds that a rank's actions computed, as the prediction splits it."""
    own = {limit: sum(stage.get(limit, 0.0) for stage in expected.stages) for limit in COMPUTED}
    predicted_s = sum(own.values())
    if predicted_s <= 0:
        return dict.fromkeys(COMPUTED, 0.0) | {"compute": busy_s}
    parts = {limit: busy_s * seconds / predicted_s for limit, seconds in own.items()}
    device_s = predicted_s - own["host"]
    if step.host_s is not None and step.host_s >= (1 - DRAINED) * step.seconds and busy_s - device_s > parts["host"]:
        return {**own, "host": busy_s - device_s}
    return parts


def _covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that are in some span; spans may lie in each other."""
    covered_s, last_s = 0.0, 0.0
    for start, end in sorted(spans):
        covered_s += max(end - max(start, last_s), 0.0)
        last_s = max(last_s, end)
    return covered_s
