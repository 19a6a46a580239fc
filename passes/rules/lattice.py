"""Conversions between specs as shortest paths over single-axis collectives.

From one spec to another lead small steps, each over one mesh axis: all-gather the minor-most axis of a dim, slice a dim
by an axis, move an axis between dims (all-to-all), settle a partial (all-reduce, or reduce-scatter into a dim), and the
free step from replicated to partial (keep the value on one rank, zero elsewhere). Costs come from the cost model; the
cheapest path of every pair is found once per tensor type and kept with the mesh it is for (Floyd–Warshall; nnScaler's
rvd search does the same over device lists).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.steps import Step
from autopar.ir.types import TensorType

CollectiveCost = Callable[[str, float, str], float]
Specs = tuple[Spec, ...]


def neighbours(spec: Spec, shape: tuple[int, ...], mesh: Mesh, ordered: bool = True) -> Iterable[tuple[Step, Spec]]:
    """Every spec one step away. With `ordered`, dims sharded by several axes keep them in mesh order."""
    order = {name: i for i, name in enumerate(mesh.names)}

    def appended(dim: int, axis: str) -> tuple[tuple[str, ...], ...] | None:
        axes = spec.dims[dim]
        if ordered and axes and order[axes[-1]] > order[axis]:
            return None
        if shape[dim] % (mesh.product(axes) * mesh.sizes[axis]):
            return None
        return (*spec.dims[:dim], (*axes, axis), *spec.dims[dim + 1 :])

    for dim, axes in enumerate(spec.dims):
        if not axes:
            continue
        axis = axes[-1]
        shorter = (*spec.dims[:dim], axes[:-1], *spec.dims[dim + 1 :])
        yield Step("all_gather", axis, dim), Spec(shorter, spec.partial)
        for to in range(len(shape)):
            if to != dim:
                moved = appended(to, axis)
                if moved is not None:
                    yield (
                        Step("all_to_all", axis, dim, to),
                        Spec(tuple(axes[:-1] if i == dim else d for i, d in enumerate(moved)), spec.partial),
                    )
    for axis, op in spec.partial:
        rest = tuple(p for p in spec.partial if p[0] != axis)
        yield Step("all_reduce", axis, reduction=op), Spec(spec.dims, rest)
        for dim in range(len(shape)):
            longer = appended(dim, axis)
            if longer is not None:
                yield Step("reduce_scatter", axis, dim, reduction=op), Spec(longer, rest)
    for axis, size in mesh.axes:
        if size > 1 and axis not in spec.axes:
            yield Step("to_partial", axis), Spec(spec.dims, tuple(sorted((*spec.partial, (axis, "sum")))))
            for dim in range(len(shape)):
                longer = appended(dim, axis)
                if longer is not None:
                    yield Step("slice", axis, dim), Spec(longer, spec.partial)


def step_cost(step: Step, before: Spec, type_: TensorType, mesh: Mesh, cost: CollectiveCost, copy_s: float) -> float:
    """Seconds of one step. Slices and masks cost a little, so that equal paths prefer fewer steps; so do gathers and scatters
    along any dim but the first, where chunks lie apart in memory and are copied."""
    held = before.local_bytes(type_, mesh)
    size = mesh.sizes[step.axis]
    if step.kind == "slice":
        return copy_s * held / size * 0.1 + 1e-9
    if step.kind == "to_partial":
        return copy_s * held + 1e-8
    if step.kind == "all_gather":
        return cost("all_gather", held * size, step.axis) + (0.1 * copy_s * held * size if step.dim else 0.0)
    apart = step.kind == "reduce_scatter" and step.dim
    return cost(step.kind, held, step.axis) + (0.1 * copy_s * held if apart else 0.0)


@dataclass(frozen=True)
class Steps:
    """The specs that tensors may have, and every step between them as (from, to, step, kind): steps of one kind cost the
    same. kinds: per kind one of its steps and the spec before it."""

    specs: tuple[Spec, ...]
    index: dict[Spec, int]
    steps: tuple[tuple[int, int, Step, int], ...]
    kinds: tuple[tuple[Step, Spec], ...]


@lru_cache(maxsize=4096)
def steps_between(parts: tuple[int, ...], mesh: Mesh, ops: tuple[str, ...]) -> Steps:
    """Specs and steps of all tensors alike. parts: per dim the largest divisor of the mesh's size that divides the dim."""
    specs = tuple(_canonical(parts, mesh, ops))
    index = {spec: i for i, spec in enumerate(specs)}
    steps: list[tuple[int, int, Step, int]] = []
    kinds: dict[tuple[str, str, bool, int], int] = {}
    examples: list[tuple[Step, Spec]] = []
    for i, spec in enumerate(specs):
        split = math.prod(mesh.product(axes) for axes in spec.dims)
        for step, after in neighbours(spec, parts, mesh):
            if after in index:
                kind = kinds.setdefault((step.kind, step.axis, bool(step.dim), split), len(kinds))
                if kind == len(examples):
                    examples.append((step, spec))
                steps.append((i, index[after], step, kind))
    return Steps(specs, index, tuple(steps), tuple(examples))


