"""The microbatches in flight and the bytes held under a table, per group. F takes; B releases, or B a part and W the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import neg, sub

from autopar.ir.actions import Action, StageGraph, Table


def held_after(
    row: Sequence[Action], after_F: Sequence[float], after_B: Sequence[float] | None = None
) -> Iterator[float]:
    """The bytes that a group holds after each action of its row, whose last kind is the last of every microbatch.

    after_F[s]: what stage s keeps of a microbatch between F and B. after_B[s]: what it keeps of it between B and W
    (None: the same). Without W in the row B releases all; forwards alone keep nothing.
    """
    change: dict[str, Sequence[float]]
    match row[-1].kind if row else "F":
        case "F":
            change = {"F": [0.0] * len(after_F)}
        case "B":
            change = {"F": after_F, "B": list(map(neg, after_F))}
        case _:
            later = after_F if after_B is None else after_B
            change = {"F": after_F, "B": list(map(sub, later, after_F)), "W": list(map(neg, later))}
    return accumulate([change[action[0]][action[2]] for action in row])


def in_flight(table: Table, graph: StageGraph) -> tuple[int, ...]:
    """Per group the most microbatches held at once, one per (microbatch, stage): F takes, B or, where it is, W releases."""
    return tuple(round(peak) for peak in peak_bytes(table, graph, [1.0] * graph.stages))


def peak_bytes(
    table: Table, graph: StageGraph, after_F: Sequence[float], after_B: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Per group the most bytes held at once between actions; arguments as in `held_after`."""
    return tuple(max(held_after(row, after_F, after_B), default=0.0) for row in table)
