"""Conversions between specs as shortest paths over single-axis collectives.

From one spec to another lead small steps, each over one mesh axis and of a kind of `autopar/ir/steps.py`: all-gather the
minor-most axis of a dim, slice a dim by an axis, move an axis between dims (all-to-all), settle a partial (all-reduce, or
reduce-scatter into a dim), and the free step from replicated to partial (keep the value on one rank, zero elsewhere). Costs
come from the cost model; the cheapest path of every pair is found once per tensor type and kept with the mesh it is for
(Floyd–Warshall; nnScaler's rvd search does the same over device lists).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.steps import STEP_KINDS, Step
from autopar.passes.rules.alphabet import BIT, Alphabet, shards

CollectiveCost = Callable[[str, float, str], float]


def neighbours(spec: Spec, axes: tuple[str, ...]) -> Iterable[tuple[Step, Spec]]:
    """Every spec one step away. Dims that are sharded by several axes keep them in the order of the mesh's axes."""
    order, partial = {name: i for i, name in enumerate(axes)}, dict(spec.partial)
    minor = {sharding[-1]: dim for dim, sharding in enumerate(spec.dims) if sharding}
    for axis in axes:
        taken, owed = minor.get(axis), partial.get(axis)
        if taken is None and owed is None and axis in spec.axes:
            continue  # others of its dim are to go first
        dims = tuple(sharding[:-1] if dim == taken else sharding for dim, sharding in enumerate(spec.dims))
        rest = tuple(p for p in spec.partial if p[0] != axis)
        free = [i for i, s in enumerate(dims) if i != taken and not (s and order[s[-1]] > order[axis])]
        for kind, facts in STEP_KINDS.items():
            if facts.table.of_block or facts.table.of_runs or facts.table.of_owner:
                continue
            if (taken is not None) != (1 in facts.table.dims) or (owed is not None) != (facts.owes < 0):
                continue
            partial_after = tuple(sorted((*rest, (axis, "sum")))) if facts.owes > 0 else rest
            for to in free if -1 in facts.table.dims else [-1]:
                sharded = tuple((*s, axis) if i == to else s for i, s in enumerate(dims))
                dim, to_dim = (to, -1) if taken is None else (taken, to)
                yield Step(kind, axis, dim, to_dim, owed or "sum"), Spec(sharded, partial_after)


def step_cost(step: Step, held: float, size: int, cost: CollectiveCost, copy_s: float) -> float:
    """Seconds of one step over an axis of `size` ranks that hold so many bytes: its message, and what is copied for it."""
    facts = step.facts
    copied_s = facts.copied_s(held, size, step.dims, copy_s)
    return cost(step.kind, facts.full_bytes(held, size), step.axis) + copied_s if facts.sends else copied_s


@dataclass(frozen=True, eq=False)
class Steps:
    """Every step between the specs of an alphabet, from the spec of a number to that of another. kind: place in `kinds` of a
    step that costs the same from specs of as many shards."""

    source: np.ndarray
    target: np.ndarray
    kind: np.ndarray
    kinds: tuple[Step, ...]
    between: dict[tuple[int, int], Step]


@lru_cache(maxsize=1024)
def steps_between(letters: Alphabet, owed: int) -> Steps:
    """The steps of an alphabet between specs that owe none but these reductions (bits)."""
    between: dict[tuple[int, int], Step] = {}
    examples: dict[tuple[str, str, bool], Step] = {}
    for n in np.flatnonzero(letters.owed & ~owed == 0).tolist():
        for step, after in neighbours(letters.specs[n], letters.axes):
            if after in letters.number:
                between[n, letters.number[after]] = step
                examples.setdefault((step.kind, step.axis, bool(step.dim)), step)
    place = {key: i for i, key in enumerate(examples)}
    kind = np.array([place[step.kind, step.axis, bool(step.dim)] for step in between.values()], int)
    source, target = np.array(list(between), int).reshape(-1, 2).T
    return Steps(source, target, kind, tuple(examples.values()), between)


