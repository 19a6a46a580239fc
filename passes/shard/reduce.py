"""Exact reduction of a factor graph, before any solver.

Two rewritings keep the optimum:

- *dominated states* (dead-end elimination, Goldstein 1994): state s of v goes when another state t costs no more
  whatever the neighbours do: cost[s] - cost[t] + sum_u min_x (pair[s, x] - pair[t, x]) >= 0 (and, under a memory row,
  needs no more memory);
- *elimination*: a variable with at most two neighbours is replaced by a pair cost between them, the min-plus product
  m[a, b] = min_s (cost[s] + pair_a[a, s] + pair_b[s, b]). Chains of views and pointwise ops vanish this way. Under a
  memory row only variables whose memory does not depend on the state may go.

`restore` replays the eliminations backwards and returns a full assignment.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autopar.passes.shard.graph import FactorGraph

AT_ONCE = 200_000
"""Numbers up to which all pairs of states are compared in one array."""


@dataclass
class Reduced:
    """A working copy: arrays of what is left, and the log that restores the rest."""

    cost: dict[int, np.ndarray]
    memory: dict[int, np.ndarray]
    alive: dict[int, np.ndarray]
    near: dict[int, dict[int, np.ndarray]]
    log: list[tuple[int, np.ndarray, list[tuple[int, np.ndarray, np.ndarray]], np.ndarray]] = field(
        default_factory=list
    )
    constant_memory: float = 0.0

    @property
    def size(self) -> dict[str, int]:
        pairs = sum(m.size for u, ms in self.near.items() for v, m in ms.items() if u < v)
        return {"nodes": len(self.cost), "variables": sum(len(c) for c in self.cost.values()) + pairs}


def copy_of(r: Reduced) -> Reduced:
    """An independent working copy (arrays are shared, they are never written in place)."""
    near = {v: dict(ms) for v, ms in r.near.items()}
    return Reduced(dict(r.cost), dict(r.memory), dict(r.alive), near, list(r.log), r.constant_memory)


def start(graph: FactorGraph, price: float = 0.0) -> Reduced:
    """A working copy whose costs include `price` · memory."""
    near: dict[int, dict[int, np.ndarray]] = {v: {} for v in range(len(graph.keys))}
    for (u, v), m in graph.pairs.items():
        near[u][v], near[v][u] = m, m.T
    cost = {v: c + price * graph.memory[v] for v, c in enumerate(graph.cost)}
    memory = {v: m.copy() for v, m in enumerate(graph.memory)}
    alive = {v: np.arange(len(c)) for v, c in cost.items()}
    return Reduced(cost, memory, alive, near)


def reduce_graph(r: Reduced, with_memory: bool = False, widest: int = 4_000_000) -> Reduced:
    """Drop dominated states and eliminate small-degree variables until nothing changes."""
    dirty = set(r.cost)
    while True:
        queue, dirty = dirty, set()
        for v in sorted(queue):
            if v in r.cost and _drop_dominated(r, v, with_memory):
                dirty |= set(r.near[v])
        gone = _eliminate_all(r, with_memory, widest)
        dirty |= gone
        dirty &= set(r.cost)
        if not dirty:
            return r


def _drop_dominated(r: Reduced, v: int, with_memory: bool) -> bool:
    n = len(r.cost[v])
    if n <= 1:
        return False
    kept = np.arange(n)
    gap = r.cost[v][:, None] - r.cost[v][None, :]
    for m in r.near[v].values():
        if n * n * m.shape[1] > 60_000_000:
            return False
        if n * n * m.shape[1] <= AT_ONCE:
            gap += np.minimum.reduce(m[:, None, :] - m[None, :, :], 2)
            continue
        for s in range(n):
            gap[s] += np.minimum.reduce(m[s][None, :] - m, 1)
    beaten = gap >= -1e-15
    if with_memory:
        beaten &= r.memory[v][:, None] >= r.memory[v][None, :]
    np.fill_diagonal(beaten, False)
    out = np.zeros(n, bool)
    for s in np.argsort(-gap.max(1), kind="stable"):
        if (beaten[s] & ~out).any():
            out[s] = True
    if not out.any():
        return False
    kept = kept[~out]
    keep_states(r, v, kept)
    return True


def keep_states(r: Reduced, v: int, kept: np.ndarray) -> None:
    """Keep only these states (positions) of a variable."""
    r.cost[v], r.memory[v], r.alive[v] = r.cost[v][kept], r.memory[v][kept], r.alive[v][kept]
    for u, m in r.near[v].items():
        r.near[v][u] = m[kept]
        r.near[u][v] = r.near[v][u].T


def _eliminate_all(r: Reduced, with_memory: bool, widest: int) -> set[int]:
    touched: set[int] = set()
    changed = True
    while changed:
        changed = False
        for v in sorted(r.cost, key=lambda v: (len(r.near[v]), len(r.cost[v]))):
            if v not in r.cost or len(r.near[v]) > 2:
                continue
            if with_memory and len(set(np.round(r.memory[v], 6))) > 1:
                continue
            sizes = [len(r.cost[u]) for u in r.near[v]]
            if len(sizes) == 2 and len(r.cost[v]) * sizes[0] * sizes[1] > widest:
                continue
            touched |= set(r.near[v])
            _eliminate(r, v)
            changed = True
    return touched


def _eliminate(r: Reduced, v: int) -> None:
    near = list(r.near[v].items())
    r.log.append((v, r.cost[v], [(u, m, r.alive[u]) for u, m in near], r.alive[v]))
    r.constant_memory += float(r.memory[v][0]) if len(r.memory[v]) else 0.0
    if len(near) == 1:
        ((a, m),) = near
        r.cost[a] = r.cost[a] + (m + r.cost[v][:, None]).min(0)
    elif len(near) == 2:
        (a, ma), (b, mb) = near
        left = ma.T + r.cost[v][None, :]
        product = np.empty((left.shape[0], mb.shape[1]))
        for i in range(left.shape[0]):
            product[i] = (left[i][:, None] + mb).min(0)
        pair = r.near[a].get(b)
        r.near[a][b] = product if pair is None else pair + product
        r.near[b][a] = r.near[a][b].T
    else:
        best = int(np.argmin(r.cost[v]))
        r.log[-1] = (v, r.cost[v][best : best + 1], [], r.alive[v][best : best + 1])
    for u, _ in near:
        del r.near[u][v]
    del r.near[v], r.cost[v], r.memory[v], r.alive[v]


def restore(r: Reduced, chosen: dict[int, int]) -> list[int]:
    """Full assignment (original state numbers) from positions chosen for the variables that are left."""
    original = {v: int(r.alive[v][s]) for v, s in chosen.items()}
    for v, cost, near, states in reversed(r.log):
        total = cost.copy()
        for u, m, alive in near:
            total = total + m[:, int(np.searchsorted(alive, original[u]))]
        original[v] = int(states[int(np.argmin(total))])
    return [original[v] for v in range(len(original))]
