"""A recorded run beside its prediction: what each action and each kind of message was expected to take, and took.

Expectations are `program.json`'s, as `facts` wrote them; records are what `autopar_runtime.comm.recorder` noted on every rank.
A step's time is the slowest rank's; what a table says of many actions or messages is their median over steps and ranks,
which a first step that warms up does not move. What a rank waits for others is no part of an action's time.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

from autopar.ir.actions import Action, parse_row
from autopar.ir.text import size_text, time_text
from autopar.passes.account.collectives import Collective
from autopar.report.program_facts import ProgramFacts
from autopar.runtime.comm.recorder import Sent, StepRecord


@dataclass(frozen=True)
class Profile:
    """The recorded steps of every rank, all of the same length."""

    ranks: tuple[tuple[StepRecord, ...], ...]

    @property
    def steps(self) -> int:
        return min(map(len, self.ranks), default=0)

    @property
    def step_s(self) -> float:
        """Median over steps of the slowest rank's seconds."""
        return statistics.median(max(rank[n].seconds for rank in self.ranks) for n in range(self.steps))

    @property
    def input_s(self) -> float | None:
        """Seconds that the rank which waits longest for its batches waits for one, on average after the first step, before which
        whoever reads them starts; None where a rank did not note it."""
        waits = [[step.input_s for step in steps[1:] or steps] for steps in self.ranks]
        known = [[wait for wait in own if wait is not None] for own in waits]
        if not all(own and len(own) == len(all_) for own, all_ in zip(known, waits, strict=True)):
            return None
        return max(map(statistics.fmean, known), default=None)

    @property
    def typical(self) -> int:
        """The step whose length is nearest to the median."""
        median_s = self.step_s
        return min(range(self.steps), key=lambda n: abs(max(rank[n].seconds for rank in self.ranks) - median_s))


@dataclass(frozen=True)
class ActionRow:
    """Seconds of one action of a stage: F, B or W, or what comes "once" after them all."""

    stage: int
    kind: str
    predicted_s: float
    measured_s: float


@dataclass(frozen=True)
class Traffic:
    """Messages of one rank in one step, in all. waited_s: that the rank did nothing else."""

    times: float
    nbytes: float
    seconds: float
    waited_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.times:g}, {size_text(self.nbytes)}, {time_text(self.seconds)}"


@dataclass(frozen=True)
class MessageRow:
    """All messages of a kind along an axis, or between "stages": as expected, and as seen."""

    kind: str
    axis: str
    predicted: Traffic | None
    measured: Traffic | None


def action_rows(facts: ProgramFacts, profile: Profile) -> list[ActionRow]:
    """One row per stage and kind of action, and one per stage of what comes once."""
    predicted = facts.schedule.seconds
    taken: dict[tuple[int, str], list[float]] = {}
    for rank, steps in enumerate(profile.ranks):
        first = stages_of(facts, rank)[0]
        for step in steps:
            waiting_s = waited_s(step)
            once_s = 0.0
            for span in step.spans:
                action = action_of(span.name)
                busy_s = span.end_s - span.start_s - waiting_s.get(span.name, 0.0)
                if action is None:
                    once_s += busy_s
                else:
                    taken.setdefault((action.stage, action.kind), []).append(busy_s)
            taken.setdefault((first, "once"), []).append(once_s)
    rows = []
    for (stage, kind), seconds in sorted(taken.items(), key=lambda item: (item[0][0], "FBWonce".index(item[0][1]))):
        expected_s = facts.stages[stage].step_s if kind == "once" else predicted.get((stage, kind), 0.0)
        rows.append(ActionRow(stage, kind, expected_s, statistics.median(seconds)))
    return rows


def message_rows(facts: ProgramFacts, profile: Profile) -> list[MessageRow]:
    """Messages by kind and axis; those that are expected are of the stage that sends most of them."""
    expected, seen = _expected(facts), _seen(profile)
    return [MessageRow(*key, expected.get(key), seen.get(key)) for key in dict.fromkeys((*expected, *seen))]


def _expected(facts: ProgramFacts) -> dict[tuple[str, str], Traffic]:
    most: dict[tuple[str, str], Traffic] = {}
    for stage in facts.stages:
        own: dict[tuple[str, str], list[Collective]] = {}
        for one in stage.collectives:
            own.setdefault((one.kind, one.axis), []).append(one)
        for key, found in own.items():
            times, nbytes = sum(c.times for c in found), sum(c.times * c.nbytes for c in found)
            traffic = Traffic(times, nbytes, sum(c.time_s for c in found))
            most[key] = max(most.get(key, traffic), traffic, key=lambda t: t.seconds)
    return most