class Lattice:
    """All specs of tensors of one shape and size on one mesh that owe none but some reductions, the cost of every conversion
    and its path. places: by number in the alphabet (`autopar.passes.rules.alphabet`) the place of a spec here, or -1.
    """

    def __init__(
        self, shape: Sequence[int], nbytes: int, mesh: Mesh, cost: CollectiveCost, copy_s: float, ops: tuple[str, ...]
    ) -> None:
        owed = sum(BIT[op] for op in ops)
        on_mesh = shards(mesh.axes, len(shape))
        self.letters = letters = on_mesh.letters
        self._steps = steps = steps_between(letters, owed)
        self._numbers = np.flatnonzero(on_mesh.divide(shape) & (letters.owed & ~owed == 0))
        n = len(self._numbers)
        self.places = np.full(len(letters.specs), -1)
        self.places[self._numbers] = np.arange(n)
        self._between: dict[tuple[tuple[int, ...], tuple[int, ...], bytes, bytes], np.ndarray] = {}
        self.costs = np.full((n, n), np.inf)
        np.fill_diagonal(self.costs, 0.0)
        source, target = self.places[steps.source], self.places[steps.target]
        here = (source >= 0) & (target >= 0)
        base = mesh.size + 1
        alike, which = np.unique(steps.kind[here] * base + on_mesh.total[steps.source[here]], return_inverse=True)
        kinds = [(steps.kinds[int(key // base)], nbytes // (key % base)) for key in alike.tolist()]
        seconds = [step_cost(step, held, mesh.sizes[step.axis], cost, copy_s) for step, held in kinds]
        self.costs[source[here], target[here]] = np.array(seconds)[which]
        if mesh.uneven:
            self._leave_out_uneven(tuple(shape), mesh)
        self._next = np.tile(np.arange(n), (n, 1))
        self._shortest()

    def _leave_out_uneven(self, shape: tuple[int, ...], mesh: Mesh) -> None:
        """Blocks of unequal length are cut and gathered; other messages take equal ones."""
        specs, place = self.specs, self.places
        for (n, m), step in self._steps.between.items():
            a, b = place[n], place[m]
            if a < 0 or b < 0 or step.kind in ("shard", "all_gather", "all_reduce", "to_partial"):
                continue
            if any(mesh.is_uneven(shape[dim], s.dims[dim]) for dim in step.dims for s in (specs[a], specs[b])):
                self.costs[a, b] = np.inf

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        """The specs by place."""
        return tuple(self.letters.specs[n] for n in self._numbers.tolist())

    @cached_property
    def index(self) -> dict[Spec, int]:
        """The place of every spec."""
        return {spec: i for i, spec in enumerate(self.specs)}

    def _shortest(self) -> None:
        costs, following = self.costs, self._next
        through, better = np.empty_like(costs), np.empty(costs.shape, bool)
        for k in range(len(costs)):
            np.add(costs[:, k : k + 1], costs[k : k + 1, :], out=through)
            np.less(through, costs - 1e-15, out=better)
            if better.any():
                np.copyto(costs, through, where=better)
                np.copyto(following, following[:, k : k + 1], where=better)

    def cost(self, before: Spec, after: Spec) -> float:
        return float(self.costs[self.index[before], self.index[after]])

    def between(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Cost of the conversions from these specs to those, by their numbers, which are broadcast against each other;
        found once, so nobody may write into them. Raises KeyError with the first spec that is none of the lattice's."""
        key = before.shape, after.shape, before.tobytes(), after.tobytes()
        if key not in self._between:
            self._between[key] = self._costs_between(before, after)
            self._between[key].flags.writeable = False
        return self._between[key]

    def _costs_between(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        for numbers in (before, after):
            if np.minimum.reduce(self.places[numbers], axis=None, initial=0) < 0:
                raise KeyError(self.letters.specs[numbers[self.places[numbers] < 0][0]])
        return np.asarray(self.costs[self.places[before], self.places[after]])

    def path(self, before: Spec, after: Spec) -> list[tuple[Step, Spec]]:
        """(step, spec after it) from `before` to `after`."""
        i, j = self.index[before], self.index[after]
        steps: list[tuple[Step, Spec]] = []
        while i != j:
            k = int(self._next[i, j])
            steps.append((self._steps.between[int(self._numbers[i]), int(self._numbers[k])], self.specs[k]))
            i = k
        return steps
