"""The schedules that follow from a pipeline's shape alone, as pure functions from (StageGraph, microbatches) to a Table.

All keep one law: what a stage runs before the backward of microbatch b depends on its *depth*, the edges between it and
the end of the pipeline. In a chain of p stages the depth of stage i is p-1-i and the orders are those of GPipe, 1F1B
(PipeDream-flush, Megatron) and ZB-H1 and ZB-H2 (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024). In any other
DAG they stay free of deadlock, because with time(B b) = 2b + depth and time(F k) = 2(k - warm-up) + depth - 1 every
message points forward in time as long as a stage has more warm-up than the stages that it feeds.

No function here checks what it is given; `autopar.passes.schedule.build` does, and knows the names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autopar.ir.actions import Action, StageGraph, Table


def forward(graph: StageGraph, m: int) -> Table:
    """Forwards alone (inference): as many microbatches as there are groups walk through a group's stages together."""
    p = len(graph.groups)
    return tuple(
        tuple(Action("F", mb, s) for first in range(0, m, p) for s in group for mb in range(first, min(first + p, m)))
        for group in graph.groups
    )


def gpipe(graph: StageGraph, m: int) -> Table:
    """All forwards, then all backwards."""
    return tuple(
        tuple(Action("F", mb, s) for s in group for mb in range(m))
        + tuple(Action("B", mb, s) for s in reversed(group) for mb in range(m))
        for group in graph.groups
    )


def one_by_one(graph: StageGraph, m: int) -> Table:
    """One group: every microbatch forward and backward before the next."""
    (group,) = graph.groups
    row: list[Action] = []
    for mb in range(m):
        row += [Action("F", mb, s) for s in group]
        row += [Action("B", mb, s) for s in reversed(group)]
    return (tuple(row),)


def one_f_one_b(graph: StageGraph, m: int) -> Table:
    """1F1B: depth forwards, then pairs F, B, then the remaining backwards. Holds at most depth + 1 microbatches."""
    table = []
    for (stage,) in graph.groups:
        warmup = min(graph.depth[stage], m)
        row = [Action("F", mb, stage) for mb in range(warmup)]
        for b in range(m):
            if b + warmup < m:
                row.append(Action("F", b + warmup, stage))
            row.append(Action("B", b, stage))
        table.append(tuple(row))
    return tuple(table)


def zb_h1(graph: StageGraph, m: int) -> Table:
    """Zero bubble H1: 1F1B's order and memory, W of a stage as many microbatches after its B as it is below the top."""
    top = max(graph.depth)
    return _split(graph, m, [d + 1 for d in graph.depth], [top - d for d in graph.depth])


def zb_h2(graph: StageGraph, m: int) -> Table:
    """Zero bubble H2: 2 depth + 1 warm-up forwards, W delayed twice as long; at most 2p - 1 microbatches in flight."""
    top = max(graph.depth)
    return _split(graph, m, [2 * d + 1 for d in graph.depth], [2 * (top - d) for d in graph.depth])


def _split(graph: StageGraph, m: int, warmups: Sequence[int], delays: Sequence[int]) -> Table:
    """Warm-up forwards, then B, W of `delay` microbatches ago, F; the W left over at the end."""
    table = []
    for (s,) in graph.groups:
        warmup, delay = min(warmups[s], m), delays[s]
        row = [Action("F", f, s) for f in range(warmup)]
        for b in range(m):
            row.append(Action("B", b, s))
            if b >= delay:
                row.append(Action("W", b - delay, s))
            if b + warmup < m:
                row.append(Action("F", b + warmup, s))
        row += [Action("W", w, s) for w in range(max(0, m - delay), m)]
        table.append(tuple(row))
    return tuple(table)


def interleaved(graph: StageGraph, m: int) -> Table:
    """Interleaved 1F1B in Megatron's order: p microbatches at a time walk through the V stages of every group.

    Group i warms up with 2(p-1-i) + (V-1)p forwards. Where p does not divide m, the order is that of the next multiple
    of p without the microbatches that are not there: a part of an order without cycles has none.
    """
    return _interleaved(graph, m, 2, splits=False)


def interleaved_zb(graph: StageGraph, m: int) -> Table:
    """Interleaved zero bubble: the interleaved order with B and W apart, so that gradients go back sooner and group i warms up
    with p-1-i + (V-1)p forwards alone; W of group i follows its B i actions later. ZB-H1 with V stages per group (Qi et al.,
    2024), as `ScheduleInterleavedZeroBubble` of `torch.distributed.pipelining` has it."""
    return _interleaved(graph, m, 1, splits=True)


