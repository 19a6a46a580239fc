"""The schedule as lanes: every group of ranks with its actions and messages, which lanes are alike, and the end of the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.costmodel.simulate import Timeline
from autopar.ir.text import calls_text, size_text, time_text
from autopar.plan import Plan
from autopar.report.answer import CAUSES
from autopar.report.page.shown import Table, runs, share_text, span_text
from autopar.report.program_facts import ProgramFacts

MOST_BARS = 40_000
"""Lanes are left out evenly where a step has more actions and messages."""
TICKS = 1_000_000
"""The step in units of a bar's ends."""
MOST_ROWS = 128
AT_END = ("gradients_s", "update_s", "rest_s", "overhead_s")
"""Parts of `Spent` that come when all actions are over, in their order."""
WORDS = {"F": "forward", "B": "backward", "W": "weight gradients"}


@dataclass(frozen=True)
class Schedule:
    """name: of the schedule; ends: what comes after the actions, in words; lanes: plain data for the drawing script; groups: what
    each group runs, as a table; messages: those of actions and between stages, as a table (None: there are none)."""

    name: str
    makespan: str
    idle: str
    ends: str
    groups: Table
    messages: Table | None
    lanes: dict[str, Any]


def schedule(program: ProgramFacts, plan: Plan, timeline: Timeline) -> Schedule:
    """The schedule of a program."""
    told = program.schedule
    step_s = max(program.spent.step_s, timeline.makespan_s)
    scale = TICKS / step_s if step_s else 0.0
    ends = [(CAUSES[name], s) for name in AT_END if (s := getattr(program.spent, name)) > 0]
    by_action = {"shown": told.shown, "hidden": told.hidden, "beside": told.beside, "once": told.once}
    return Schedule(
        told.name,
        time_text(timeline.makespan_s),
        share_text(timeline.bubble_fraction),
        ", ".join(f"{what} {time_text(seconds)}" for what, seconds in ends),
        _groups(program, plan, timeline),
        _messages(program),
        {
            "span_s": step_s,
            "over": round(timeline.makespan_s * scale),
            "rows": _lanes(program, timeline, scale),
            "ends": [[what, round(seconds * scale)] for what, seconds in ends],
            **{name: _in_ticks(seconds, scale) for name, seconds in by_action.items()},
        },
    )


def _in_ticks(seconds: Mapping[tuple[int, str], float], scale: float) -> dict[str, int]:
    """Ticks by an action's kind and stage, `F0`."""
    return {f"{kind}{stage}": ticks for (stage, kind), s in seconds.items() if (ticks := round(s * scale))}


