"""Conversions between specs as shortest paths over single-axis collectives.

From one spec to another lead small steps, each over one mesh axis: all-gather the minor-most axis of a dim, slice a dim
by an axis, move an axis between dims (all-to-all), settle a partial (all-reduce, or reduce-scatter into a dim), and the
free step from replicated to partial (keep the value on one rank, zero elsewhere). Costs come from the cost model; the
cheapest path of every pair is found once per tensor type and kept with the mesh it is for (Floyd–Warshall; nnScaler's
rvd search does the same over device lists).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.steps import LOCAL_KINDS, Step
from autopar.passes.rules.alphabet import BIT, Alphabet, shards

CollectiveCost = Callable[[str, float, str], float]


def neighbours(spec: Spec, axes: tuple[str, ...]) -> Iterable[tuple[Step, Spec]]:
    """Every spec one step away. Dims that are sharded by several axes keep them in the order of the mesh's axes."""
    order, rank = {name: i for i, name in enumerate(axes)}, len(spec.dims)

    def appended(dim: int, axis: str) -> tuple[tuple[str, ...], ...] | None:
        before = spec.dims[dim]
        if before and order[before[-1]] > order[axis]:
            return None
        return (*spec.dims[:dim], (*before, axis), *spec.dims[dim + 1 :])

    for dim, sharding in enumerate(spec.dims):
        if not sharding:
            continue
        axis = sharding[-1]
        shorter = (*spec.dims[:dim], sharding[:-1], *spec.dims[dim + 1 :])
        yield Step("all_gather", axis, dim), Spec(shorter, spec.partial)
        for to in range(rank):
            moved = appended(to, axis) if to != dim else None
            if moved is not None:
                dims = tuple(sharding[:-1] if i == dim else d for i, d in enumerate(moved))
                yield Step("all_to_all", axis, dim, to), Spec(dims, spec.partial)
    for axis, op in spec.partial:
        rest = tuple(p for p in spec.partial if p[0] != axis)
        yield Step("all_reduce", axis, reduction=op), Spec(spec.dims, rest)
        for dim in range(rank):
            longer = appended(dim, axis)
            if longer is not None:
                yield Step("reduce_scatter", axis, dim, reduction=op), Spec(longer, rest)
    for axis in axes:
        if axis not in spec.axes:
            yield Step("to_partial", axis), Spec(spec.dims, tuple(sorted((*spec.partial, (axis, "sum")))))
            for dim in range(rank):
                longer = appended(dim, axis)
                if longer is not None:
                    yield Step("shard", axis, dim), Spec(longer, spec.partial)


def copied_s(step: Step, held: float, size: int, copy_s: float) -> float:
    """Seconds that a rank which holds so many bytes spends on a step over an axis of `size` ranks beside its message. Slices and
    masks cost a little, so that equal paths prefer fewer steps; so do gathers and scatters along any dim but the first, where
    chunks lie apart in memory and are copied."""
    if step.kind == "shard":
        return 0.1 * copy_s * held / size + 1e-9
    if step.kind == "to_partial":
        return copy_s * held + 1e-8
    if step.kind in ("all_gather", "reduce_scatter") and step.dim:
        return 0.1 * copy_s * (held * size if step.kind == "all_gather" else held)
    return 0.0


def step_cost(step: Step, held: float, size: int, cost: CollectiveCost, copy_s: float) -> float:
    """Seconds of one step over an axis of `size` ranks that hold so many bytes: its message, and what is copied for it."""
    copied = copied_s(step, held, size, copy_s)
    if step.kind in LOCAL_KINDS:
        return copied
    return cost(step.kind, held * size if step.kind == "all_gather" else held, step.axis) + copied


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
        self.costs = np.full((n, n), np.inf)
        np.fill_diagonal(self.costs, 0.0)
        source, target = self.places[steps.source], self.places[steps.target]
        here = (source >= 0) & (target >= 0)
        base = mesh.size + 1
        alike, which = np.unique(steps.kind[here] * base + on_mesh.total[steps.source[here]], return_inverse=True)
        kinds = [(steps.kinds[key // base], nbytes // (key % base)) for key in alike.tolist()]
        seconds = [step_cost(step, held, mesh.sizes[step.axis], cost, copy_s) for step, held in kinds]
        self.costs[source[here], target[here]] = np.array(seconds)[which]
        self._next = np.tile(np.arange(n), (n, 1))
        self._shortest()

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        """The specs by place."""
        return tuple(self.letters.specs[n] for n in self._numbers.tolist())

    @cached_property
    def index(self) -> dict[Spec, int]:
        """The place of every spec."""
        return {spec: i for i, spec in enumerate(self.specs)}

    def _shortest(self) -> None:
        for k in range(len(self.specs)):
            through = self.costs[:, k : k + 1] + self.costs[k : k + 1, :]
            better = through < self.costs - 1e-15
            if better.any():
                self.costs = np.where(better, through, self.costs)
                self._next = np.where(better, self._next[:, k : k + 1], self._next)

    def cost(self, before: Spec, after: Spec) -> float:
        return float(self.costs[self.index[before], self.index[after]])

    def between(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Cost of the conversions from these specs to those, by their numbers, which are broadcast against each other. Raises
        KeyError with the first spec that is none of the lattice's."""
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
