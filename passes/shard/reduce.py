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

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from autopar.passes.shard.factors.graph import FactorGraph

FEW = 20_000
"""Numbers up to which all pairs of states are compared in one array; where there are more, most are ruled out first."""
AT_ONCE = 200_000
"""Numbers in one array when pairs of states are compared."""
TOO_MANY = 60_000_000
"""Comparisons of numbers from which a variable's states are not compared."""
COLUMNS = 4
"""States of every neighbour at which pairs of states are compared before all others."""


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


def assigned(r: Reduced, chosen: Mapping[int, int]) -> float:
    """The cost of an assignment of positions to the variables that are left."""
    alone = sum(float(cost[chosen[v]]) for v, cost in r.cost.items())
    pairs = (float(m[chosen[u], chosen[v]]) for u, ms in r.near.items() for v, m in ms.items() if u < v)
    return alone + sum(pairs)


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


def shortened(r: Reduced, with_memory: bool = False, widest: int = 4_000_000) -> Reduced:
    """Eliminate variables with at most two neighbours, whatever their states."""
    _eliminate_all(r, with_memory, widest)
    return r


def _drop_dominated(r: Reduced, v: int, with_memory: bool) -> bool:
    """Drop the dominated states of a variable; of states that dominate each other one stays. Whether any went."""
    cost, near = r.cost[v], list(r.near[v].values())
    n = len(cost)
    if n <= 1 or any(n * n * m.shape[1] > TOO_MANY for m in near):
        return False
    s, t, gap = _rises(cost, near)
    if not len(s):
        return False
    most = np.zeros(n)
    np.maximum.at(most, s, gap)
    if with_memory:
        less = r.memory[v][s] >= r.memory[v][t]
        s, t = s[less], t[less]
    by: dict[int, list[int]] = {}
    for state, other in zip(s.tolist(), t.tolist(), strict=True):
        by.setdefault(state, []).append(other)
    out = np.zeros(n, bool)
    for state in sorted(by, key=lambda state: -most[state]):
        out[state] = not out[by[state]].all()
    if not out.any():
        return False
    keep_states(r, v, np.nonzero(~out)[0])
    return True


def _rises(cost: np.ndarray, near: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs (s, t) of states where t never costs more than s, and how much more s costs at least."""
    n = len(cost)
    if all(n * n * m.shape[1] <= FEW for m in near):
        gaps = cost[:, None] - cost[None, :]
        for m in near:
            gaps += np.minimum.reduce(m.T[:, :, None] - m.T[:, None, :], 0)
        np.fill_diagonal(gaps, -np.inf)
        s, t = np.nonzero(gaps >= -1e-15)
        return s, t, gaps[s, t]
    s, t = _candidates(cost, near)
    gap = cost[s] - cost[t]
    for m in near:
        gap += _least_rise(m, s, t)
    beaten = gap >= -1e-15
    return s[beaten], t[beaten], gap[beaten]


def _candidates(cost: np.ndarray, near: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (s, t) of states that t may dominate. min_x (m[s, x] - m[t, x]) is at most the difference of the two rows at any
    x, and that of their least, their largest and their mean numbers: where one of these sums rules a pair out, it goes.
    """
    bounds = np.repeat(cost[None], 3 + COLUMNS, 0)
    for m in near:
        bounds[0] += np.minimum.reduce(m, 1)
        bounds[1] += np.maximum.reduce(m, 1)
        bounds[2] += np.add.reduce(m, 1) / m.shape[1]
        bounds[3:] += m[:, np.arange(COLUMNS) * m.shape[1] // COLUMNS].T
    least = bounds - 1e-11 * np.abs(bounds).max()
    possible = (bounds[:, :, None] >= least[:, None, :]).all(0)
    np.fill_diagonal(possible, False)
    s, t = np.nonzero(possible)
    return s, t


def _least_rise(m: np.ndarray, s: np.ndarray, t: np.ndarray) -> np.ndarray:
    """min_x (m[s, x] - m[t, x]) of every pair."""
    step = max(1, AT_ONCE // m.shape[1])
    parts = [np.minimum.reduce(m[s[i : i + step]] - m[t[i : i + step]], 1) for i in range(0, len(s), step)]
    return np.concatenate(parts) if parts else np.zeros(0)


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
        step = max(1, AT_ONCE // mb.size)
        for i in range(0, len(product), step):
            np.minimum.reduce(left[i : i + step, :, None] + mb[None], 1, out=product[i : i + step])
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
