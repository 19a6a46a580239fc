"""A picture of what keeping less for backward costs: a curve per stage from bytes to seconds, policies and the plan on it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from autopar.codegen.gantt import seconds_text, ticks

_COLOURS = ("#5b8ff9", "#61c08a", "#f4a742", "#b37feb", "#ff7875", "#36cfc9")
_LEFT, _TOP, _WIDTH, _HEIGHT = 84, 36, 760, 420


def curve_svg(stages: Sequence[dict[str, Any]], title: str = "", size_text: Any = str) -> str:
    """stages: corners, policies and chosen, each (bytes, seconds) of one stage (`passes.recompute.curve`).

    Stages whose curves are alike share a line.
    """
    rows: dict[str, tuple[list[int], dict[str, Any]]] = {}
    for number, stage in enumerate(stages):
        rows.setdefault(repr(stage), ([], stage))[0].append(number)
    places = [place for _, s in rows.values() for place in (*s["corners"], *s["policies"].values(), s["chosen"])]
    most_b, most_s = max((b for b, _ in places), default=0.0) or 1.0, max((s for _, s in places), default=0.0) or 1.0
    bottom, right = _TOP + _HEIGHT, _LEFT + _WIDTH

    def at(place: Sequence[float]) -> tuple[float, float]:
        return _LEFT + place[0] / most_b * _WIDTH, bottom - place[1] / most_s * _HEIGHT

    height = bottom + 56 + 18 * min(len(rows), len(_COLOURS))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{right + 40}" height="{height}" viewBox="0 0 {right + 40} {height}" '
        'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{right + 40}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" font-size="14" font-weight="600" fill="#222222">{escape(title)}</text>',
    ]
    for value in ticks(most_b):
        x = at((value, 0.0))[0]
        out.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#eeeeee"/>')
        out.append(
            f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle" fill="#555555">{escape(size_text(value))}</text>'
        )
    for value in ticks(most_s):
        y = at((0.0, value))[1]
        out.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#eeeeee"/>')
        out.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555555">{seconds_text(value)}</text>'
        )
    out.append(
        f'<text x="{_LEFT + _WIDTH / 2}" y="{bottom + 30}" text-anchor="middle" fill="#222222">'
        "kept for backward by a microbatch, per rank</text>"
    )
    for (_, stage), colour in zip(rows.values(), _COLOURS, strict=False):
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, stage["corners"]))
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [_dot(at(place), colour, name, place, size_text) for name, place in stage["policies"].items()]
        x, y = at(stage["chosen"])
        hint = (
            f"<title>the plan: {size_text(stage['chosen'][0])}, {seconds_text(stage['chosen'][1])} made again</title>"
        )
        out.append(
            f'<g>{hint}<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="none" stroke="#222222" stroke-width="2"/></g>'
        )
    for k, ((numbers, _), colour) in enumerate(zip(rows.values(), _COLOURS, strict=False)):
        y = bottom + 50 + 18 * k
        named = f"stage {numbers[0]}" if len(numbers) == 1 else f"stages {numbers[0]} … {numbers[-1]} ({len(numbers)})"
        out.append(f'<rect x="{_LEFT}" y="{y - 9}" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{_LEFT + 17}" y="{y + 1}" fill="#222222">{named}; the circle is the plan</text>')
    return "\n".join([*out, "</svg>", ""])


def _dot(at: tuple[float, float], colour: str, name: str, place: Sequence[float], size_text: Any) -> str:
    hint = f"<title>{escape(name)}: {escape(size_text(place[0]))}, {seconds_text(place[1])} made again</title>"
    text = f'<text x="{at[0] + 7:.1f}" y="{at[1] - 5:.1f}" fill="#333333">{escape(name)}</text>'
    return f'<g>{hint}<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="3.5" fill="{colour}"/>{text}</g>'