def _seen(profile: Profile) -> dict[tuple[str, str], Traffic]:
    by_step: dict[tuple[str, str], list[Traffic]] = {}
    for step in (step for steps in profile.ranks for step in steps):
        own: dict[tuple[str, str], list[Sent]] = {}
        for m in step.messages:
            own.setdefault((m.kind, "stages" if m.kind in ("send", "recv") else m.axes), []).append(m)
        for key, messages in own.items():
            nbytes, seconds = sum(m.nbytes for m in messages), sum(m.end_s - m.start_s for m in messages)
            traffic = Traffic(len(messages), nbytes, seconds, sum(m.non_overlapped_s for m in messages))
            by_step.setdefault(key, []).append(traffic)
    return {
        key: Traffic(*(statistics.median(column) for column in zip(*map(astuple, found), strict=True)))
        for key, found in by_step.items()
    }


def predicted_vs_measured_text(facts: ProgramFacts, profile: Profile) -> str:
    """The table of a run beside its prediction."""
    return "\n".join(_lines(facts, profile))


def _lines(facts: ProgramFacts, profile: Profile) -> Iterator[str]:
    expected_s, measured_s = facts.predicted.step_time_s, profile.step_s
    yield f"{profile.steps} steps on {len(profile.ranks)} ranks"
    yield _row("", "predicted", "measured", "ratio")
    yield _row("step", time_text(expected_s), time_text(measured_s), _ratio(measured_s, expected_s))
    for a in action_rows(facts, profile):
        what = f"stage {a.stage}: " + (
            "gradients, update, parameters" if a.kind == "once" else f"{a.kind}, one microbatch"
        )
        yield _row(what, time_text(a.predicted_s), time_text(a.measured_s), _ratio(a.measured_s, a.predicted_s))
    messages = message_rows(facts, profile)
    if messages:
        yield "messages of a rank in a step"
        yield _row("", "predicted", "measured", "waited for")
    for row in messages:
        waited = time_text(row.measured.waited_s) if row.measured else "–"
        yield _row(f"{row.kind} over {row.axis}", str(row.predicted or "–"), str(row.measured or "–"), waited)
    longest = sorted(
        (m for rank in profile.ranks for m in rank[profile.typical].messages),
        key=lambda m: m.non_overlapped_s,
        reverse=True,
    )
    if longest and longest[0].non_overlapped_s > 0:
        yield "longest waited for, in one step"
    for m in longest[:5]:
        where = f" at {m.site}" if m.site else ""
        during = f", in {m.during}" if m.during else ""
        yield f"  {time_text(m.non_overlapped_s):>10}  {m.kind} of {size_text(m.nbytes)} over {m.axes}{where}{during}"


def _row(what: str, *columns: str) -> str:
    return f"  {what:44}" + "".join(f"{column:>28}" for column in columns[:2]) + f"{columns[2]:>14}"


def _ratio(measured_s: float, predicted_s: float) -> str:
    return f"{measured_s / predicted_s:.2f}" if predicted_s > 0 else "–"


def first_ranks(facts: ProgramFacts) -> list[int]:
    """The first rank of every group."""
    return [facts.stages[group[0]].mesh.offset for group in facts.schedule.graph.groups]


def group_of(facts: ProgramFacts, rank: int) -> int:
    """The group that a rank belongs to."""
    firsts = first_ranks(facts)
    return max((g for g in range(len(firsts)) if firsts[g] <= rank), key=lambda g: firsts[g])


def stages_of(facts: ProgramFacts, rank: int) -> Sequence[int]:
    """The stages that a rank runs."""
    return facts.schedule.graph.groups[group_of(facts, rank)]


def action_of(name: str) -> Action | None:
    """The action that a span is, if it is one."""
    try:
        (action,) = parse_row(name)
    except ValueError:
        return None
    return action


def waited_s(step: StepRecord) -> dict[str, float]:
    """Seconds that a rank waited for other stages, by the span in which it did."""
    waited: dict[str, float] = {}
    starts = [span.start_s for span in step.spans]
    for m in step.messages:
        place = bisect_right(starts, m.wait_s) - 1
        if m.kind == "recv" and place >= 0 and m.wait_s <= step.spans[place].end_s:
            name = step.spans[place].name
            waited[name] = waited.get(name, 0.0) + m.non_overlapped_s
    return waited
