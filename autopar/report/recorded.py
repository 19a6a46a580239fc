"""A recorded run as a timeline, as predicted ones are, and as a trace."""

from __future__ import annotations

from typing import Any

from autopar.costmodel.simulate import Event, Timeline
from autopar.report.predicted_vs_measured import Profile, action_of, first_ranks, waited_s
from autopar.report.program_facts import ProgramFacts


def measured_timeline(facts: ProgramFacts, profile: Profile) -> Timeline:
    """The typical step of the first rank of every group as a timeline."""
    events, busy_s = [], []
    at = profile.typical
    for g, rank in enumerate(first_ranks(facts)):
        own = profile.ranks[rank][at]
        waiting_s = waited_s(own)
        actions = [(span, action) for span in own.spans if (action := action_of(span.name)) is not None]
        starts = {span.name: span.start_s + waiting_s.get(span.name, 0.0) for span, _ in actions}
        events += [Event(g, "compute", span.name, starts[span.name], span.end_s, action) for span, action in actions]
        busy_s.append(sum(span.end_s - starts[span.name] for span, _ in actions))
    end_s = max((e.end_s for e in events), default=0.0)
    names = tuple(f"rank {rank}, measured" for rank in first_ranks(facts))
    return Timeline(tuple(events), end_s, tuple(busy_s), (0.0,) * len(busy_s), tuple(busy_s), names=names)


def trace_rows(profile: Profile) -> list[dict[str, Any]]:
    """All recorded steps in the Chrome trace format, a process per rank, steps one after another."""
    rows: list[dict[str, Any]] = []
    for rank, steps in enumerate(profile.ranks):
        pid = f"rank {rank}, measured"
        rows.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": pid}})
        begin_s = 0.0
        for n, step in enumerate(steps):
            rows.append(_bar(pid, "steps", f"step {n}", begin_s, begin_s + step.seconds, {}))
            rows += [_bar(pid, "actions", s.name, begin_s + s.start_s, begin_s + s.end_s, {}) for s in step.spans]
            rows += [
                _bar(
                    pid,
                    f"{m.kind} {m.axes}",
                    m.site or m.kind,
                    begin_s + m.start_s,
                    begin_s + m.end_s,
                    {"bytes": m.nbytes, "waited for, µs": m.non_overlapped_s * 1e6},
                )
                for m in step.messages
            ]
            begin_s += max(other[n].seconds for other in profile.ranks)
    return rows


def _bar(pid: str, tid: str, name: str, start_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": "measured", **times, "args": args}
