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
from autopar.passes.rules.alphabet import distinct, shards
from autopar.passes.rules.strategy_table import strategy_table


@dataclass(frozen=True)
class OpChoices:
    """An op under some strategies, with an entry for each: seconds of its work on a block, and of messages of its own that this
    does not hide; the specs of every operand and result (by number, `autopar.passes.rules.alphabet`; None where there is no
    tensor), and the bytes of every result's block."""

    strategies: tuple[Strategy, ...]
    computed_s: np.ndarray
    sent_s: np.ndarray
    operands: tuple[np.ndarray | None, ...]
    results: tuple[np.ndarray | None, ...]
    result_bytes: tuple[np.ndarray, ...]

    @cached_property
    def seconds(self) -> np.ndarray:
        """Seconds of computing and of sending."""
        return np.asarray(self.computed_s + self.sent_s)

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

    def only(self, kept: Sequence[int]) -> OpChoices:
        """The choices at the places `kept`."""
        operands, results = (
            tuple(None if n is None else n[kept] for n in numbers) for numbers in (self.operands, self.results)
        )
        nbytes = tuple(of_result[kept] for of_result in self.result_bytes)
        strategies = tuple(self.strategies[i] for i in kept)
        return OpChoices(strategies, self.computed_s[kept], self.sent_s[kept], operands, results, nbytes)


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
    table = strategy_table(rule, mesh, choices)
    parts = table.parts(mesh)
    sizes = np.array([f.size for f in rule.factors.values()], int)
    if mesh.uneven:
        kept = np.flatnonzero(
            [
                rule.allows(strategy, mesh) and takes_blocks(Block(call, rule, strategy, mesh))
                for strategy in table.strategies
            ]
        )
    else:
        kept = np.flatnonzero(((sizes % parts == 0) & (~table.single | (sizes == parts))).all(1))
    if not len(kept):
        raise InfeasibleError(
            f"no strategy of {call.op} is left on mesh {mesh}: its axes may take {sorted(choices or ())} alone"
        )
    operands, results = (
        tuple(None if n is None else n[kept] for n in numbers) for numbers in (table.operands, table.results)
    )
    nbytes = tuple(
        shards(mesh.axes, len(type_.shape)).of_bytes(type_, numbers)
        if type_ is not None and numbers is not None
        else np.zeros(len(kept))
        for type_, numbers in zip(call.results, results, strict=True)
    )
    strategies = tuple(table.strategies[i] for i in kept.tolist())
    if mesh.uneven:
        blocks = [rule.parts(strategy, mesh) for strategy in strategies]
    else:
        blocks = [dict(zip(rule.factors, row, strict=True)) for row in parts[kept].tolist()]
    computed_s = np.array([seconds.on_block(*one) for one in zip(blocks, strategies, strict=True)])
    if rule.carries:
        sent = np.array([sent_s(*one) for one in zip(strategies, computed_s, strict=True)])
    else:
        sent = np.zeros(len(kept))
    return OpChoices(strategies, computed_s, sent, operands, results, nbytes)
