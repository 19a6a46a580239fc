"""Pipeline schedules as pure functions from (stages p, microbatches m, chunks V) to action tables.

A table has one list of actions per stage, in the order the stage runs them: F forward, B backward (of the inputs, or of
everything when the table has no W), W backward of the weights. Times are not part of a table; `costmodel.simulate`
adds them. Rules as in Megatron (1F1B, interleaved) and Zero Bubble (Qi et al., ICLR 2024).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

from autopar.errors import PlanError


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of a stage: kind F, B or W, of one microbatch, for one of the stage's chunks."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


Table = tuple[tuple[Action, ...], ...]


def virtual_stage(stage: int, chunk: int, p: int, name: str = "") -> int:
    """Position of a stage's chunk along the model: round-robin, or V-shaped (down, then back up) for `zb-v`."""
    if name == "zb-v":
        return stage if chunk == 0 else 2 * p - 1 - stage
    return chunk * p + stage


def gpipe(p: int, m: int) -> Table:
    """All forwards, then all backwards."""
    forwards = tuple(Action("F", i) for i in range(m))
    return tuple(forwards + tuple(Action("B", i) for i in range(m)) for _ in range(p))


def one_f_one_b(p: int, m: int) -> Table:
    """1F1B: stage i runs min(p-1-i, m) forwards, then pairs F, B, then the remaining backwards."""
    table = []
    for i in range(p):
        warmup = min(p - 1 - i, m)
        acts = [Action("F", f) for f in range(warmup)]
        for b in range(m):
            if b + warmup < m:
                acts.append(Action("F", b + warmup))
            acts.append(Action("B", b))
        table.append(tuple(acts))
    return tuple(table)


def _split_backward(p: int, m: int, warmups: list[int], delays: list[int]) -> Table:
    """1F1B order with B and W apart; W of a stage runs `delay` microbatches after its B."""
    table = []
    for warmup, delay in zip(warmups, delays, strict=True):
        warmup = min(warmup, m)
        acts = [Action("F", f) for f in range(warmup)]
        w = 0
        for b in range(m):
            acts.append(Action("B", b))
            if b >= delay:
                acts.append(Action("W", w))
                w += 1
            if b + warmup < m:
                acts.append(Action("F", b + warmup))
        acts.extend(Action("W", i) for i in range(w, m))
        table.append(tuple(acts))
    return tuple(table)


def zb_h1(p: int, m: int) -> Table:
    """Zero bubble H1: 1F1B's memory, W of stage i delayed by i microbatches."""
    return _split_backward(p, m, [p - i for i in range(p)], list(range(p)))


def zb_h2(p: int, m: int) -> Table:
    """Zero bubble H2: 2(p-i)-1 warm-up forwards, W of stage i delayed by 2i microbatches; up to 2p-1 in flight."""
    return _split_backward(p, m, [2 * (p - i) - 1 for i in range(p)], [2 * i for i in range(p)])