def _interleaved(graph: StageGraph, m: int, ahead: int, splits: bool) -> Table:
    """ahead: forwards that a group warms up with for every group after it. splits: B and W apart."""
    p, V = len(graph.groups), len(graph.groups[0])
    rounds = -(-m // p)
    total = rounds * p * V
    walk = [((k // (p * V)) * p + k % p, (k % (p * V)) // p) for k in range(total)]
    table = []
    for i, group in enumerate(graph.groups):
        warmup, back = min(ahead * (p - 1 - i) + (V - 1) * p, total), group[::-1]
        row = [Action("F", mb, group[c]) for mb, c in walk[:warmup]]
        for k, (mb, c) in enumerate(walk):
            if k + warmup < total:
                row.append(Action("F", walk[k + warmup][0], group[walk[k + warmup][1]]))
            row.append(Action("B", mb, back[c]))
            if splits and k >= i:
                row.append(Action("W", walk[k - i][0], back[walk[k - i][1]]))
        row += [Action("W", mb, back[c]) for mb, c in walk[max(total - i, 0) :] if splits]
        table.append(tuple(a for a in row if a.microbatch < m))
    return tuple(table)


class _Row:
    """The actions of a group, in order. count: by kind and stage how many microbatches have run."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.count: Counter[tuple[str, int]] = Counter()

    def run(self, kinds: str, stage: int) -> None:
        """Add an action of each kind, of the next microbatch that the stage has for it."""
        for kind in kinds:
            self.actions.append(Action(kind, self.count[kind, stage], stage))
            self.count[kind, stage] += 1


def zb_v(graph: StageGraph, m: int) -> Table:
    """ZB-V: stages g and 2p-1-g on group g, so that the group that starts a microbatch also ends it.

    Group g fills the way down, 2(p-g)-1 microbatches; then one up, one down; then F, B, W of the upper stage until its
    own lower stage hears back; then a round of F, B, W of both. As in Qi et al., Pipeline Parallelism with Controllable
    Memory (2024), figure of V-ZB; written for 2p-1 microbatches or more, of which those beyond m are left out.
    """
    p = len(graph.groups)
    total = max(m, 2 * p - 1)
    table = []
    for g, (low, high) in enumerate(graph.groups):
        row = _Row()
        run, count = row.run, row.count
        run("F" * (2 * (p - g) - 1), low)
        for _ in range(g):
            run("F", high)
            run("F", low)
        for _ in range(p - g):
            run("FBW", high)
        while count["F", high] < total:
            run("FBW" if count["F", low] < total else "BW", low)
            run("FBW", high)
        for _ in range(g):
            run("B", low)
            run("B", high)
        for _ in range(p - g):
            run("BW", low)
        run("W" * (total - count["W", high]), high)
        run("W" * (total - count["W", low]), low)
        table.append(tuple(a for a in row.actions if a.microbatch < m))
    return tuple(table)


def dualpipe_v(graph: StageGraph, m: int) -> Table:
    """DualPipeV: DeepSeek's DualPipe cut in half, stages g and 2p-1-g on group g, so that a forward of one way through the V
    stands beside a backward of the other and their messages can be hidden.

    Group g fills the V, then runs B, W, F of its upper stage until the lower one hears back, then pairs of F and backward, of
    the lower and the upper stage in turn, then the backwards that are left. W follows its B, but for the last backwards, whose W
    fill the bubble. As in `dualpipev.py` of deepseek-ai/DualPipe; written for 2p microbatches or more, of which those beyond m
    are left out.
    """
    p = len(graph.groups)
    total = max(m, 2 * p)
    table = []
    for g, (low, high) in enumerate(graph.groups):
        row = _Row()
        run = row.run
        run("F" * (2 * (p - 1 - g)), low)
        for _ in range(g + 1):
            run("F", low)
            run("F", high)
        for _ in range(p - 1 - g):
            run("BWF", high)
        for _ in range(total - 2 * p + g + 1):
            run("F", low)
            run("BW", high)
            run("F", high)
            run("BW", low)
        for _ in range(p - 1 - g):
            run("BW", high)
            run("F", high)
            run("BW", low)
        waiting: list[int] = []
        for k, s in enumerate(s for _ in range(g + 1) for s in (high, low)):
            apart = k > g  # the second half of them
            run("B" if apart else "BW", s)
            waiting += [s] if apart else []
        for _ in range(p - 1 - g):
            run("W", waiting.pop(0))
            run("B", low)
            waiting.append(low)
        for s in waiting:
            run("W", s)
        table.append(tuple(a for a in row.actions if a.microbatch < m))
    return tuple(table)
