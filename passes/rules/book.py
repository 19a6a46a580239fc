"""The rules of every op of a program, found once: registered, discovered by experiment, or whole with a warning."""

from __future__ import annotations

import warnings

from autopar.ir.call import OpCall
from autopar.ir.rule import Rule
from autopar.ops.discover import discover
from autopar.ops.registry import find


class RuleBook:
    """Rules by op call; `unknown` lists ops that run whole, `discovered` those found by experiment."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}
        self.unknown: list[str] = []
        self.discovered: dict[str, str] = {}

    def rule(self, call: OpCall) -> Rule:
        """The rule of one op on these shapes."""
        if call.signature not in self._rules:
            self._rules[call.signature] = self._find(call)
        return self._rules[call.signature]

    def _find(self, call: OpCall) -> Rule:
        definition = find(call.op)
        if definition is not None and definition.rule is not None:
            return definition.rule(call)
        discovered = discover(call)
        if discovered is not None and discovered.shardable:
            self.discovered.setdefault(call.op, str(discovered))
            return discovered
        if call.op not in self.unknown:
            self.unknown.append(call.op)
            warnings.warn(
                f"autopar has no sharding rule for {call.op} and found none by experiment; it runs whole on every rank. "
                "Give it one with @autopar.register_op",
                stacklevel=2,
            )
        whole = tuple(((),) * len(t.shape) for t in call.operands)
        return Rule(whole, tuple(((),) * len(t.shape) if t is not None else None for t in call.results), {})
