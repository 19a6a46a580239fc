"""A pairwise factor graph: variables with finite states, costs on variables and on pairs of variables.

    minimise  sum_v cost_v[s_v] + sum_(u,v) pair_uv[s_u, s_v]   subject to  sum_v memory_v[s_v] <= budget

Solvers see only arrays; what a state means is the problem builder's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Key = tuple[str, ...]


@dataclass
class FactorGraph:
    """states[v]: meaning of each state; cost[v], memory[v]: per state; pairs[(u, v)] with u < v: matrix u × v."""

    keys: list[Key] = field(default_factory=list)
    states: list[tuple[Any, ...]] = field(default_factory=list)
    cost: list[np.ndarray] = field(default_factory=list)
    memory: list[np.ndarray] = field(default_factory=list)
    pairs: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    index: dict[Key, int] = field(default_factory=dict)

    def add(self, key: Key, states: tuple[Any, ...], cost: np.ndarray, memory: np.ndarray) -> int:
        """Add a variable; returns its number."""
        self.index[key] = len(self.keys)
        self.keys.append(key)
        self.states.append(states)
        self.cost.append(cost.astype(float))
        self.memory.append(memory.astype(float))
        return len(self.keys) - 1

    def connect(self, u: int, v: int, matrix: np.ndarray) -> None:
        """Add a pair cost (u × v); a pair of a variable with itself goes to its own cost."""
        if u == v:
            self.cost[u] = self.cost[u] + np.diagonal(matrix)
            return
        if u > v:
            u, v, matrix = v, u, matrix.T
        pair = self.pairs.get((u, v))
        self.pairs[u, v] = matrix if pair is None else pair + matrix

    def only(self, kept: Sequence[np.ndarray]) -> FactorGraph:
        """The graph with these states of every variable, in this order. kept: their places, by variable."""
        states = [tuple(map(of.__getitem__, k.tolist())) for of, k in zip(self.states, kept, strict=True)]
        cost, memory = ([of[k] for of, k in zip(every, kept, strict=True)] for every in (self.cost, self.memory))
        pairs = {(u, v): m[kept[u][:, None], kept[v]] for (u, v), m in self.pairs.items()}
        return FactorGraph(self.keys, states, cost, memory, pairs, self.index)

    def value(self, choice: list[int]) -> float:
        """Objective of an assignment."""
        total = sum(float(c[s]) for c, s in zip(self.cost, choice, strict=True))
        return total + sum(float(m[choice[u], choice[v]]) for (u, v), m in self.pairs.items())

    def memory_of(self, choice: list[int]) -> float:
        return sum(float(m[s]) for m, s in zip(self.memory, choice, strict=True))

    @property
    def size(self) -> dict[str, int]:
        """Variables (nodes) and binary variables of the plain ILP (states plus pair states)."""
        return {
            "nodes": len(self.keys),
            "variables": sum(map(len, self.states)) + sum(m.size for m in self.pairs.values()),
        }
