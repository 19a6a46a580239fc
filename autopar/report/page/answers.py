"""Sections of a page that others answered: why nothing fits, what if something were otherwise, and what to change.

All of them are plain data, so that a page can be made of answers that were saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import InfeasibleError, InputError
from autopar.ir.text import size_text, time_text
from autopar.report.page.shown import Table
from autopar.report.program_facts import RoomFacts


@dataclass(frozen=True)
class Refused:
    """Why a plan does not fit. answer: in a sentence; words: what the search said, a line each; changes: what would do (None:
    nothing that was found, or nobody looked)."""

    answer: str
    words: tuple[str, ...] = ()
    changes: Table | None = None


@dataclass(frozen=True)
class Answer:
    """The answer to what would be if something were otherwise. causes: of the difference, in seconds and in bytes; plan: what
    is decided otherwise."""

    change: str
    sentence: str
    causes: Table
    plan: Table


@dataclass(frozen=True)
class WhatIf:
    """Answers beside each other, and each by itself."""

    table: Table
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class AdviceShown:
    """Advice: what limits the step, and what to change. notes: sentences that come first; in_words: of the suggestions."""

    notes: tuple[str, ...]
    limits: Table
    suggestions: Table
    in_words: tuple[str, ...]


def refused_of(room: RoomFacts, error: InfeasibleError | None) -> Refused | None:
    """Why the plan of a page does not fit; None where it does. error: what the search said, where this is the smallest plan."""
    if error is None and room.free_bytes >= 0:
        return None
    answer = "Does not fit"
    if room.free_bytes < 0:
        answer += f": short by {size_text(-room.free_bytes)} of {size_text(room.device_bytes)} of {room.device}"
    if error is None:
        return Refused(f"{answer}.")
    rows = tuple(
        (one.text, time_text(one.step_time_s), size_text(one.peak_bytes), f"{one.batch:,}", f"{one.cluster.size:,}")
        for one in error.alternatives
    )
    head = ("Change", "Step", "Peak per rank", "Batch", "Ranks")
    lines = [line for line in str(error).splitlines() if not line.startswith(("What would do", "  - "))]
    return Refused(f"{answer}.", tuple(lines), Table("What would make it fit", head, rows) if rows else None)


def what_if_of(answers: Iterable[Mapping[str, Any]]) -> WhatIf | None:
    """The section of answers as data (`WhatIf.facts()`); None where there are none. Every answer has change and sentence (text),
    step_time_s and peak_bytes (of this plan, and of the other; None where that does not fit), and may have seconds and bytes by
    cause, of the other more than of this plan, and plan: what, before and after. Raises InputError."""
    rows, shown = [], []
    for answer in answers:
        change, sentence, times, peaks = _fields(answer, "what_if", "change", "sentence", "step_time_s", "peak_bytes")
        before_s, after_s = _pair(times, "what_if", "step_time_s")
        before, after = _pair(peaks, "what_if", "peak_bytes")
        own = time_text(before_s), size_text(before)
        if after_s is None or after is None:
            rows.append((change, own[0], "does not fit", "–", own[1], "–"))
        else:
            more = f"{after_s / before_s - 1:+.1%}" if before_s else "–"
            rows.append((change, own[0], time_text(after_s), more, own[1], size_text(after)))
        causes = [(cause, _signed(s, time_text)) for cause, s in answer.get("seconds", {}).items() if s]
        causes += [(cause, _signed(n, size_text)) for cause, n in answer.get("bytes", {}).items() if n]
        changed = tuple((one["what"], str(one["before"]), str(one["after"])) for one in answer.get("plan", ()))
        shown.append(
            Answer(
                change,
                sentence,
                Table(f"{change}: the difference", ("Cause", "More"), tuple(causes)),
                Table(f"{change}: the plan", ("What", "Here", "Then"), changed, 3),
            )
        )
    if not rows:
        return None
    head = ("If", "Step", "Step then", "Difference", "Peak", "Peak then")
    return WhatIf(Table("This plan beside others", head, tuple(rows)), tuple(shown))


def advice_of(advice: Mapping[str, Any] | None) -> AdviceShown | None:
    """The section of `Advice.facts()`; None where there is none. limits: stages, limit, limit_s and step_s; suggestions: change,
    limit, step_before_s, step_after_s, batch_before, batch_after and sentence. Raises InputError."""
    if advice is None:
        return None
    limits, suggestions = _fields(advice, "advice", "limits", "suggestions")
    rows = []
    for one in limits:
        stages, limit, limit_s, step_s = _fields(one, "advice.limits", "stages", "limit", "limit_s", "step_s")
        share = f"{limit_s / step_s:.1%}" if step_s else "–"
        rows.append((", ".join(map(str, stages)), limit, time_text(limit_s), share, time_text(step_s)))
    changes, in_words = [], []
    for one in suggestions:
        change, limit, sentence = _fields(one, "advice.suggestions", "change", "limit", "sentence")
        before_s, after_s, before, after = _fields(
            one, "advice.suggestions", "step_before_s", "step_after_s", "batch_before", "batch_after"
        )
        batch = f"{before:,}" if before == after else f"{before:,} → {after:,}"
        changes.append((change, limit, f"{time_text(before_s)} → {time_text(after_s)}", batch))
        in_words.append(sentence)
    scaling = advice.get("scaling") or {}
    told = [*(one["sentence"] for one in advice.get("mismatches", ())), scaling.get("sentence"), advice.get("unscaled")]
    return AdviceShown(
        tuple(text for text in told if text),
        Table("What limits the step", ("Stages", "Limit", "Seconds", "Share", "Of a step"), tuple(rows), 2),
        Table("Changes that were planned", ("Change", "Limit", "Step", "Batch"), tuple(changes), 2),
        tuple(in_words),
    )


def _fields(data: Mapping[str, Any], where: str, *names: str) -> Sequence[Any]:
    """The fields of an answer. Raises InputError where one is missing."""
    if not isinstance(data, Mapping):
        raise InputError(f"report_html: {where} takes data by the names of fields, not {type(data).__name__}")
    missing = [name for name in names if name not in data]
    if missing:
        raise InputError(f"report_html: an entry of {where} lacks {', '.join(missing)}; it has {', '.join(data)}")
    return [data[name] for name in names]


def _pair(value: Any, where: str, name: str) -> tuple[float, float | None]:
    """Before and after. Raises InputError."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2 or value[0] is None:
        raise InputError(f"report_html: {name} of {where} is two numbers, before and after, not {value!r}")
    return float(value[0]), None if value[1] is None else float(value[1])


def _signed(amount: float, text: Any) -> str:
    """`+3 ms`, or `-2 GB`."""
    words: str = text(abs(amount))
    return f"{'+' if amount > 0 else '-'}{words}"
