"""Lower a stage: the functions that its actions run, which call its templates, and everything between the calls.

Between calls values are converted from the spec the producer leaves to the spec the reader wants; gradients that reach
one value from several calls are converted to one spec and added; parameters are gathered just before use (started one
call ahead); gradients go to the store with the steps that bring them to their optimizer spec. What comes from another
stage arrives in the spec that is cheapest to arrive in, what leaves owes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.errors import PlanError
from autopar.ir.lowered import (
    Function,
    Line,
    LoweredStage,
    LoweredTemplate,
    Port,
    Ref,
    Row,
    RuntimeStep,
    StoredParameter,
)
from autopar.ir.program import Program, Template, ValueRef
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.passes.lower.convert import Converter, Gathered, Names, path, runtime_steps
from autopar.passes.lower.template import lower_template
from autopar.passes.price.pricer import Pricer, Pricers
from autopar.passes.rules.book import RuleBook
from autopar.plan import StagePlan, TemplatePlan

Held = tuple[str, Spec]


def lower_stage(
    program: Program, stage: StagePlan, pricers: Pricers, rules: RuleBook, microbatches: int, split: bool
) -> LoweredStage:
    """One stage's program (`autopar.passes.lower.cut`) as local lines. split: B and W apart. Raises PlanError."""
    from autopar.passes.lower.backward import Backward  # it builds on this module

    context = StageContext(program, stage, pricers[stage.mesh], rules, split, pricers.lowered)
    early = [i for i, call in enumerate(program.calls) if call.early] if microbatches > 1 else []
    prepare = _Forward(context, "prepare", early).prepare() if early else None
    front = _Forward(context, "forward", [i for i in range(len(program.calls)) if i not in early])
    forward = front.run(prepare)
    backward = Backward(context, front.saved) if program.training else None
    back, weights = backward.run() if backward is not None else (None, None)
    outputs = [
        Row(index, name, program.type_of(ref), spec, front.batch_dim(ref))
        for index, (name, spec), ref in zip(
            program.boundary.outputs if program.boundary else range(len(program.outputs)),
            front.outputs,
            program.outputs,
            strict=True,
        )
    ]
    return LoweredStage(
        program.boundary.stage if program.boundary else 0,
        stage.mesh,
        context.templates,
        forward,
        back,
        weights,
        prepare,
        context.stored(),
        {name: b.type for name, b in program.buffers.items()},
        tuple(front.rows),
        tuple(outputs),
        tuple(front.received),
        tuple(front.sent),
        tuple(backward.received) if backward is not None else (),
        tuple(backward.sent) if backward is not None else (),
        program.training,
        microbatches,
    )


