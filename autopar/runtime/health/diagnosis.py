"""Who keeps a run that hangs: the conclusion from what every rank last said of itself.

A rank's *beat* says where it is: step, action, the message that it waits for, how many messages it has started in each of its
groups, and the line of Python that it runs. Two readings a little apart show who no longer beats. If ranks have sent other
messages than the rest of a group, the first that differs names them. Of the others, whoever is not waiting keeps those who
are. Where all wait, each waits for those who are behind in its group; who waits although nobody is behind does not get what was
sent to it, and if all are like that, it is the network as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from ..data.fields import Paragraph, Seconds, kept
from ..data.schema import MOST_RANKS, integer, number
from .message_order import Row, first_difference, marked_difference

Rank = Annotated[int, integer(0, MOST_RANKS)]
Count = Annotated[int, integer(-1, 1 << 53)]


@dataclass(frozen=True)
class Beat:
    """number: how often it has said so. waits: the message that it waits for, in words (empty: none), since how many seconds, and
    its group and number there. started: messages by group. line: of Python. excuse, excused_s: why it may take its time, and
    since when. working: what a thread does beside. turn, marks: of the order of its messages. stood: standstills of its
    process, and times in which it was excused, that are over: for how many seconds, and what they took. last: its last
    messages, where it was asked. error: what ended it, and ranks that this error blames."""

    rank: Rank
    number: Count
    step: Count
    action: str
    waits: Paragraph = ""
    since_s: Annotated[float, number(-1e9, 1e9)] = 0.0
    group: str = ""
    place: Count = -1
    members: tuple[Rank, ...] = ()
    started: Mapping[str, Count] = field(default_factory=dict)
    line: Paragraph = ""
    excuse: Paragraph = ""
    excused_s: Seconds = 0.0
    working: Paragraph = ""
    turn: Count = 0
    marks: Mapping[str, Mapping[str, Count]] = field(default_factory=dict)
    stood: tuple[tuple[float, float], ...] = field(default=(), metadata=kept(absent=True))
    last: tuple[Row, ...] = field(default=(), metadata=kept(absent=True))
    error: Paragraph = ""
    blamed: tuple[Rank, ...] = ()

    @property
    def where(self) -> str:
        """Step, action, what it does beside, and line."""
        action = f", action {self.action}" if self.action else ""
        return f"step {self.step}{action}" + "".join(f", {words}" for words in (self.working, self.line) if words)

    @staticmethod
    def of(data: Mapping[str, Any]) -> Beat:
        """The beat in JSON data."""
        tuples = {name: tuple(data.get(name, ())) for name in ("members", "blamed")}
        tuples["stood"] = tuple((over_s, took_s) for over_s, took_s in data.get("stood", ()))
        return Beat(**{**data, **tuples, "last": tuple(Row(**row) for row in data.get("last", ()))})


@dataclass(frozen=True)
class Diagnosis:
    """culprits: ranks, lowest first; empty where it is the network. text: for people."""

    culprits: tuple[int, ...]
    text: str


def diagnose(first: Sequence[Beat | None], second: Sequence[Beat | None]) -> Diagnosis:
    """The conclusion from two readings of all ranks' beats (None: a rank never said anything)."""
    never = [rank for rank, beat in enumerate(second) if beat is None]
    if never:
        return Diagnosis(tuple(never), f"{_ranks(never)} said nothing yet: did they start?")
    beats = [beat for beat in second if beat is not None]
    silent = [b for b, before in zip(beats, first, strict=True) if before is not None and b.number == before.number]
    if silent:
        return _blame(
            silent,
            "no longer runs (stopped, swapped out, or its machine or the link to it is gone): it was last at",
            beats,
        )
    turns = {beat.rank: beat.turn for beat in beats}
    difference = first_difference({beat.rank: beat.last for beat in beats if beat.last}, turns)
    difference = difference or marked_difference({beat.rank: beat.marks for beat in beats})
    if difference is not None:
        where = "; ".join(f"rank {rank} is at {beats[rank].where}" for rank in difference.ranks[:4])
        return Diagnosis(
            difference.ranks,
            f"{_ranks(difference.ranks)} sent other messages than the rest: {difference.text}; {where}",
        )
    running = [beat for beat in beats if not beat.waits]
    if running:
        behind = [beat for beat in running if beat.step == min(other.step for other in running)]
        return _blame(behind, "is not waiting for anybody; it is at", beats)
    behind_of = {beat.rank: _behind(beat, beats) for beat in beats}
    stranded = [beat for beat in beats if not behind_of[beat.rank]]
    if not stranded:
        waiting = min(beats, key=lambda beat: (beat.step, beat.place))
        what = f"has not come to {waiting.waits}, which others wait in; it waits elsewhere, at"
        return _blame(behind_of[waiting.rank], what, beats)
    if len(stranded) < len(beats):
        members = sorted({rank for beat in stranded for rank in beat.members})
        what = "waits for a message that all who send it have come to, so it does not arrive: look at the network of "
        return _blame(stranded, f"{what}{_ranks(members)}; it is at", beats)
    said = "; ".join(f"rank {beat.rank} in {beat.waits}, {beat.where}" for beat in beats[:8])
    return Diagnosis(
        (), f"every rank waits and none is behind, so messages do not arrive: look at the network ({said})"
    )


def standstill_s(
    own: int, beats: Sequence[Beat | None], awaited_s: float, ages_s: Mapping[int, float] | None = None
) -> float:
    """Seconds of the last awaited_s in which a rank stood still that ran again, but for those in which the own rank did too.
    ages_s: how long beats have been known, by rank (0): they tell of standstills as of then."""
    spans: dict[int, list[tuple[float, float]]] = {}
    for beat in (beat for beat in beats if beat is not None):
        age_s = (ages_s or {}).get(beat.rank, 0.0)
        over = [(over_s + age_s, over_s + age_s + took_s) for over_s, took_s in beat.stood]
        spans[beat.rank] = [(start, min(end, awaited_s)) for start, end in over if start < awaited_s]
    return _covered([span for of_rank in spans.values() for span in of_rank]) - _covered(spans.get(own, []))


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of what spans of time cover together."""
    total, end = 0.0, 0.0
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _behind(waiting: Beat, beats: Sequence[Beat]) -> list[Beat]:
    """Members of the group that a rank waits in who have not started that message."""
    return [b for b in beats if b.rank in waiting.members and b.started.get(waiting.group, -1) < waiting.place]


def _blame(culprits: Sequence[Beat], what: str, beats: Sequence[Beat]) -> Diagnosis:
    said = "; ".join(f"rank {beat.rank} {what} {beat.where}" for beat in culprits[:8])
    ranks = {beat.rank for beat in culprits}
    waiting = [beat for beat in beats if beat.waits and beat.rank not in ranks]
    if waiting:
        longest = max(waiting, key=lambda beat: beat.since_s)
        said += (
            f". {_ranks([b.rank for b in waiting])} wait{'s' if len(waiting) == 1 else ''}, the longest rank {longest.rank} "
            f"for {longest.since_s:.0f} s: {longest.waits}, {longest.where}"
        )
    return Diagnosis(tuple(sorted(ranks)), said)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