def _lanes(program: ProgramFacts, timeline: Timeline, scale: float) -> list[dict[str, Any]]:
    """A lane per group that is drawn. bars: kind, stage, microbatch, start, and length of every action, one after another; sent,
    received: kind, microbatch, the other group, start, and length of every message between groups, in the order of their ends."""
    groups = program.schedule.graph.groups
    like = [
        tuple((program.stages[s].mesh.axes, tuple(program.stages[s].seconds.items())) for s in group)
        for group in groups
    ]
    first_of = {g: first for first, last in runs(like, lambda one: one) for g in range(first, last + 1)}
    sends = sorted((e for e in timeline.events if e.sent is not None), key=lambda event: event.end_s)
    every = max(1, -(-(sum(map(len, program.schedule.table)) + 2 * len(sends)) // MOST_BARS))
    kept = sorted({*range(0, len(groups), every), len(groups) - 1})
    lanes: dict[int, dict[str, Any]] = {
        g: {
            "name": timeline.rows[g],
            "like": first_of[g] if first_of[g] != g else None,
            "bars": [],
            "sent": [],
            "received": [],
        }
        for g in kept
    }
    for event in timeline.events:
        if event.action is not None and event.stream == "compute" and event.group in lanes:
            start, end, one = round(event.start_s * scale), round(event.end_s * scale), event.action
            lanes[event.group]["bars"] += ["FBW".index(one.kind), one.stage, one.microbatch, start, end - start]
    for event in sends:
        assert event.sent is not None
        start, end, one = round(event.start_s * scale), round(event.end_s * scale), event.sent
        for g, other, lane in ((event.group, event.peer, "sent"), (event.peer, event.group, "received")):
            if g in lanes:
                lanes[g][lane] += ["FBW".index(one.kind), one.microbatch, other, start, end - start]
    return [lanes[g] for g in kept]


def _messages(program: ProgramFacts) -> Table | None:
    """Messages in and beside an action of every stage, and between stages; neighbours that are alike are one."""
    told = program.schedule
    lists = (told.hidden, told.shown, told.beside, told.once)
    by_stage = [
        tuple(
            (WORDS[kind], *(time_text(by[stage, kind]) if (stage, kind) in by else "–" for by in lists))
            for kind in "FBW"
            if any((stage, kind) in by for by in lists)
        )
        for stage in range(len(program.stages))
    ]
    rows: list[tuple[str, ...]] = [
        (span_text(first, last), *cells, "–")
        for first, last in runs(by_stage, lambda row: row)
        for cells in by_stage[first]
    ]
    links = sorted(told.hand_over.items())
    for first, last in runs(links, lambda link: (link[0][1] - link[0][0], link[1])):
        ((u, v), seconds), ((w, x), _) = links[first], links[last]
        rows.append((f"{span_text(u, w)} → {span_text(v, x)}", "send", *("–",) * 4, time_text(seconds)))
    if not rows:
        return None
    head = (
        "Stages",
        "Action",
        "Hidden in layers",
        "Exposed in layers",
        "Of parameters, each",
        "Of parameters, once",
        "Between stages",
    )
    used = [i for i in range(len(head)) if i < 2 or any(row[i] != "–" for row in rows)]
    kept = tuple(tuple(row[i] for i in used) for row in rows[:MOST_ROWS])
    return Table("Messages of one microbatch", tuple(head[i] for i in used), kept, 2)


def _groups(program: ProgramFacts, plan: Plan, timeline: Timeline) -> Table:
    """A row per group, of neighbours that are alike one."""
    shown = []
    for g, stages in enumerate(program.schedule.graph.groups):
        seconds = [
            " + ".join(time_text(program.stages[s].seconds.get(kind, 0.0)) for s in stages)
            if any(program.stages[s].seconds.get(kind, 0.0) for s in stages)
            else "–"
            for kind in "FBW"
        ]
        idle = 1 - timeline.busy_s[g] / timeline.makespan_s if timeline.makespan_s else 0.0
        mesh = program.stages[stages[0]].mesh
        shown.append((str(mesh), *seconds, share_text(idle), size_text(program.schedule.peaks[g])))
    rows = []
    for first, last in runs(shown, lambda row: row):
        groups = program.schedule.graph.groups
        begin, end = program.stages[groups[first][0]].mesh, program.stages[groups[last][0]].mesh
        own = sorted({s for g in range(first, last + 1) for s in groups[g]})
        calls = ", ".join(
            calls_text(plan.stages[own[a]].calls[0], plan.stages[own[b]].calls[1])
            for a, b in runs([s - i for i, s in enumerate(own)], lambda ahead: ahead)
        )
        where = span_text(f"{begin.offset:,}", f"{end.offset + end.size - 1:,}")
        rows.append((span_text(first, last), where, calls, *shown[first]))
    caption = "Groups of ranks"
    if len(rows) > MOST_ROWS:
        caption += f", the first {MOST_ROWS} of {len(rows):,} kinds"
    head = ("Group", "Ranks", "Calls", "Mesh", "Forward", "Backward", "Weights", "Idle", "Peak per rank")
    return Table(caption, head, tuple(rows[:MOST_ROWS]), 4)
