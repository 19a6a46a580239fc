"""Views of a schedule's timeline: a chart of letters for terminals and a self-contained SVG for pages.

Rows are groups, columns are time. Forward is F, backward B, weight gradients W, each with its microbatch; what is blank is
bubble. (`Timeline.chrome_trace` is the third view.)
"""

from __future__ import annotations

from html import escape
from itertools import groupby
from math import floor, log10

from autopar.costmodel.simulate import Event, Timeline

_COLOURS = {"F": "#5b8ff9", "B": "#61c08a", "W": "#f4a742"}
_ANSI = {"F": "\x1b[44;97m", "B": "\x1b[42;30m", "W": "\x1b[43;30m"}
_WHAT = {"F": "forward", "B": "backward", "W": "weight gradients"}
_LIGHTER = 0.45


def seconds_text(seconds: float) -> str:
    """`12.3 ms`."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def text_gantt(timeline: Timeline, width: int = 100, colour: bool = False) -> str:
    """One line per group, `width` columns for the whole step, and a legend with makespan and bubble.

    An action shows its kind in the column where it starts and the last digit of its microbatch after it (`F3`), and
    fills the rest with `-`; where actions are shorter than a column the longest in it shows. colour: with ANSI colours.
    """
    span = timeline.makespan_s
    rows = []
    label = len(str(len(timeline.busy_s) - 1))
    for g in range(len(timeline.busy_s)):
        cells, kinds = _cells(_compute(timeline, g), span, max(1, width))
        line = "".join(cells).rstrip()
        if colour:
            runs = groupby(zip(cells, kinds, strict=True), key=lambda cell: cell[1])
            texts = ((k, "".join(c for c, _ in run)) for k, run in runs)
            line = "".join(f"{_ANSI[k]}{text}\x1b[0m" if k else text for k, text in texts)
        rows.append(f"{g:>{label}} │{line}")
    used = [k for k in _WHAT if any(e.action is not None and e.action.kind == k for e in timeline.events)]
    legend = ", ".join(f"{k} {_WHAT[k]}" for k in used)
    rows.append(f"{'':>{label}} └{'─' * width}")
    rows.append(f"{legend}; a digit is the microbatch mod 10, blank is idle" if legend else "nothing runs")
    rows.append(f"makespan {seconds_text(span)}, bubble {timeline.bubble_fraction:.1%}")
    return "\n".join(rows)


def _compute(timeline: Timeline, group: int) -> list[Event]:
    return [e for e in timeline.events if e.group == group and e.action is not None]


def _cells(events: list[Event], span: float, width: int) -> tuple[list[str], list[str]]:
    """Characters and kinds of a row's columns: each column belongs to the action that fills most of it, or to nobody."""
    owner: list[Event | None] = [None] * width
    if span > 0:
        share = [0.0] * width
        for e in events:
            a, b = e.start_s / span * width, e.end_s / span * width
            for x in range(min(int(a), width - 1), min(int(b) + 1, width)):
                part = min(b, x + 1) - max(a, x)
                if part > share[x] and part >= 0.25:
                    share[x], owner[x] = part, e
    cells, kinds = [], []
    for x, here in enumerate(owner):
        if here is None or here.action is None:
            cells.append(" ")
            kinds.append("")
            continue
        at = x
        while at and owner[at - 1] is here:
            at -= 1
        text = f"{here.action.kind}{here.action.microbatch % 10}"
        cells.append(text[x - at] if x - at < len(text) else "-")
        kinds.append(here.action.kind)
    return cells, kinds


def svg(timeline: Timeline, title: str = "", width: int = 1200, row: int = 26) -> str:
    """A self-contained picture: a bar per action, coloured by kind, labelled where the label fits; a time axis below.

    Every second microbatch is lighter, so that neighbours can be told apart where bars are too thin for labels. Hovering
    over a bar names the action and its seconds.
    """
    groups, span = len(timeline.busy_s), timeline.makespan_s or 1.0
    left, top, gap = 74, 34 if title else 12, 4
    scale = (width - left - 16) / span
    bottom = top + groups * (row + gap)
    height = bottom + 62
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    if title:
        out.append(f'<text x="{left}" y="20" font-size="14" font-weight="600" fill="#222222">{escape(title)}</text>')
    for at in ticks(span):
        x = left + at * scale
        out.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="#dddddd"/>')
        out.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle" fill="#555555">{seconds_text(at)}</text>')
    for g in range(groups):
        y = top + g * (row + gap)
        out.append(f'<text x="{left - 8}" y="{y + row / 2 + 4:.1f}" text-anchor="end" fill="#222222">group {g}</text>')
        out.append(f'<rect x="{left}" y="{y}" width="{span * scale:.1f}" height="{row}" fill="#f3f3f3"/>')
        out.extend(
            _bar(e, left + e.start_s * scale, y, (e.end_s - e.start_s) * scale, row) for e in _compute(timeline, g)
        )
    x = float(left)
    for kind, what in _WHAT.items():
        out.append(f'<rect x="{x:.0f}" y="{bottom + 32}" width="12" height="12" fill="{_COLOURS[kind]}"/>')
        out.append(f'<text x="{x + 17:.0f}" y="{bottom + 42}" fill="#222222">{kind} {what}</text>')
        x += 40 + 7 * len(what)
    facts = f"makespan {seconds_text(timeline.makespan_s)}, bubble {timeline.bubble_fraction:.1%}"
    out.append(f'<text x="{width - 16}" y="{bottom + 42}" text-anchor="end" fill="#222222">{facts}</text>')
    return "\n".join([*out, "</svg>", ""])


def _bar(e: Event, x: float, y: float, wide: float, high: float) -> str:
    assert e.action is not None
    kind, mb = e.action.kind, e.action.microbatch
    opacity = 1.0 if mb % 2 == 0 else 1 - _LIGHTER
    box = f'<rect x="{x:.2f}" y="{y}" width="{max(wide, 0.3):.2f}" height="{high}" fill="{_COLOURS[kind]}" '
    edge = 'stroke="#ffffff" stroke-width="0.6"' if wide > 3 else ""
    hint = f"<title>{escape(e.name)}: {seconds_text(e.start_s)} to {seconds_text(e.end_s)}</title>"
    label = next((t for t in (f"{kind}{mb}", str(mb)) if 6.6 * len(t) + 2 <= wide), "")
    text = (
        f'<text x="{x + wide / 2:.2f}" y="{y + high / 2 + 4:.1f}" text-anchor="middle" fill="#111111">{label}</text>'
        if label
        else ""
    )
    return f'<g>{hint}{box}fill-opacity="{opacity:g}" {edge}/>{text}</g>'


def ticks(span: float) -> list[float]:
    """About eight round times from 0 to the end."""
    step = 10.0 ** floor(log10(span / 8))
    step = next(step * n for n in (1, 2, 5, 10) if span / (step * n) <= 8)
    return [n * step for n in range(int(span / step * (1 + 1e-9)) + 1)]
