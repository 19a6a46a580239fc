"""The microbatches in flight and the bytes held under a table, per group. F takes; B releases, or B a part and W the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.ir.actions import Action, StageGraph, Table, splits_backward


def held_after(
    row: Sequence[Action], after_F: Sequence[float], after_B: Sequence[float] | None = None
) -> Iterator[float]:
    """The bytes that a group holds after each action of its row.

    after_F[s]: what stage s keeps of a microbatch between F and B. after_B[s]: what it keeps of it between B and W
    (None: the same). Without W in the row B releases all; forwards alone keep nothing.
    """
    split = splits_backward([row])
    training = split or any(a.kind == "B" for a in row)
    later = after_F if after_B is None else after_B
    held = 0.0
    for action in row:
        s = action.stage
        if action.kind == "F" and training:
            held += after_F[s]
        elif action.kind == "B":
            held += (later[s] if split else 0.0) - after_F[s]
        elif action.kind == "W":
            held -= later[s]
        yield held


def in_flight(table: Table, graph: StageGraph) -> tuple[int, ...]:
    """Per group the most microbatches held at once, one per (microbatch, stage): F takes, B or, where it is, W releases."""
    return tuple(round(peak) for peak in peak_bytes(table, graph, [1.0] * graph.stages))


def peak_bytes(
    table: Table, graph: StageGraph, after_F: Sequence[float], after_B: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Per group the most bytes held at once between actions; arguments as in `held_after`."""
    return tuple(max(held_after(row, after_F, after_B), default=0.0) for row in table)
