"""Lines of one of a stage's functions under construction: names, conversions, and parameters gathered for calls."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.ir.lines import Function, GatherKey, Line, ParameterGather, Prefetch, Ref, Stored, TakeParameters
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.passes.lower.context import StageContext
from autopar.passes.lower.convert import Converter
from autopar.passes.lower.names import Names

LocalValue = tuple[str, Spec]
"""A value by its local name, and the spec it is held in."""


@dataclass(frozen=True)
class ParameterUse:
    """A parameter as a call wants it: how it is gathered, and the type and spec that come out. stem: of its local name.
    tier: where the shard rests ("": on the device)."""

    gather: ParameterGather
    stem: str
    type: TensorType
    wanted: Spec
    tier: str = ""

    @property
    def moves(self) -> bool:
        """Whether what is stored is not what is wanted, where it is wanted."""
        return bool(self.gather.steps) or self.gather.dtype is not None or bool(self.tier)


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
        gathers = tuple(use.gather for use in self._parameter_uses(index, backward) if use.moves)
        if gathers:
            key = GatherKey(self.context.number(index), backward)
            path_of_call = self.program.calls[index].path
            self.lines.append(Prefetch(key, gathers, phase="B" if backward else "F", source=path_of_call))

    def params(self, index: int, backward: bool) -> tuple[Ref | Stored, ...]:
        """Arguments for the parameters of a call: stored shards, and the local names of those that were gathered."""
        uses = self._parameter_uses(index, backward)
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
        return tuple(Ref(local[i]) if i in local else Stored(use.gather.name) for i, use in enumerate(uses))

    def _parameter_uses(self, index: int, backward: bool) -> list[ParameterUse]:
        """What a call reads of its parameters. Raises PlanError where no gather leads there."""
        call = self.program.calls[index]
        template = self.program.template_of(call)
        specs = self.context.stage.templates[template.name].specs
        places = [(slot, "late" if backward else "use") for slot in range(len(call.params))]
        if backward:
            places += [(slot, "use") for slot in self.context.templates[call.template].again_params]
        uses = []
        for slot, hub in places:
            name, wanted = call.params[slot], specs.get(f"{template.params[slot]}@{hub}")
            if wanted is None:
                continue
            stored = self.context.stage.parameters[name]
            type_ = template.type_of(template.params[slot])
            steps = self.context.steps(type_, stored.storage, wanted)
            if steps is None:
                raise PlanError(f"parameter {name}: no gather leads from {stored.storage} to {wanted}")
            dtype = None if type_ == self.program.parameters[name].type else type_.dtype
            gather = ParameterGather(name, steps, dtype)
            uses.append(ParameterUse(gather, template.params[slot], type_, wanted, stored.tier))
        return uses
