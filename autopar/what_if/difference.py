"""The difference between two programs of one model: seconds and bytes by cause, and what changed in the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.compiled import Compiled
from autopar.exchange.patterns import patterns_of
from autopar.passes.account.spent import spent
from autopar.plan import ParameterPlan, Plan
from autopar.report.answer import CAUSES, cause_texts, parts, size_difference

HIDDEN = "messages, hidden"
MOST_PATTERNS = 12
"""Patterns of parameters that are named."""
_LITTLE = 0.01
"""Share of the step up to which two programs are as fast as each other."""
_MESSAGES = (CAUSES["messages_s"], CAUSES["gradients_s"])


@dataclass(frozen=True)
class Difference:
    """The difference between two programs. step_time_s, peak_bytes: of both. seconds, nbytes: by cause, of the second more than
    of the first; the causes but `HIDDEN` add up to the step's difference, the kinds to the peak's. plan: decisions that differ,
    before, and after. sentence: all of it in short."""

    step_time_s: tuple[float, float]
    peak_bytes: tuple[float, float]
    seconds: dict[str, float]
    nbytes: dict[str, float]
    plan: tuple[tuple[str, str, str], ...]
    sentence: str


def difference(before: Compiled, after: Compiled) -> Difference:
    """The difference between two programs of one model."""
    steps = before.decision.predicted.step_time_s, after.decision.predicted.step_time_s
    peaks = before.predicted.peak_bytes, after.predicted.peak_bytes
    return Difference(
        steps,
        peaks,
        _more(_seconds(before), _seconds(after)),
        _more(before.peak_kinds, after.peak_kinds),
        tuple(_plan_changes(before.plan, after.plan)),
        _sentence(before, after, steps, peaks),
    )


def _seconds(program: Compiled) -> dict[str, float]:
    """Seconds of a step by cause, with those of messages that something hides."""
    times = spent(program.account)
    exposed_s = times.messages_s + times.gradients_s
    groups = program.account.graph.groups
    sent_s = max(sum(program.account.stages[s].comm_time_s for s in group) for group in groups)
    return {**dict(parts(times)), HIDDEN: max(sent_s - exposed_s, 0.0)}


def _more(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {cause: after.get(cause, 0.0) - before.get(cause, 0.0) for cause in dict.fromkeys((*before, *after))}


def _sentence(before: Compiled, after: Compiled, steps: tuple[float, float], peaks: tuple[float, float]) -> str:
    """`12 % slower, 8.1 GB less: +0.4 s messages of parameters (most of all all_gather over dp)`."""
    share = steps[1] / steps[0] - 1
    pace = (
        "as fast"
        if abs(share) < _LITTLE
        else f"{abs(share):.0%} {'slower' if share > 0 else 'faster'}".replace("%", " %")
    )
    held = peaks[1] - peaks[0]
    room = size_difference(held if abs(held) >= _LITTLE * peaks[0] else 0.0)
    causes = cause_texts(spent(before.account), spent(after.account)) if pace != "as fast" else []
    if (sent := _most_sent(before, after, share > 0)) and causes and causes[0].endswith(_MESSAGES):
        causes[0] += f" (most of all {sent})"
    return f"{pace}, {room}" + (f": {', '.join(causes)}" if causes else "")


def _most_sent(before: Compiled, after: Compiled, slower: bool) -> str:
    """The kind of messages of which there are more seconds, or fewer where the step is faster, than of any other."""
    totals: dict[str, float] = {}
    for program, sign in ((before, -1), (after, 1)):
        for one in program.account.collectives:
            kind = f"{one.kind} over {one.axis}"
            totals[kind] = totals.get(kind, 0.0) + (sign if slower else -sign) * one.time_s
    most, most_s = max(totals.items(), key=lambda item: item[1], default=("", 0.0))
    return most if most_s > 0 else ""


def _plan_changes(before: Plan, after: Plan) -> Iterator[tuple[str, str, str]]:
    """Decisions that differ between two plans: which, before, and after."""
    rows = [
        ("ranks", f"{before.ranks:,}", f"{after.ranks:,}"),
        ("mesh", _meshes(before), _meshes(after)),
        ("stages", str(len(before.stages)), str(len(after.stages))),
        ("microbatches", str(before.microbatches), str(after.microbatches)),
        ("schedule", before.schedule, after.schedule),
        ("precision", before.precision or "the model's", after.precision or "the model's"),
        ("sequence", _order(before), _order(after)),
        ("recompute", _recompute(before), _recompute(after)),
    ]
    yield from ((what, a, b) for what, a, b in rows if a != b)
    ours, theirs = _stored(before), _stored(after)
    styles = {name: f"{ours[name]} → {theirs[name]}" for name in ours if name in theirs and ours[name] != theirs[name]}
    patterns = patterns_of(styles)
    for pattern in [*patterns][:MOST_PATTERNS]:
        a, _, b = patterns[pattern].partition(" → ")
        yield pattern, a, b
    if len(patterns) > MOST_PATTERNS:
        yield f"{len(patterns) - MOST_PATTERNS} more patterns of parameters", "", "other specs"


def _meshes(plan: Plan) -> str:
    return ", ".join(dict.fromkeys(str(stage.mesh) for stage in plan.stages))


def _order(plan: Plan) -> str:
    return f"zigzag order of {2 * plan.order} chunks" if plan.order else "in its own order"


def _recompute(plan: Plan) -> str:
    """How many values backward makes again, of all templates of all stages, and in how many calls that not all of them do so."""
    templates = [template for stage in plan.stages for template in stage.templates.values()]
    again, first = sum(len(t.recompute) for t in templates), sum(t.recompute_calls or 0 for t in templates)
    calls = f", in {first} first calls otherwise than after them" if first else ""
    return f"{again} values of blocks{calls}" if again else "none"


def _stored(plan: Plan) -> dict[str, str]:
    """How every parameter rests, in the words of the report, in the first stage that has it."""
    stored: dict[str, str] = {}
    for stage in plan.stages:
        for name, parameter in stage.parameters.items():
            stored.setdefault(name, _in_words(parameter.unassigned))
    return stored


def _in_words(parameter: ParameterPlan) -> str:
    words = str(parameter.storage)
    words += "" if parameter.optimizer == parameter.storage else f", gradient and optimizer state {parameter.optimizer}"
    away = [tier for tier in dict.fromkeys((parameter.tier, parameter.optimizer_tier)) if tier]
    return words + (f", in {' and '.join(away)}" if away else "")
