"""The strategies of a rule with the specs that each asks of its operands and gives its results, by number.

They depend on the labels of the rule and the names of the mesh axes. Sizes only say which strategies divide, so ops of one
kind share a table over all meshes, batches and layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from autopar.ir.mesh import Mesh
from autopar.ir.rule import Labels, Parts, Rule, Strategy, factors_of
from autopar.ir.spec import Spec
from autopar.passes.rules.alphabet import alphabet, distinct, shared_axes

Axes = tuple[tuple[str, int], ...]


class BlockOfWork(NamedTuple):
    """The part of an op that a rank has under a strategy: into how many parts every factor is cut, and over how many ranks the
    work is divided (`Rule.parts`, `Rule.work_parts`)."""

    parts: Parts
    work: Any
    strategy: Strategy


@dataclass(frozen=True, eq=False)
class StrategyTable:
    """Strategies of a rule, whatever they divide, but those that owe two kinds of reductions at once.

    operands, results: per strategy the number of the spec (`autopar.passes.rules.alphabet`), None where there is no tensor.
    sharded[s, f, axis]: whether strategy s shards a factor by an axis of more than one rank. single[s, f]: whether it asks for
    single indices of a factor on every rank.
    """

    factors: tuple[str, ...]
    strategies: tuple[Strategy, ...]
    operands: tuple[np.ndarray | None, ...]
    results: tuple[np.ndarray | None, ...]
    sharded: np.ndarray
    single: np.ndarray
    _parts: dict[Axes, np.ndarray] = field(default_factory=dict)
    _blocks: dict[Axes, tuple[list[BlockOfWork], np.ndarray]] = field(default_factory=dict)
    _some: dict[bytes, StrategyTable] = field(default_factory=dict)

    def parts(self, mesh: Mesh) -> np.ndarray:
        """Per strategy and factor into how many parts it is cut on a mesh."""
        if mesh.axes not in self._parts:
            sizes = [int(size) for _, size in mesh.axes if size > 1]
            self._parts[mesh.axes] = np.asarray(np.where(self.sharded, sizes, 1).prod(2, dtype=int))
        return self._parts[mesh.axes]

    def blocks(self, mesh: Mesh) -> tuple[list[BlockOfWork], np.ndarray]:
        """The blocks of strategies no two of which cut all factors, and divide the work, alike on an even mesh; and per strategy
        which of these it has."""
        if mesh.axes not in self._blocks:
            first: dict[tuple[int, ...], int] = {}
            which, blocks = list[int](), list[BlockOfWork]()
            for strategy, parts in zip(self.strategies, self.parts(mesh).tolist(), strict=True):
                work = mesh.product(a for a, c in zip(mesh.names, strategy, strict=True) if factors_of(c))
                which.append(first.setdefault((*parts, work), len(first)))
                if len(first) > len(blocks):
                    blocks.append(BlockOfWork(dict(zip(self.factors, parts, strict=True)), work, strategy))
            self._blocks[mesh.axes] = blocks, np.array(which, int)
        return self._blocks[mesh.axes]

    def only(self, kept: np.ndarray) -> StrategyTable:
        """The strategies at these places; the same object for the same ones."""
        if len(kept) == len(self.strategies) and (kept[1:] > kept[:-1]).all():
            return self
        key = kept.tobytes()
        if key not in self._some:
            operands, results = (
                tuple(None if n is None else n[kept] for n in numbers) for numbers in (self.operands, self.results)
            )
            strategies = tuple(self.strategies[i] for i in kept.tolist())
            arrays = self.sharded[kept], self.single[kept]
            self._some[key] = StrategyTable(self.factors, strategies, operands, results, *arrays)
        return self._some[key]

    @cached_property
    def index(self) -> dict[Strategy, int]:
        """The place of every strategy."""
        return {strategy: i for i, strategy in enumerate(self.strategies)}

    @cached_property
    def wanted(self) -> tuple[np.ndarray | None, ...]:
        """The specs of every operand, each once, in order."""
        return tuple(None if n is None else distinct(n) for n in self.operands)

    @cached_property
    def made(self) -> tuple[np.ndarray | None, ...]:
        """The specs of every result, each once, in order."""
        return tuple(None if n is None else distinct(n) for n in self.results)


def strategy_table(rule: Rule, mesh: Mesh, choices: Collection[str] | None = None) -> StrategyTable:
    """The table of a rule on meshes with these axes. choices: what an axis may take (None: whatever the rule allows)."""
    kept = None if choices is None else tuple(choice for choice in rule.form.choices() if choice in choices)
    return _table(rule.form, mesh.names, shared_axes(mesh), kept)


@lru_cache(maxsize=16384)
def _table(form: Rule, names: tuple[str, ...], axes: tuple[str, ...], choices: tuple[str, ...] | None) -> StrategyTable:
    mesh = Mesh(tuple((name, 2) for name in names))
    choices = form.choices() if choices is None else choices
    per_axis = [choices if name in axes else ("",) for name in names]
    strategies = [s for s in itertools.product(*per_axis) if form.agrees(s)]

    def numbers(labels: Labels | None, specs: Iterable[Spec | None]) -> np.ndarray | None:
        return None if labels is None else np.array([alphabet(axes, len(labels)).number.get(s, -1) for s in specs if s])

    sides = (form.operands, form.operand_spec), (form.results, form.result_spec)
    of_all = [
        numbers(labels, (of(i, s, mesh) for s in strategies)) for every, of in sides for i, labels in enumerate(every)
    ]
    kept = np.logical_and.reduce([np.ones(len(strategies), bool), *(n >= 0 for n in of_all if n is not None)])
    specs = tuple(None if n is None else n[kept] for n in of_all)
    strategies = [s for s, keep in zip(strategies, kept, strict=True) if keep]
    shared = [names.index(axis) for axis in axes]
    sharded = [[[factor in factors_of(s[a]) for a in shared] for factor in form.factors] for s in strategies]
    needed = [form.needed(f for choice in s for f in factors_of(choice)) for s in strategies]
    single = np.array([[factor in n for factor in form.factors] for n in needed], bool).reshape(
        len(strategies), len(form.factors)
    )
    shape = (len(strategies), len(form.factors), len(axes))
    first = len(form.operands)
    places = np.array(sharded, bool).reshape(shape)
    return StrategyTable(tuple(form.factors), tuple(strategies), specs[:first], specs[first:], places, single)
