"""The costs of every strategy of an op on a mesh, as arrays: the form in which the sharding problem takes prices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.errors import InfeasibleError
from autopar.ir.call import OpCall
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule, Strategy
from autopar.ops.registry import Block, takes_blocks
from autopar.passes.price.op_seconds import OpSeconds
from autopar.passes.rules.alphabet import shards
from autopar.passes.rules.strategy_table import BlockOfWork, StrategyTable, strategy_table


@dataclass(frozen=True)
class OpChoices:
    """An op under the strategies of a table, with an entry for each: seconds of its work on a block, and of messages of its own
    that this does not hide; and the bytes of every result's block."""

    table: StrategyTable
    computed_s: np.ndarray
    sent_s: np.ndarray
    result_bytes: tuple[np.ndarray, ...]

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        return self.table.strategies

    @cached_property
    def seconds(self) -> np.ndarray:
        """Seconds of computing and of sending."""
        return np.asarray(self.computed_s + self.sent_s)

    def only(self, kept: Sequence[int]) -> OpChoices:
        """The choices at the places `kept`."""
        places = np.array(kept, int)
        nbytes = tuple(of_result[places] for of_result in self.result_bytes)
        return OpChoices(self.table.only(places), self.computed_s[places], self.sent_s[places], nbytes)


def op_choices(
    call: OpCall,
    rule: Rule,
    mesh: Mesh,
    seconds: OpSeconds,
    sent_s: Callable[[Strategy, float], float],
    choices: Collection[str] | None = None,
) -> OpChoices:
    """Every strategy that an op may take on a mesh. sent_s(strategy, computed_s): seconds of messages of its own that so many of
    work do not hide. choices: what an axis may take (None: whatever the rule allows). Raises InfeasibleError where that leaves
    nothing."""
    every = strategy_table(rule, mesh, choices)
    parts = every.parts(mesh)
    if mesh.uneven:
        kept = np.flatnonzero(
            [
                rule.allows(strategy, mesh) and takes_blocks(Block(call, rule, strategy, mesh))
                for strategy in every.strategies
            ]
        )
    else:
        sizes = np.array([rule.factors[f].size for f in every.factors], int)
        kept = np.flatnonzero(((sizes % parts == 0) & (~every.single | (sizes == parts))).all(1))
    if not len(kept):
        raise InfeasibleError(
            f"no strategy of {call.op} is left on mesh {mesh}: its axes may take {sorted(choices or ())} alone"
        )
    table = every.only(kept)
    nbytes = tuple(
        shards(mesh.axes, len(type_.shape)).of_bytes(type_, numbers)
        if type_ is not None and numbers is not None
        else np.zeros(len(kept))
        for type_, numbers in zip(call.results, table.results, strict=True)
    )
    computed_s = _computed_s(rule, table, mesh, seconds)
    if rule.carries:
        sent = np.array([sent_s(*one) for one in zip(table.strategies, computed_s, strict=True)])
    else:
        sent = np.zeros(len(kept))
    return OpChoices(table, computed_s, sent, nbytes)


def _computed_s(rule: Rule, table: StrategyTable, mesh: Mesh, seconds: OpSeconds) -> np.ndarray:
    """Seconds of an op's work on a block under every strategy of a table; of strategies that cut it alike one is priced."""
    if seconds.follows_blocks and not mesh.uneven:
        blocks, which = table.blocks(mesh)
        return np.asarray(np.array(seconds.on_blocks(blocks, mesh))[which])
    every = [BlockOfWork(rule.parts(s, mesh), rule.work_parts(s, mesh), s) for s in table.strategies]
    return np.array(seconds.on_blocks(every, mesh))
