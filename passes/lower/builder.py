"""Lines of one of a stage's functions under construction: names, conversions, and parameters gathered for calls."""

from __future__ import annotations

from autopar.ir.lines import Function, GatherKey, Line, ParameterGather, Prefetch, Ref, Stored, TakeParameters
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.passes.lower.context import StageContext
from autopar.passes.lower.convert import Converter
from autopar.passes.lower.names import Names

LocalValue = tuple[str, Spec]
"""A value by its local name, and the spec it is held in."""


class Builder:
    """One function: `lines` grow, `args` are its arguments that are tensors."""

    def __init__(self, context: StageContext, name: str) -> None:
        self.context, self.name = context, name
        self.program, self.pricer = context.program, context.pricer
        self.lines: list[Line] = []
        self.names = Names()
        self.converter = Converter(self.pricer, self.names, self.lines.append)
        self.args: dict[str, tuple[TensorType, Spec]] = {}

    def function(self, returns: list[str | None], state: tuple[str, ...] = ()) -> Function:
        """The finished function; `state`: arguments that are lists of saved values."""
        return Function(self.name, (*state, *self.args), tuple(self.lines), tuple(returns), dict(self.args))

    def convert(self, held: LocalValue, type_: TensorType, wanted: Spec, phase: str, source: str) -> str:
        """Name of a value in the spec wanted."""
        return self.converter.convert(held[0], held[0], type_, held[1], wanted, phase, source)

    def prefetch(self, index: int, backward: bool) -> None:
        """Start the gathers of a call."""
        call = self.program.calls[index]
        gathers = tuple(
            ParameterGather(call.params[use.slot], use.steps, use.dtype)
            for use in self.context.parameter_uses(call, backward)
            if use.moves
        )
        if gathers:
            key = GatherKey(self.context.number(index), backward)
            self.lines.append(Prefetch(key, gathers, phase="B" if backward else "F", source=call.path))

    def params(self, index: int, backward: bool) -> tuple[Ref | Stored, ...]:
        """Arguments for the parameters of a call: stored shards, and the local names of those that were gathered."""
        call = self.program.calls[index]
        uses = self.context.parameter_uses(call, backward)
        key = GatherKey(self.context.number(index), backward)
        local = {i: self.names.fresh(f"{use.stem}_{key}") for i, use in enumerate(uses) if use.moves}
        if local:
            self.lines.append(
                TakeParameters(
                    key,
                    outs=tuple(local.values()),
                    types=tuple(uses[i].type for i in local),
                    specs=tuple(uses[i].wanted for i in local),
                    phase="B" if backward else "F",
                )
            )
        return tuple(
            Ref(local[i]) if i in local else Stored(call.params[use.slot], use.dtype is not None)
            for i, use in enumerate(uses)
        )
