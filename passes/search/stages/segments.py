"""Segments of a program that branches: runs of calls with the same calls beside them.

Two calls are *beside* each other where neither feeds nor follows the other (`autopar.ir.unordered`). Long segments are
halved, so that they may be pipelined too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autopar.ir.program import Program
from autopar.ir.unordered import branch, unordered
from autopar.passes.lower.cut import Range, cut_points
from autopar.passes.search.lower_bounds import template_work_s
from autopar.passes.search.task import Task

MOST_SEGMENTS = 10
HEAVY = 0.3
"""A segment with more than this share of the work is halved."""


def branches(task: Task) -> bool:
    """Whether enough work lies beside other work."""
    share = work_shares(task)
    return branch(share, calls_beside(task.program, share))


def work_shares(task: Task) -> list[float]:
    """The part of the program's arithmetic that every call has."""
    work_s = template_work_s(task)
    total = sum(work_s[c.template] for c in task.program.calls) or 1.0
    return [work_s[c.template] / total for c in task.program.calls]


def calls_beside(program: Program, share: Sequence[float]) -> list[frozenset[int]]:
    """Per call the calls with work that neither feed nor follow it. share: of every call, as in `work_shares`."""
    return unordered([{r.index for r in call.inputs if r.kind == "call"} for call in program.calls], share)


def segments(program: Program, share: Sequence[float]) -> tuple[Range, ...]:
    """Runs of calls with the same calls beside them: at most MOST_SEGMENTS, heavy ones in pieces."""
    sides = calls_beside(program, share)
    points = cut_points(program)
    starts = [i for i in range(1, len(sides)) if sides[i] != sides[i - 1] and i in points]
    marks = [0, *starts, len(sides)]
    while len(marks) - 1 > MOST_SEGMENTS:
        least = min(range(1, len(marks) - 1), key=lambda k: sum(share[marks[k - 1] : marks[k + 1]]))
        del marks[least]
    while len(marks) - 1 < MOST_SEGMENTS:
        halves = [
            (work, _middle(share, first, last, points))
            for first, last in pairwise(marks)
            if (work := sum(share[first:last])) > HEAVY and any(p in points for p in range(first + 1, last))
        ]
        if not halves:
            break
        marks = sorted([*marks, max(halves)[1]])
    return tuple(pairwise(marks))


def _middle(share: Sequence[float], first: int, last: int, points: frozenset[int]) -> int:
    """Where a stage may start so that a run of calls falls into two parts of about the same work."""
    inside = [p for p in range(first + 1, last) if p in points]
    return min(inside, key=lambda p: abs(sum(share[first:p]) - sum(share[p:last])))


def boundary_bytes(program: Program, ranges: Sequence[Range]) -> dict[tuple[int, int], float]:
    """Bytes of a microbatch from segment to segment, gradients back included."""
    home = {i: s for s, (first, last) in enumerate(ranges) for i in range(first, last)}
    nbytes: dict[tuple[int, int], float] = {}
    for ref, readers in program.readers.items():
        if ref.kind != "call":
            continue
        template = program.template_of(program.calls[ref.index])
        both_ways = template.tangents[ref.output] is not None and ref.index in program.backward_calls
        source = home[ref.index]
        for target in {home[i] for i, _ in readers} - {source}:
            sent = (2 if both_ways else 1) * program.type_of(ref).nbytes
            nbytes[source, target] = nbytes.get((source, target), 0.0) + sent
    return nbytes
