"""Bounds by message passing: prune states that no optimum can take, before the ILP sees them.

Tree-reweighted message passing (TRW-S, Kolmogorov 2006) solves the dual of the same LP relaxation approximately, in
numpy, at a cost linear in the number of pair states. From its messages follow

- a lower bound: spread each variable's cost evenly over its edges; the sum of the edges' minima bounds the optimum;
- an assignment (upper bound): fix variables in order, each at its cheapest given the fixed ones and the messages;
- for every state the least that choosing it adds to the bound. Where that exceeds upper - lower, the state goes.

Nothing is lost: what is pruned is proven not to be optimal. On meshes of three axes this leaves a problem some
hundred times smaller.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from autopar.passes.shard.reduce import Reduced, keep_states


@dataclass
class Bounds:
    """lower: proven bound. upper: cost of `chosen` (position per remaining variable). extra: least cost a state adds."""

    lower: float
    upper: float
    chosen: dict[int, int]
    extra: dict[int, np.ndarray]


def bound(r: Reduced, rounds: int, deadline: float) -> Bounds:
    """Message passing on what is left; prunes states of `r` in place as the bounds close."""
    best = Bounds(-np.inf, np.inf, {}, {})
    messages: dict[tuple[int, int], np.ndarray] = {
        (u, v): np.zeros(len(r.cost[v])) for u, ms in r.near.items() for v in ms
    }
    order = _order(r)
    sweeps = [_sweep(r, order), _sweep(r, order[::-1])]
    for k in range(rounds):
        for sweep in sweeps:
            for v, ahead, share in sweep:
                _send(r, messages, v, ahead, share)
        if k % 5 == 4 or k == rounds - 1:
            improved = _update(r, messages, order, best)
            closed = best.upper - best.lower <= 1e-7 * abs(best.upper)
            if closed or time.monotonic() > deadline or (k > 15 and not improved):
                break
    return best


def _order(r: Reduced) -> list[int]:
    """Breadth first from a variable at the rim, so that messages travel far in one sweep."""
    seen: dict[int, None] = {}
    for root in sorted(r.cost, key=lambda v: len(r.near[v])):
        queue = [root]
        while queue:
            v = queue.pop(0)
            if v not in seen:
                seen[v] = None
                queue.extend(u for u in sorted(r.near[v]) if u not in seen)
    return list(seen)


def _sweep(r: Reduced, order: list[int]) -> list[tuple[int, list[int], float]]:
    """In this order every variable with the neighbours that come after it, and the share of its total that each is sent."""
    rank = {v: i for i, v in enumerate(order)}
    sweep = []
    for v in order:
        ahead = [u for u in r.near[v] if rank[u] > rank[v]]
        if ahead:
            sweep.append((v, ahead, 1.0 / max(len(ahead), len(r.near[v]) - len(ahead))))
    return sweep


def _send(r: Reduced, messages: dict[tuple[int, int], np.ndarray], v: int, ahead: list[int], share: float) -> None:
    """Messages of one variable to those ahead of it. `minimum.reduce` is what `min` calls, without its wrapper."""
    near = r.near[v]
    total = r.cost[v].copy()
    for u in near:
        total += messages[u, v]
    total *= share
    for u in ahead:
        message = np.minimum.reduce(near[u] + (total - messages[u, v])[:, None], 0)
        message -= np.minimum.reduce(message)
        messages[v, u] = message


def _edges(r: Reduced, messages: dict[tuple[int, int], np.ndarray]) -> dict[tuple[int, int], np.ndarray]:
    """Pair costs with messages taken out and each variable's total spread over its edges."""
    spread = {}
    for v, near in r.near.items():
        if near:
            total = r.cost[v].copy()
            for u in near:
                total += messages[u, v]
            spread[v] = total / len(near)
    return {
        (u, v): m + (spread[u] - messages[v, u])[:, None] + (spread[v] - messages[u, v])[None, :]
        for u, near in r.near.items()
        for v, m in near.items()
        if u < v
    }


def _update(r: Reduced, messages: dict[tuple[int, int], np.ndarray], order: list[int], best: Bounds) -> bool:
    """New bounds from the messages, then pruning. True while something still improves."""
    alone = sum(float(r.cost[v].min()) for v in r.cost if not r.near[v])
    edges = _edges(r, messages)
    low = {e: float(m.min()) for e, m in edges.items()}
    lower = alone + sum(low.values())
    chosen = _decode(r, messages, order)
    upper = _value(r, chosen)
    improved = lower > best.lower + 1e-6 * abs(lower)
    best.lower = max(best.lower, lower)
    if upper < best.upper:
        best.upper, best.chosen = upper, chosen
    extra = {v: np.zeros(len(c)) for v, c in r.cost.items()}
    for (u, v), m in edges.items():
        extra[u] += m.min(1) - low[u, v]
        extra[v] += m.min(0) - low[u, v]
    slack = best.upper - lower + 1e-9 * abs(best.upper)
    best.extra = extra
    for v in list(r.cost):
        if not r.near[v]:
            continue
        kept = np.nonzero(extra[v] <= slack)[0]
        here = best.chosen[v]
        if here not in kept:
            kept = np.sort(np.append(kept, here))
        if len(kept) < len(r.cost[v]):
            best.chosen[v] = int(np.searchsorted(kept, here))
            keep_states(r, v, kept)
            extra[v] = extra[v][kept]
            for u in r.near[v]:
                messages[u, v] = messages[u, v][kept]
    return improved


def _decode(r: Reduced, messages: dict[tuple[int, int], np.ndarray], order: list[int]) -> dict[int, int]:
    chosen: dict[int, int] = {}
    for v in order:
        total = r.cost[v].copy()
        for u, m in r.near[v].items():
            total += m[:, chosen[u]] if u in chosen else messages[u, v]
        chosen[v] = int(np.argmin(total))
    changed = True
    while changed:
        changed = False
        for v in order:
            total = r.cost[v].copy()
            for u, m in r.near[v].items():
                total += m[:, chosen[u]]
            s = int(np.argmin(total))
            if total[s] < total[chosen[v]] - 1e-15:
                chosen[v], changed = s, True
    return chosen


def _value(r: Reduced, chosen: dict[int, int]) -> float:
    total = sum(float(c[chosen[v]]) for v, c in r.cost.items())
    return total + sum(float(m[chosen[u], chosen[v]]) for u, near in r.near.items() for v, m in near.items() if u < v)
