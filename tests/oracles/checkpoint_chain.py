"""Checkpoints along a chain of blocks: where to keep a block's input, and which blocks keep everything.

Two dynamic programs over whole models, with the blocks as they are called one after the other.

`segments` is the reference text's recurrence (section 25.4.2), cost per segment in one unit (seconds, bytes at a price):

    dp[i] = min over j < i of dp[j] + memory(j+1..i) + recompute(j+1..i)

`checkpoints` is the heterogeneous chain under a byte budget (Beaumont et al. 2019, "rotor"): with C(s, t, m) the least
seconds to run the backward of blocks s..t when their input is held and m bytes are free beside it,

    C(s, t, m) = min( tape_s <= m:  f_s + C(s+1, t, m - tape_s) + b_s,
                      over k in s+1..t, input_k <= m:  f_s + ... + f_(k-1) + C(k, t, m - input_k) + C(s, k-1, m) )

The first keeps all that block s needs; the second keeps only the input of block k, and comes back to s..k-1 when the rest
is done. Optimal among schedules that hold a checkpoint until its backward is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

Segment = Callable[[int, int], float]


def segments(count: int, memory: Segment, recompute: Segment) -> tuple[float, tuple[int, ...]]:
    """(least cost, ends of the segments) of `count` blocks; memory(j, i) and recompute(j, i) of blocks j..i-1."""
    best: list[tuple[float, int]] = [(0.0, 0)]
    for i in range(1, count + 1):
        best.append(min((best[j][0] + memory(j, i) + recompute(j, i), j) for j in range(i)))
    ends, i = [], count
    while i:
        ends.append(i)
        i = best[i][1]
    return best[count][0], tuple(reversed(ends))


@dataclass(frozen=True)
class Block:
    """One block of a chain. input_bytes: of its input, kept as a checkpoint. tape_bytes: what it keeps for its backward, the
    input of the next block among it."""

    forward_s: float
    backward_s: float
    input_bytes: int
    tape_bytes: int


@dataclass(frozen=True)
class Keep:
    """Run block `first` keeping its tape, then the rest; or run first..at-1 keeping nothing, the rest, and these again."""

    first: int
    at: int | None
    rest: Keep | None
    again: Keep | None = None


def checkpoints(blocks: tuple[Block, ...], budget: int) -> tuple[float, Keep] | None:
    """(least seconds, what to keep) within `budget` bytes beside the chain's input; None where nothing fits."""

    @cache
    def best(s: int, t: int, room: int) -> tuple[float, Keep | None]:
        if s > t:
            return 0.0, None
        found: tuple[float, Keep | None] = (math.inf, None)
        block = blocks[s]
        if block.tape_bytes <= room:
            seconds, rest = best(s + 1, t, room - block.tape_bytes)
            found = (block.forward_s + seconds + block.backward_s, Keep(s, None, rest))
        ahead = 0.0
        for k in range(s + 1, t + 1):
            ahead += blocks[k - 1].forward_s
            if blocks[k].input_bytes > room:
                continue
            rest_s, rest = best(k, t, room - blocks[k].input_bytes)
            again_s, again = best(s, k - 1, room)
            if ahead + rest_s + again_s < found[0]:
                found = (ahead + rest_s + again_s, Keep(s, k, rest, again))
        return found

    seconds, keep = best(0, len(blocks) - 1, budget)
    return (seconds, keep) if keep is not None and math.isfinite(seconds) else None


def actions(keep: Keep | None, last: int) -> Iterator[tuple[str, int]]:
    """The actions of a decision, in order: ("tape", i) forward keeping all, ("pass", i) keeping nothing, ("check", i)
    keep the input of i, ("back", i) backward, ("drop", i) forget the input of i. last: the last block of the range."""
    if keep is None:
        return
    if keep.at is None:
        yield "tape", keep.first
        yield from actions(keep.rest, last)
        yield "back", keep.first
        return
    for i in range(keep.first, keep.at):
        yield "pass", i
    yield "check", keep.at
    yield from actions(keep.rest, last)
    yield "drop", keep.at
    yield from actions(keep.again, keep.at - 1)


def run_chain(blocks: tuple[Block, ...], keep: Keep) -> tuple[float, int]:
    """(seconds, most bytes beside the chain's input) of a decision, by playing it."""
    seconds, held, most = 0.0, 0, 0
    taped: set[int] = set()
    checked = {0}
    at = 0  # whose input the last forward left
    due = len(blocks) - 1
    for kind, i in actions(keep, len(blocks) - 1):
        block = blocks[i]
        if kind in ("tape", "pass"):
            if i != at and i not in checked and i - 1 not in taped:
                raise ValueError(f"block {i} runs without its input")
            at = i + 1
            seconds += block.forward_s
            if kind == "tape":
                taped.add(i)
                held += block.tape_bytes
        elif kind == "check":
            checked.add(i)
            held += block.input_bytes
        elif kind == "drop":
            checked.remove(i)
            held -= block.input_bytes
        else:
            if i != due or i not in taped:
                raise ValueError(f"backward of block {i} runs out of turn")
            due -= 1
            taped.remove(i)
            seconds += block.backward_s
            held -= block.tape_bytes
        most = max(most, held)
    if due >= 0:
        raise ValueError(f"backward of block {due} never runs")
    return seconds, most
