"""The actions of a group of ranks in one step, in order: its row of the action table, with sends and receives put in.

A table row says `F0.0 F1.0 B0.0 …`: kind, microbatch, stage. A value leaves after the F that makes it, a gradient
after its B; where the receiving group waits for it follows from the table, but when it should *begin* to receive does
not. So the table is played once with rough durations, and every receive is put where the sender's action ends:

    sender      F0  F1 → ………            → : sends what F1 made
    receiver    …   F0 ← B0 F1           ← : begins to receive it, while B0 still has to be computed

Ordered by the time of their sending action, messages are in one order that agrees with the order of every group. So a
table that can be played can be run by blocking calls, and messages between two ranks need no names: they are received
in the order sent (NCCL has no tags). Backends with tags receive earlier where that helps (`ahead`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import RuntimeProgramError
from .actions import Action, action_reads, replay, splits_backward

KINDS = {"value": "F", "gradient": "B"}


@dataclass(frozen=True, slots=True)
class Transfer:
    """A row of TRANSFERS, by its number there: `source`'s action sends it, `target`'s needs it."""

    number: int
    name: str
    kind: str
    source: int
    target: int


@dataclass(slots=True)
class Slot:
    """An action, the (transfer, microbatch) to begin to receive before it, to need for it, and to send after it."""

    action: Action
    receive: list[tuple[Transfer, int]] = field(default_factory=list)
    need: list[Transfer] = field(default_factory=list)
    send: list[Transfer] = field(default_factory=list)


def plan_order(
    rows: Sequence[Sequence[Action]],
    groups: Sequence[Sequence[int]],
    transfers: Sequence[Transfer],
    microbatches: int,
    training: bool,
    ahead: bool = True,
) -> list[list[Slot]]:
    """The slots of every group. ahead: begin every receive at least one action before the one that needs it.

    Raises RuntimeProgramError for a table that leaves out an action, has one twice, or waits for itself.
    """
    for group, actions in enumerate(rows):
        _check_row(group, actions, groups[group], microbatches, training)
    slots = [[_slot(action, transfers) for action in row] for row in rows]
    starts, ends = _play(rows, groups, transfers)
    for group, row in enumerate(slots):
        arrivals = [
            (ends[Action(KINDS[t.kind], m, t.source)], t.number, t, m)
            for t in transfers
            if t.target in groups[group]
            for m in range(microbatches)
        ]
        needed_at = {(t.number, slot.action.microbatch): k for k, slot in enumerate(row) for t in slot.need}
        begun = [starts[slot.action] for slot in row]
        for time, number, transfer, microbatch in sorted(arrivals, key=lambda a: (a[0], a[1], a[3])):
            need, place = needed_at[number, microbatch], bisect_left(begun, time)
            row[min(place, max(need - 1, 0)) if ahead else place].receive.append((transfer, microbatch))
    return slots


def _slot(action: Action, transfers: Iterable[Transfer]) -> Slot:
    slot = Slot(action)
    for transfer in transfers:
        if KINDS[transfer.kind] == action.kind:
            if transfer.target == action.stage:
                slot.need.append(transfer)
            if transfer.source == action.stage:
                slot.send.append(transfer)
    return slot


def _check_row(group: int, row: Sequence[Action], stages: Sequence[int], microbatches: int, training: bool) -> None:
    seen: dict[Action, int] = {}
    for place, action in enumerate(row):
        where = f"the table's row of group {group}: {action}"
        if action in seen:
            raise RuntimeProgramError(f"{where} is there twice")
        if action.stage not in stages or action.microbatch >= microbatches:
            raise RuntimeProgramError(
                f"{where} is of none of its stages {list(stages)} and {microbatches} microbatches"
            )
        if not training and action.kind != "F":
            raise RuntimeProgramError(f"{where} in a program for inference")
        seen[action] = place
    split = {action.stage for action in row if action.kind == "W"}
    for stage in stages:
        kinds = ("F",) if not training else ("F", "B", "W") if stage in split else ("F", "B")
        for microbatch in range(microbatches):
            places = []
            for kind in kinds:
                action = Action(kind, microbatch, stage)
                if action not in seen:
                    raise RuntimeProgramError(f"the table's row of group {group} has no {action}")
                places.append(seen[action])
            if places != sorted(places):
                raise RuntimeProgramError(
                    f"the table's row of group {group} has {' '.join(f'{k}{microbatch}.{stage}' for k in kinds)} "
                    "in another order than this"
                )


def _play(
    rows: Sequence[Sequence[Action]], groups: Sequence[Sequence[int]], transfers: Sequence[Transfer]
) -> tuple[dict[Action, float], dict[Action, float]]:
    """Start and end of every action with rough durations, and messages that take no time."""
    duration = {"F": 1.0, "B": 1.0 if splits_backward(rows) else 2.0, "W": 1.0}
    feeds, returns = (
        {
            stage: [t.source for t in transfers if t.kind == kind and t.target == stage]
            for row in groups
            for stage in row
        }
        for kind in KINDS
    )
    reads, links = action_reads(groups, feeds, returns)
    played = replay(rows, reads)
    if played.stuck:
        raise RuntimeProgramError(
            "the action table waits for itself: "
            + "; ".join(f"group {one.row} cannot start {rows[one.row][one.place]}" for one in played.stuck)
        )
    seconds = [duration[action.kind] for action in played.item]
    ends = dict(zip(played.item, played.ends_s(seconds, [0.0] * len(links)), strict=True))
    return {action: end - duration[action.kind] for action, end in ends.items()}, ends