@dataclass
class StageContext:
    """What forward and backward of a stage share: its plan, lowered templates, and how gradients reach the store."""

    program: Program
    stage: StagePlan
    pricer: Pricer
    rules: RuleBook
    split: bool
    known: dict[Any, tuple[LoweredTemplate, TemplatePlan]]

    def __post_init__(self) -> None:
        program, stage = self.program, self.stage
        if set(program.templates) - set(stage.templates) or set(program.parameters) - set(stage.parameters):
            raise PlanError("the plan misses templates or parameters of this model; compile again without plan=")
        needs_backward = {program.calls[i].template for i in program.backward_calls}
        self.templates: dict[str, LoweredTemplate] = {
            name: self._template(t, name in needs_backward) for name, t in program.templates.items()
        }
        self.contributions = self._grad_steps()

    def _template(self, template: Template, backward: bool) -> LoweredTemplate:
        """Stages that run a template alike on alike meshes share what lowering makes of it."""
        plan = self.stage.templates[template.name]
        key = (template, id(plan), self.pricer.mesh.axes, backward, self.split)
        if key not in self.known:
            made = lower_template(template, plan, self.pricer, self.rules, backward, self.split)
            self.known[key] = (made, plan)  # the plan is kept, so that its id is not given again
        return self.known[key][0]

    def number(self, index: int) -> int:
        """Number of a call in the whole program."""
        return index + self.program.first_call

    def planned(self, template: str, value: str) -> Spec:
        """The plan's spec of a placeholder."""
        try:
            return self.stage.templates[template].specs[value]
        except KeyError:
            raise PlanError(f"the plan has no spec for {template}.{value}; it is for another model") from None

    def tangent(self, ref: ValueRef) -> Spec | None:
        """Spec in which the gradient of a call's output is wanted."""
        template = self.program.template_of(self.program.calls[ref.index])
        tangent = template.tangents[ref.output]
        return None if tangent is None else self.planned(template.name, tangent)

    def _grad_steps(self) -> dict[str, tuple[int, tuple[RuntimeStep, ...], Spec | None]]:
        """Per trained parameter: number of contributions, reduction steps, and the spec contributions arrive in."""
        found: dict[str, tuple[int, tuple[RuntimeStep, ...], Spec | None]] = {}
        for name in self.program.trained:
            places = list(self.program.gradients_of(name))
            specs = {self.templates[self.program.calls[c].template].param_grads[slot] for c, slot in places}
            target = self.stage.parameters[name].optimizer
            first = next(iter(specs))
            steps = None
            if len(specs) == 1 and first is not None:
                steps = runtime_steps(
                    path(self.pricer, self.program.parameters[name].type, first, target, bucketed=True)
                )
            found[name] = (len(places), steps or (), None if steps is not None else target)
        return found

    def stored(self) -> dict[str, StoredParameter]:
        """How every parameter of the stage rests."""
        stored = {}
        foreign = self.program.boundary.foreign if self.program.boundary else frozenset()
        for name, parameter in self.program.parameters.items():
            planned = self.stage.parameters[name]
            regather = runtime_steps(
                path(self.pricer, parameter.type, planned.optimizer, planned.storage, bucketed=True)
            )
            if regather is None:
                raise PlanError(f"parameter {name}: no gather leads from {planned.optimizer} to {planned.storage}")
            count, steps, _ = self.contributions.get(name, (0, (), None))
            stored[name] = StoredParameter(
                name,
                parameter.type,
                planned.storage,
                planned.optimizer,
                parameter.trainable,
                regather,
                count,
                steps,
                name not in foreign,
                planned.tier,
                planned.optimizer_tier,
            )
        return stored


class Builder:
    """Lines of one of the stage's functions under construction."""

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

    # --- parameters -----------------------------------------------------------------------------------------------------

    def _gather(self, index: int, late: bool) -> list[Gathered]:
        """What call `index` needs cast, gathered or sliced."""
        call = self.program.calls[index]
        template = self.program.template_of(call)
        specs = self.context.stage.templates[template.name].specs
        places = [(slot, "late" if late else "use") for slot in range(len(call.params))]
        if late:
            places += [(slot, "use") for slot in self.context.templates[call.template].again_params]
        found = []
        for slot, kind in places:
            name, wanted = call.params[slot], specs.get(f"{template.params[slot]}@{kind}")
            if wanted is None:
                continue
            stored = self.context.stage.parameters[name]
            storage, type_ = stored.storage, template.type_of(template.params[slot])
            steps = runtime_steps(path(self.pricer, type_, storage, wanted))
            if steps is None:
                raise PlanError(f"parameter {name}: no gather leads from {storage} to {wanted}")
            dtype = None if type_ == self.program.parameters[name].type else type_.dtype
            found.append(Gathered(name, template.params[slot], steps, dtype, type_, wanted, stored.tier))
        return found

    def prefetch(self, index: int, late: bool) -> None:
        """Start the gathers of a call."""
        gathers = [(g.name, g.steps, g.dtype) for g in self._gather(index, late) if g.moves]
        if gathers:
            key = f"{self.context.number(index)}{'b' if late else 'f'}"
            self.lines.append(
                Line(
                    (),
                    "params.prefetch",
                    (key, tuple(gathers)),
                    phase="B" if late else "F",
                    source=self.program.calls[index].path,
                )
            )

    def params(self, index: int, late: bool) -> list[Ref | str]:
        """Arguments for the parameters of a call: stored shards by name, gathered ones by local name."""
        gathers = self._gather(index, late)
        key = f"{self.context.number(index)}{'b' if late else 'f'}"
        local = {i: self.names.fresh(f"{g.stem}_{key}") for i, g in enumerate(gathers) if g.moves}
        if local:
            taken = [gathers[i] for i in local]
            self.lines.append(
                Line(
                    tuple(local.values()),
                    "params.take",
                    (key,),
                    types=tuple(g.type for g in taken),
                    specs=tuple(g.wanted for g in taken),
                    phase="B" if late else "F",
                )
            )
        return [Ref(local[i]) if i in local else g.name for i, g in enumerate(gathers)]


