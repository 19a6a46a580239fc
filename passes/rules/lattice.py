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

_TIE_S = 1e-15
"""A path is shorter by more seconds than so many."""
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


@dataclass(frozen=True, eq=False)
class _Form:
    """All of a lattice that does not depend on bytes. numbers: of its specs; places: of the specs by number, or -1; source,
    target: places between which a step leads; alike: steps that cost the same, each with the shards of what it takes; which: of
    these every step is."""

    numbers: np.ndarray
    places: np.ndarray
    source: np.ndarray
    target: np.ndarray
    alike: tuple[tuple[Step, int | float], ...]
    which: np.ndarray


@lru_cache(maxsize=4096)
def _form(axes: tuple[tuple[str, int], ...], shape: tuple[int, ...], owed: int, steps: Steps) -> _Form:
    """The form of lattices of tensors of one shape that owe none but these reductions (bits)."""
    on_mesh = shards(axes, len(shape))
    letters = on_mesh.letters
    numbers = np.flatnonzero(on_mesh.divide(shape) & (letters.owed & ~owed == 0))
    places = np.full(len(letters.specs), -1)
    places[numbers] = np.arange(len(numbers))
    source, target = places[steps.source], places[steps.target]
    here = (source >= 0) & (target >= 0)
    base = on_mesh.mesh.size + 1
    alike, which = np.unique(steps.kind[here] * base + on_mesh.total[steps.source[here]], return_inverse=True)
    kinds = tuple((steps.kinds[int(key // base)], key % base) for key in alike.tolist())
    return _Form(numbers, places, source[here], target[here], kinds, which)


class Lattice:
    """All specs of tensors of one shape and size on one mesh that owe none but some reductions, the cost of every conversion
    and its path. places: by number in the alphabet (`autopar.passes.rules.alphabet`) the place of a spec here, or -1.
    """

    def __init__(
        self, shape: Sequence[int], nbytes: int, mesh: Mesh, cost: CollectiveCost, copy_s: float, ops: tuple[str, ...]
    ) -> None:
        owed = sum(BIT[op] for op in ops)
        self.letters = shards(mesh.axes, len(shape)).letters
        self._steps = steps_between(self.letters, owed)
        form = _form(mesh.axes, tuple(shape), owed, self._steps)
        self._numbers, self.places = form.numbers, form.places
        n = len(self._numbers)
        self._between: dict[tuple[tuple[int, ...], tuple[int, ...], bytes, bytes], np.ndarray] = {}
        self.costs = np.full((n, n), np.inf)
        np.fill_diagonal(self.costs, 0.0)
        sizes = mesh.sizes
        seconds = [step_cost(step, nbytes // parts, sizes[step.axis], cost, copy_s) for step, parts in form.alike]
        self.costs[form.source, form.target] = np.array(seconds)[form.which]
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
        to_beat = costs - _TIE_S
        for k in range(len(self._numbers)):
            through = costs[:, k : k + 1] + costs[k]
            better = through < to_beat
            if np.count_nonzero(better):
                np.copyto(costs, through, where=better)
                np.copyto(following, following[:, k : k + 1], where=better)
                to_beat = costs - _TIE_S

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
