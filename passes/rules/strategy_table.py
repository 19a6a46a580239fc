"""The strategies of a rule with the specs that each asks of its operands and gives its results, by number.

They depend on the labels of the rule and the names of the mesh axes. Sizes only say which strategies divide, so ops of one
kind share a table over all meshes, batches and layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autopar.ir.mesh import Mesh
from autopar.ir.rule import Labels, Rule, Strategy, factors_of
from autopar.ir.spec import Spec
from autopar.passes.rules.alphabet import alphabet, shared_axes


@dataclass(frozen=True, eq=False)
class StrategyTable:
    """Every strategy of a rule, whatever it divides, but those that owe two kinds of reductions at once.

    operands, results: per strategy the number of the spec (`autopar.passes.rules.alphabet`), None where there is no tensor.
    sharded[s, f, axis]: whether strategy s shards a factor by an axis of more than one rank. single[s, f]: whether it asks for
    single indices of a factor on every rank.
    """

    strategies: tuple[Strategy, ...]
    operands: tuple[np.ndarray | None, ...]
    results: tuple[np.ndarray | None, ...]
    sharded: np.ndarray
    single: np.ndarray

    def parts(self, mesh: Mesh) -> np.ndarray:
        """Per strategy and factor into how many parts it is cut on a mesh."""
        sizes = [int(size) for _, size in mesh.axes if size > 1]
        return np.asarray(np.where(self.sharded, sizes, 1).prod(2, dtype=int))


def strategy_table(rule: Rule, mesh: Mesh, choices: Collection[str] | None = None) -> StrategyTable:
    """The table of a rule on meshes with these axes. choices: what an axis may take (None: whatever the rule allows)."""
    of_any_size = {name: replace(factor, size=min(factor.size, 2)) for name, factor in rule.factors.items()}
    form = Rule(rule.operands, rule.results, of_any_size, rule.linear, rule.carried)
    every = form.choices()
    kept = every if choices is None else [choice for choice in every if choice in choices]
    return _table(form, mesh.names, shared_axes(mesh), tuple(kept))


@lru_cache(maxsize=16384)
def _table(form: Rule, names: tuple[str, ...], axes: tuple[str, ...], choices: tuple[str, ...]) -> StrategyTable:
    mesh = Mesh(tuple((name, 2) for name in names))
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
    return StrategyTable(
        tuple(strategies), specs[:first], specs[first:], np.array(sharded, bool).reshape(shape), single
    )