def interleaved(p: int, m: int, V: int) -> Table:
    """Interleaved 1F1B in Megatron's order: groups of p microbatches walk through the V chunks of each stage.

    Warm-up 2(p-1-i) + (V-1)p. Raises PlanError when m is no multiple of p.
    """
    if V == 1:
        return one_f_one_b(p, m)
    if m % p:
        raise PlanError(
            f"interleaved 1F1B needs microbatches divisible by stages, got m={m}, p={p}; use m={-(-m // p) * p}"
        )

    def forward(k: int) -> Action:
        return Action("F", (k // (p * V)) * p + k % p, (k % (p * V)) // p)

    def backward(k: int) -> Action:
        return Action("B", (k // (p * V)) * p + k % p, V - 1 - (k % (p * V)) // p)

    table = []
    for i in range(p):
        warmup = min(2 * (p - 1 - i) + (V - 1) * p, m * V)
        acts = [forward(k) for k in range(warmup)]
        for k in range(m * V):
            if k + warmup < m * V:
                acts.append(forward(k + warmup))
            acts.append(backward(k))
        table.append(tuple(acts))
    return tuple(table)


def zero_bubble_greedy(
    p: int,
    m: int,
    tf: float,
    tb: float,
    tw: float,
    comm_s: float = 0.0,
    limit: float | None = None,
    name: str = "zb-2p",
) -> Table:
    """A zero-bubble table for given times: every stage runs what is ready, B before F before W, W filling the gaps.

    limit: activations a stage may hold, in microbatches of one whole stage (default 2p); the first forward takes the
    room of all chunks, so that a started microbatch can always come back, and W frees it. `name` "zb-v" gives each
    stage two chunks placed in a V, with times of one chunk.
    """
    V = 2 if name == "zb-v" else 1
    last = p * V - 1
    limit = (2.0 * p if limit is None else float(limit)) * V
    where = {virtual_stage(i, c, p, name): (i, c) for i in range(p) for c in range(V)}
    ready: list[dict[str, list[tuple[float, int, int]]]] = [{"F": [], "B": [], "W": []} for _ in range(p)]
    ready[0]["F"] = [(0.0, mb, 0) for mb in range(m)]
    held, free_at = [0] * p, [0.0] * p
    acts: list[list[Action]] = [[] for _ in range(p)]
    tick: Iterator[int] = count()
    queue = [(0.0, next(tick), i) for i in range(p)]
    left = 3 * m * V * p
    while left and queue:
        now, _, i = heapq.heappop(queue)
        if now < free_at[i]:
            continue
        choice = _choose(ready[i], now, held[i] + V <= limit)
        if choice is None:
            waits = [t for kind in "FBW" for t, _, _ in ready[i][kind] if t > now]
            if waits:
                heapq.heappush(queue, (min(waits), next(tick), i))
            continue
        kind, item = choice
        ready[i][kind].remove(item)
        _, mb, chunk = item
        v = virtual_stage(i, chunk, p, name)
        end = now + {"F": tf, "B": tb, "W": tw}[kind]
        free_at[i] = end
        acts[i].append(Action(kind, mb, chunk))
        left -= 1
        held[i] += {"F": V if chunk == 0 else 0, "B": 0, "W": -1}[kind]
        targets: list[tuple[int, str]] = []
        if kind == "F":
            targets = [(v + 1, "F")] if v < last else [(v, "B")]
        elif kind == "B":
            targets = [(v, "W")] + ([(v - 1, "B")] if v > 0 else [])
        for u, what in targets:
            j, c = where[u]
            at = end + (comm_s if j != i else 0.0)
            ready[j][what].append((at, mb, c))
            heapq.heappush(queue, (max(at, free_at[j]), next(tick), j))
        heapq.heappush(queue, (end, next(tick), i))
    if left:
        raise PlanError(
            f"a zero-bubble schedule needs room for at least {p} microbatches per stage, got limit={limit / V}"
        )
    return tuple(tuple(a) for a in acts)


def _choose(
    ready: dict[str, list[tuple[float, int, int]]], now: float, room: bool
) -> tuple[str, tuple[float, int, int]] | None:
    for kind in "BFW":
        items = [x for x in ready[kind] if x[0] <= now and (kind != "F" or x[2] > 0 or room)]
        if kind == "F":
            items.sort(key=lambda x: (-x[2], x[1]))
        if items:
            return kind, min(items, key=lambda x: (x[1], -x[2])) if kind != "F" else items[0]
    return None


SCHEDULES: dict[str, Callable[..., Table]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "interleaved": interleaved,
}


@lru_cache(maxsize=256)
def build(name: str, p: int, m: int, V: int = 1) -> Table:
    """The table of a named schedule. Raises PlanError for an unknown name or sizes that do not fit."""
    if p < 1 or m < 1 or V < 1:
        raise PlanError(f"a schedule needs p, m, V of at least 1, got p={p}, m={m}, V={V}")
    if name not in SCHEDULES:
        raise PlanError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}")
    return interleaved(p, m, V) if name == "interleaved" else SCHEDULES[name](p, m)
