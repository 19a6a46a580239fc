"""Views of a schedule's timeline: a chart of letters for terminals and a self-contained SVG for pages.

Rows are groups, columns are time. Forward is F, backward B, weight gradients W, each with its microbatch; what is blank is
bubble. (`Timeline.chrome_trace` is the third view.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.costmodel.simulate import Event, Timeline
from autopar.report.picture import empty_picture, svg_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"F": "#5b8ff9", "B": "#61c08a", "W": "#f4a742"}
_WHAT = {"F": "forward", "B": "backward", "W": "weight gradients"}
_LIGHTER = 0.45
_LEFT, _RIGHT = 74, 16
"""Pixels beside the bars."""


def seconds_text(seconds: float) -> str:
    """`12.3 ms`."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def text_gantt(timeline: Timeline, width: int = 100) -> str:
    """One line per group, `width` columns for the whole step, and a legend with makespan and bubble.

    An action shows its kind in the column where it starts and the last digit of its microbatch after it (`F3`), and
    fills the rest with `-`; where actions are shorter than a column the longest in it shows.
    """
    span = timeline.makespan_s
    rows = []
    label = len(str(len(timeline.busy_s) - 1))
    for g in range(len(timeline.busy_s)):
        rows.append(f"{g:>{label}} │{_cells(_compute(timeline, g), span, max(1, width)).rstrip()}")
        messages = _messages(timeline, g, max(1, width))
        if messages:
            rows.append(f"{'':>{label}} │{messages}")
    used = [k for k in _WHAT if any(e.action is not None and e.action.kind == k for e in timeline.events)]
    legend = ", ".join(f"{k} {_WHAT[k]}" for k in used)
    legend += ", ~ messages hidden behind work" if any(e.stream == "inside" for e in timeline.events) else ""
    rows.append(f"{'':>{label}} └{'─' * width}")
    rows.append(f"{legend}; a digit is the microbatch mod 10, blank is idle" if legend else "nothing runs")
    rows.append(f"makespan {seconds_text(span)}, bubble {timeline.bubble_fraction:.1%}")
    return "\n".join(rows)


def _compute(timeline: Timeline, group: int) -> list[Event]:
    return [e for e in timeline.events if e.group == group and e.action is not None]


def _messages(timeline: Timeline, group: int, width: int) -> str:
    """`~` in the columns in which messages are under way."""
    cells = [" "] * width
    for e in timeline.events:
        if e.group == group and e.stream == "inside" and timeline.makespan_s > 0:
            first, last = (min(int(t / timeline.makespan_s * width), width - 1) for t in (e.start_s, e.end_s))
            cells[first : last + 1] = "~" * (last + 1 - first)
    return "".join(cells).rstrip()


def _cells(events: list[Event], span: float, width: int) -> str:
    """The characters of a row's columns: each column belongs to the action that fills most of it, or to nobody."""
    owner: list[Event | None] = [None] * width
    if span > 0:
        share = [0.0] * width
        for e in events:
            a, b = e.start_s / span * width, e.end_s / span * width
            for x in range(min(int(a), width - 1), min(int(b) + 1, width)):
                part = min(b, x + 1) - max(a, x)
                if part > share[x] and part >= 0.25:
                    share[x], owner[x] = part, e
    cells = ""
    for x, here in enumerate(owner):
        if here is None or here.action is None:
            cells += " "
            continue
        at = x
        while at and owner[at - 1] is here:
            at -= 1
        text = f"{here.action.kind}{here.action.microbatch % 10}"
        cells += text[x - at] if x - at < len(text) else "-"
    return cells


def svg(timeline: Timeline, title: str = "", width: int = 1200, row: int = 26) -> str:
    """A self-contained picture: a bar per action, coloured by kind, labelled where the label fits; a time axis below.

    Every second microbatch is lighter, so that neighbours can be told apart where bars are too thin for labels. Hovering
    over a bar names the action and its seconds. Raises InputError where matplotlib is missing.
    """
    groups, span = len(timeline.busy_s), timeline.makespan_s or 1.0
    height = (34 if title else 12) + groups * (row + 4) + 62
    left = _LEFT + 6 * max(0, max(map(len, timeline.rows), default=0) - 9)
    figure, axes = empty_picture(width, height, left=left, right=_RIGHT, top=34 if title else 12, bottom=62)
    axes.set(xlim=(0, span), ylim=(groups - 0.5, -0.5))
    axes.set_yticks(range(groups), timeline.rows)
    axes.grid(False, axis="y")
    axes.xaxis.set_major_formatter(lambda at, _: seconds_text(at))
    axes.set_title(title, loc="left", fontsize=14, fontweight="bold", parse_math=False)
    events = [e for g in range(groups) for e in _compute(timeline, g)]
    for e in events:
        _draw_bar(axes, e, (width - left - _RIGHT) / span)
    for n, (kind, what) in enumerate(_WHAT.items()):
        mark = {"boxstyle": "square", "facecolor": _COLOURS[kind], "edgecolor": "none"}
        figure.text((left + 150 * n) / width, 14 / height, f"{kind} {what}", bbox=mark)
    facts = f"makespan {seconds_text(timeline.makespan_s)}, bubble {timeline.bubble_fraction:.1%}"
    figure.text(1 - _RIGHT / width, 14 / height, facts, ha="right")
    return svg_text(figure, {e.name: f"{e.name}: {seconds_text(e.start_s)} to {seconds_text(e.end_s)}" for e in events})


def _draw_bar(axes: Axes, e: Event, pixels_per_s: float) -> None:
    assert e.action is not None
    kind, mb, seconds = e.action.kind, e.action.microbatch, e.end_s - e.start_s
    wide = seconds * pixels_per_s
    axes.barh(
        e.group,
        seconds,
        left=e.start_s,
        height=0.86,
        color=_COLOURS[kind],
        alpha=1.0 if mb % 2 == 0 else 1 - _LIGHTER,
        edgecolor="#ffffff",
        linewidth=0.6 if wide > 3 else 0.0,
        gid=e.name,
    )
    label = next((text for text in (f"{kind}{mb}", str(mb)) if 6.6 * len(text) + 2 <= wide), "")
    if label:
        centre = e.start_s + seconds / 2
        axes.text(centre, e.group, label, ha="center", va="center", fontsize=11, gid=f"label of {e.name}")