class Lattice:
    """All specs of one tensor type on one mesh, the cost of every conversion and its path."""

    def __init__(
        self, type_: TensorType, mesh: Mesh, cost: CollectiveCost, copy_s: float, ops: tuple[str, ...]
    ) -> None:
        self.type, self.mesh = type_, mesh
        possible = steps_between(tuple(math.gcd(n, mesh.size) for n in type_.shape), mesh, ops)
        self.specs, self.index = possible.specs, possible.index
        n = len(self.specs)
        self.costs = np.full((n, n), np.inf)
        np.fill_diagonal(self.costs, 0.0)
        self._next = np.tile(np.arange(n), (n, 1))
        self._steps: dict[tuple[int, int], Step] = {}
        self._between: dict[tuple[Specs, Specs], np.ndarray] = {}
        seconds = [step_cost(step, before, type_, mesh, cost, copy_s) for step, before in possible.kinds]
        for i, j, step, kind in possible.steps:
            if seconds[kind] < self.costs[i, j]:
                self.costs[i, j] = seconds[kind]
                self._steps[i, j] = step
        self._shortest()

    def _shortest(self) -> None:
        for k in range(len(self.specs)):
            through = self.costs[:, k : k + 1] + self.costs[k : k + 1, :]
            better = through < self.costs - 1e-15
            if better.any():
                self.costs = np.where(better, through, self.costs)
                self._next = np.where(better, self._next[:, k : k + 1], self._next)

    def cost(self, before: Spec, after: Spec) -> float:
        return float(self.costs[self.index[before], self.index[after]])

    def between(self, before: Specs, after: Specs) -> np.ndarray:
        """Cost of every conversion from one of these specs to one of those. Raises KeyError for a spec that is none of the
        lattice's."""
        key = (before, after)
        if key not in self._between:
            rows, columns = [self.index[s] for s in before], [self.index[s] for s in after]
            self._between[key] = self.costs[rows][:, columns]
        return self._between[key]

    def path(self, before: Spec, after: Spec) -> list[tuple[Step, Spec]]:
        """(step, spec after it) from `before` to `after`."""
        i, j = self.index[before], self.index[after]
        steps: list[tuple[Step, Spec]] = []
        while i != j:
            k = int(self._next[i, j])
            steps.append((self._steps[i, k], self.specs[k]))
            i = k
        return steps


def _canonical(shape: tuple[int, ...], mesh: Mesh, ops: tuple[str, ...]) -> list[Spec]:
    """Every spec with axes in mesh order inside each dim, partial by the reductions `ops`."""
    choices: list[list[object]] = []
    for _, size in mesh.axes:
        if size == 1:
            choices.append([None])
        else:
            choices.append([None, *(d for d, n in enumerate(shape) if n % size == 0), *ops])
    specs = []
    for picked in itertools.product(*choices):
        dims: list[tuple[str, ...]] = [()] * len(shape)
        partial = []
        for (axis, _), choice in zip(mesh.axes, picked, strict=True):
            if isinstance(choice, int):
                dims[choice] = (*dims[choice], axis)
            elif isinstance(choice, str):
                partial.append((axis, choice))
        spec = Spec(tuple(dims), tuple(sorted(partial)))
        if len({op for _, op in partial}) <= 1 and spec.divides(shape, mesh):
            specs.append(spec)
    return specs
