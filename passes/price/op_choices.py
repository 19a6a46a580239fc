"""The costs of every strategy of an op on a mesh, as arrays: the form in which the sharding problem takes prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.ir.rule import Strategy
from autopar.passes.rules.alphabet import distinct


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