class _Forward(Builder):
    """`forward`: the calls in order; or `prepare`: the early calls alone."""

    def __init__(self, context: StageContext, name: str, order: list[int]) -> None:
        super().__init__(context, name)
        self.order = order
        self.values: dict[ValueRef, Held] = {}
        self.saved: dict[int, str] = {}
        self.rows: list[Row] = []
        self.received: list[Port] = []
        self.sent: list[Port] = []
        self.outputs: list[Held] = []
        self._inputs()

    def prepare(self) -> Function:
        """Values of the early calls, whole on every rank."""
        self._calls()
        made: list[str | None] = []
        for ref in self._early():
            name, spec = self.values[ref]
            type_ = self.program.type_of(ref)
            whole = Spec.replicated(len(type_.shape))
            made.append(self.converter.convert(name, name, type_, spec, whole, "F", "whole batch"))
        self.args = {row.name: self.args[row.name] for row in self.rows}
        return self.function(made)

    def _early(self) -> list[ValueRef]:
        calls = [(i, c) for i, c in enumerate(self.program.calls) if c.early]
        return [ValueRef("call", i, o) for i, c in calls for o in range(len(self.program.template_of(c).outputs))]

    def run(self, prepare: Function | None) -> Function:
        """The finished `forward`."""
        if prepare is not None:
            for ref in self._early():
                type_ = self.program.type_of(ref)
                spec = Spec.replicated(len(type_.shape))
                name = self.names.fresh("whole_batch")
                self.args[name] = (type_, spec)
                self.values[ref] = (name, spec)
        self._calls()
        self._outputs()
        self._sends()
        self._updates()
        return self.function([*(n for n, _ in self.outputs), *self._sent_names, *self.saved.values()])

    def _calls(self) -> None:
        if self.order:
            self.prefetch(self.order[0], False)
        for position, index in enumerate(self.order):
            if position + 1 < len(self.order):
                self.prefetch(self.order[position + 1], False)
            self._call(index)

    def batch_dim(self, ref: ValueRef) -> int | None:
        """Along which dim microbatches of an output are joined."""
        return 0 if self.program.type_of(ref).shape else None

    def _inputs(self) -> None:
        boundary = self.program.boundary
        own = boundary.inputs if boundary else range(len(self.program.inputs))
        for i, (name, type_) in enumerate(self.program.inputs):
            ref = ValueRef("input", i)
            local = self.names.fresh("".join(c if c.isalnum() else "_" for c in name).lstrip("0123456789_") or f"x{i}")
            wanted = {self._placeholder(call, slot) for call, slot in self.program.readers.get(ref, ())}
            only = next(iter(wanted)) if len(wanted) == 1 else None
            crossing = self.program.crossing(ref)
            if crossing is not None:
                spec = self.pricer.arrival(type_, next(iter(sorted(wanted, key=str))))[0]
                self.received.append(Port(crossing.name, crossing.source, type_, spec))
            else:
                spec = only if only is not None and not only.partial else Spec.replicated(len(type_.shape))
                self.rows.append(Row(own[i], local, type_, spec, self.program.batch_dims[i]))
            self.args[local] = (type_, spec)
            self.values[ref] = (local, spec)

    def _placeholder(self, call: int, slot: int) -> Spec:
        template = self.program.template_of(self.program.calls[call])
        return self.context.planned(template.name, template.inputs[slot])

    def _value(self, ref: ValueRef) -> Held:
        if ref.kind == "buffer" and ref not in self.values:
            type_ = self.program.buffers[ref.name].type
            name = self.names.fresh(ref.name.replace(".", "_"))
            spec = Spec.replicated(len(type_.shape))
            copied = {"copy": True} if self._changes_before_backward(ref) else {}
            self.lines.append(Line((name,), "buffer.read", (ref.name,), copied, types=(type_,), specs=(spec,)))
            self.values[ref] = (name, spec)
        return self.values[ref]

    def _changes_before_backward(self, ref: ValueRef) -> bool:
        """Whether forward updates a buffer whose old value backward reads."""
        if ref.name not in self.program.buffer_updates:
            return False
        for call, slot in self.program.readers.get(ref, ()):
            template = self.context.templates[self.program.calls[call].template]
            placeholder = self.program.templates[template.name].inputs[slot]
            if call in self.program.backward_calls and placeholder in template.kept:
                return True
        return False

    def _call(self, index: int) -> None:
        call = self.program.calls[index]
        lowered = self.context.templates[call.template]
        number = self.context.number(index)
        arguments = []
        for slot, ref in enumerate(call.inputs):
            name, spec = self._value(ref)
            wanted = self._placeholder(index, slot)
            arguments.append(
                Ref(self.converter.convert(name, name, self.program.type_of(ref), spec, wanted, "F", call.path))
            )
        params = self.params(index, False)
        template = self.program.templates[call.template]
        outs = tuple(self.names.fresh(f"{o}_{number}") for o in template.outputs)
        keeps = index in self.program.backward_calls
        if keeps:
            self.saved[index] = self.names.fresh(f"saved_{number}")
        types = tuple(template.type_of(o) for o in template.outputs)
        self.lines.append(
            Line(
                (*outs, self.saved[index]) if keeps else outs,
                "call.forward",
                (call.template, number, tuple(params), tuple(arguments)),
                {"keep": keeps},
                (*types, None) if keeps else types,
                (*lowered.outputs, None) if keeps else lowered.outputs,
                "F",
                call.path,
            )
        )
        if keeps and lowered.offload:
            self.lines.append(
                Line((), "tier.park", (Ref(self.saved[index]), lowered.offload, lowered.offload_tier, call.template))
            )
        for o, (name, spec) in enumerate(zip(outs, lowered.outputs, strict=True)):
            self.values[ValueRef("call", index, o)] = (name, spec)

    def _outputs(self) -> None:
        for ref in self.program.outputs:
            name, spec = self._value(ref)
            type_ = self.program.type_of(ref)
            wanted = Spec.replicated(len(type_.shape)) if self.program.training else spec.without_partial()
            if ref == self.program.loss and _owes_sums_only(spec):
                self.outputs.append((self._sum_loss(name, spec, type_), wanted))
                continue
            self.outputs.append((self.converter.convert(name, name, type_, spec, wanted, "F", "output"), wanted))

    def _sum_loss(self, name: str, spec: Spec, type_: TensorType) -> str:
        """The loss, its sum over the axes that owe one sent beside the gradients."""
        made = self.names.fresh(f"{name}_reduced")
        axes = tuple(axis for axis, _ in spec.partial)
        whole = Spec.replicated(len(type_.shape))
        self.lines.append(Line((made,), "grads.sum", (Ref(name), axes), types=(type_,), specs=(whole,), source="loss"))
        return made

    def _sends(self) -> None:
        self._sent_names: list[str] = []
        boundary = self.program.boundary
        for crossing, ref in zip(boundary.sent, boundary.sent_values, strict=True) if boundary else ():
            name, spec = self._value(ref)
            type_ = self.program.type_of(ref)
            leaves = self.pricer.departure(type_, spec)[0]
            source = f"to stage {crossing.target}"
            self._sent_names.append(self.converter.convert(name, name, type_, spec, leaves, "F", source))
            self.sent.append(Port(crossing.name, crossing.target, type_, leaves))

    def _updates(self) -> None:
        for buffer, ref in self.program.buffer_updates.items():
            name, spec = self._value(ref)
            type_ = self.program.type_of(ref)
            whole = Spec.replicated(len(type_.shape))
            made = self.converter.convert(name, name, type_, spec, whole, "F", buffer)
            self.lines.append(Line((), "buffer.write", (buffer, Ref(made))))


def _owes_sums_only(spec: Spec) -> bool:
    return bool(spec.partial) and not any(spec.dims) and all(op == "sum" for _, op in spec.partial)
