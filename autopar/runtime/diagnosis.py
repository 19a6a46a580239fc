"""Who keeps a run that hangs: the conclusion from what every rank last said of itself.

A rank's *beat* says where it is: step, action, the message that it waits for, how many messages it has started in each of its
groups, and the line of Python that it runs. Two readings a little apart show who no longer beats. Of the others, whoever is not
waiting keeps those who are; where all wait, whoever is behind in a group that others wait in, or calls something else
there; and where nobody is, the network between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Beat:
    """number: how often it has said so. waits: the message that it waits for, in words (empty: none), since how many seconds, and
    its group and number there. started: messages by group. line: of Python. excuse: why it may take its time."""

    rank: int
    number: int
    step: int
    action: str
    waits: str = ""
    since_s: float = 0.0
    group: str = ""
    place: int = -1
    signature: str = ""
    members: tuple[int, ...] = ()
    started: Mapping[str, int] = field(default_factory=dict)
    line: str = ""
    excuse: str = ""

    @property
    def where(self) -> str:
        """Step, action and line."""
        action = f", action {self.action}" if self.action else ""
        return f"step {self.step}{action}" + (f", {self.line}" if self.line else "")

    @staticmethod
    def of(data: Mapping[str, Any]) -> Beat:
        """From JSON."""
        return Beat(**{**data, "members": tuple(data.get("members", ()))})


@dataclass(frozen=True)
class Diagnosis:
    """culprits: ranks, lowest first; empty where it is the network. text: for people."""

    culprits: tuple[int, ...]
    text: str


def diagnose(first: Sequence[Beat | None], second: Sequence[Beat | None]) -> Diagnosis:
    """What two readings of all ranks' beats say (None: nothing was ever said)."""
    never = [rank for rank, beat in enumerate(second) if beat is None]
    if never:
        return Diagnosis(tuple(never), f"{_ranks(never)} said nothing yet: did they start?")
    beats = [beat for beat in second if beat is not None]
    silent = [b for b, before in zip(beats, first, strict=True) if before is not None and b.number == before.number]
    if silent:
        return _blame(silent, "no longer runs (stopped, swapped out, or its machine is gone): it was last at", beats)
    running = [beat for beat in beats if not beat.waits]
    if running:
        behind = [beat for beat in running if beat.step == min(other.step for other in running)]
        return _blame(behind, "is not waiting for anybody; it is at", beats)
    for waiting in sorted(beats, key=lambda beat: (beat.step, beat.place)):
        members = [beat for beat in beats if beat.rank in waiting.members]
        behind = [b for b in members if b.started.get(waiting.group, -1) < waiting.place]
        if behind:
            return _blame(
                behind, f"has not come to {waiting.waits}, which others wait in; it waits elsewhere, at", beats
            )
        other = [b for b in members if b.group == waiting.group and b.signature != waiting.signature]
        if other:
            said = "; ".join(f"rank {b.rank} calls {b.waits} ({b.where})" for b in (waiting, *other))
            return Diagnosis(tuple(sorted(b.rank for b in (waiting, *other))), f"ranks call different messages: {said}")
    said = "; ".join(f"rank {beat.rank} in {beat.waits}, {beat.where}" for beat in beats[:8])
    return Diagnosis(
        (), f"every rank waits and none is behind, so messages do not arrive: look at the network ({said})"
    )


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
