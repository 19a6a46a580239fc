"""The schedule as lanes: every group of ranks with its actions, and which lanes are like the one above."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.costmodel.simulate import Timeline
from autopar.ir.text import size_text, time_text
from autopar.plan import Plan
from autopar.report.page.shown import Table, runs, share_text, span_text
from autopar.report.program_facts import ProgramFacts

MOST_ACTIONS = 40_000
"""Lanes are left out evenly where a step has more."""
TICKS = 1_000_000
"""The makespan in units of a bar's ends."""
MOST_ROWS = 128


@dataclass(frozen=True)
class Schedule:
    """name: of the schedule; lanes: plain data for the drawing script; groups: what each group runs, as a table."""

    name: str
    makespan: str
    idle: str
    groups: Table
    lanes: dict[str, Any]


def schedule(program: ProgramFacts, plan: Plan, timeline: Timeline) -> Schedule:
    """The schedule of a program."""
    graph = program.schedule.graph
    like = [
        tuple((program.stages[s].mesh.axes, tuple(program.stages[s].seconds.items())) for s in group)
        for group in graph.groups
    ]
    count = len(graph.groups)
    actions = sum(map(len, program.schedule.table))
    every = max(1, -(-actions // MOST_ACTIONS))
    kept = sorted({*range(0, count, every), count - 1})
    first_of = {g: first for first, last in runs(like, lambda one: one) for g in range(first, last + 1)}
    bars: dict[int, list[int]] = {g: [] for g in kept}
    rows = [
        {"name": timeline.rows[g], "like": first_of[g] if first_of[g] != g else None, "bars": bars[g]} for g in kept
    ]
    scale = TICKS / timeline.makespan_s if timeline.makespan_s else 0.0
    for event in timeline.events:
        if event.action is not None and event.stream == "compute" and event.group in bars:
            start, end = round(event.start_s * scale), round(event.end_s * scale)
            one = event.action
            bars[event.group] += ["FBW".index(one.kind), one.stage, one.microbatch, start, end - start]
    return Schedule(
        program.schedule.name,
        time_text(timeline.makespan_s),
        share_text(timeline.bubble_fraction),
        _groups(program, plan, timeline),
        {"span_s": timeline.makespan_s, "rows": rows},
    )


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
            span_text(plan.stages[own[a]].calls[0], plan.stages[own[b]].calls[1] - 1)
            for a, b in runs([s - i for i, s in enumerate(own)], lambda ahead: ahead)
        )
        where = span_text(f"{begin.offset:,}", f"{end.offset + end.size - 1:,}")
        rows.append((span_text(first, last), where, calls, *shown[first]))
    caption = "Groups of ranks"
    if len(rows) > MOST_ROWS:
        caption += f", the first {MOST_ROWS} of {len(rows):,} kinds"
    head = ("Group", "Ranks", "Calls", "Mesh", "Forward", "Backward", "Weights", "Idle", "Peak per rank")
    return Table(caption, head, tuple(rows[:MOST_ROWS]), 4)
