"""Lower a stage's forward: its calls in order, with values converted from the spec the producer leaves to the one wanted.

Where something must be known of the whole batch beforehand, the prologue calls are functions of their own (`prepare`, and
`prepare_1` of the next round), and what they make comes to later ones and to `forward` as arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from autopar.ir.lines import CallForward, Function, ParkSaved, ReadBuffer, SumLoss, WriteBuffer
from autopar.ir.lowered import BoundaryEnd, Row
from autopar.ir.program import Join, ValueRef
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.passes.lower.builder import Builder, LocalValue
from autopar.passes.lower.context import StageContext
from autopar.passes.rules.structure import buffer_shown_inside, shown_buffer


class Forward(Builder):
    """`forward`: the calls `order`, all but the prologue; or `prepare`, `prepare_1`, …: one of these alone."""

    def __init__(self, context: StageContext, name: str, order: list[int]) -> None:
        super().__init__(context, name)
        self.order = order
        self.values: dict[ValueRef, LocalValue] = {}
        self.saved: dict[int, str] = {}
        self.rows: list[Row] = []
        self.received: list[BoundaryEnd] = []
        self.sent: list[BoundaryEnd] = []
        self.outputs: list[LocalValue] = []
        self._inputs()

    def prepare(self, prepared: Sequence[int]) -> Function:
        """Values of a prologue call, whole on every rank. prepared: the prologue calls whose values are arguments."""
        given = self._prepared(prepared)
        self._calls()
        results: list[str | None] = []
        for ref in self._made(self.order):
            type_ = self.program.type_of(ref)
            whole = Spec.replicated(len(type_.shape))
            results.append(self.convert(self.values[ref], type_, whole, "F", "whole batch"))
        self.args = {name: self.args[name] for name in (*(row.name for row in self.rows), *given)}
        return self.function(results)

    def _made(self, calls: Sequence[int]) -> list[ValueRef]:
        """The values that calls give."""
        outputs = {i: self.program.template_of(self.program.calls[i]).outputs for i in calls}
        return [ValueRef("call", i, o) for i, names in outputs.items() for o in range(len(names))]

    def _prepared(self, calls: Sequence[int]) -> list[str]:
        """The arguments that hold what prologue calls gave."""
        given = []
        for ref in self._made(calls):
            type_ = self.program.type_of(ref)
            spec = Spec.replicated(len(type_.shape))
            given.append(self.names.fresh("whole_batch"))
            self.args[given[-1]] = (type_, spec)
            self.values[ref] = (given[-1], spec)
        return given

    def forward(self, prepared: Sequence[int]) -> Function:
        """The finished `forward`. prepared: the prologue calls, whose values are arguments."""
        self._prepared(prepared)
        self._calls()
        self._outputs()
        sent_names = self._sends()
        self._updates()
        return self.function([*(name for name, _ in self.outputs), *sent_names, *self.saved.values()])

    def _calls(self) -> None:
        if self.order:
            self.prefetch(self.order[0], False)
        for position, index in enumerate(self.order):
            if position + 1 < len(self.order):
                self.prefetch(self.order[position + 1], False)
            self._call(index)

    def output_rows(self) -> tuple[Row, ...]:
        """The stage's outputs, as its table says them."""
        microbatched = self.program.microbatched
        return tuple(
            Row(
                index,
                name,
                self.program.type_of(ref),
                spec,
                join=microbatched.outputs[index] if microbatched else Join("same"),
                extra=self.program.training and self.program.gives(index),
            )
            for index, (name, spec), ref in zip(
                self.program.output_numbers, self.outputs, self.program.outputs, strict=True
            )
        )

    def _inputs(self) -> None:
        boundary = self.program.boundary
        own = boundary.inputs if boundary else range(len(self.program.inputs))
        for i, (name, type_) in enumerate(self.program.inputs):
            ref = ValueRef("input", i)
            local = self.names.fresh("".join(c if c.isalnum() else "_" for c in name).lstrip("0123456789_") or f"x{i}")
            wanted = {self._placeholder(call, slot) for call, slot in self.program.readers.get(ref, ())}
            only = next(iter(wanted)) if len(wanted) == 1 else None
            tensor = self.program.boundary_tensor(ref)
            if tensor is not None:
                spec = self.pricer.arrival(type_, next(iter(sorted(wanted, key=str))))[0]
                self.received.append(BoundaryEnd(tensor.name, tensor.source, type_, spec))
            else:
                spec = only if only is not None and not only.partial else Spec.replicated(len(type_.shape))
                self.rows.append(Row(own[i], local, type_, spec, self.program.batch_dims[i]))
            self.args[local] = (type_, spec)
            self.values[ref] = (local, spec)

    def _placeholder(self, call: int, slot: int) -> Spec:
        template = self.program.template_of(self.program.calls[call])
        return self.context.planned(template.name, template.inputs[slot])

    def _value(self, ref: ValueRef) -> LocalValue:
        if ref.kind == "buffer" and ref not in self.values:
            type_ = self.program.buffers[ref.name].type
            name = self.names.fresh(ref.name.replace(".", "_"))
            spec = Spec.replicated(len(type_.shape))
            copy = ref.name in self._outlive_updates
            self.lines.append(ReadBuffer(ref.name, copy, outs=(name,), types=(type_,), specs=(spec,)))
            self.values[ref] = (name, spec)
        return self.values[ref]

    @cached_property
    def _outlive_updates(self) -> frozenset[str]:
        """The buffers that forward updates and in whose memory something may lie that is read afterwards: what is kept for
        backward, sent or given, and what other buffers become."""
        updates = self.program.buffer_updates
        if not updates:
            return frozenset()
        boundary = self.program.boundary
        refs = [*self.program.outputs, *(boundary.sent_values if boundary else ()), *updates.values()]
        shown = {shown_buffer(self.program, ref) for ref in refs}
        for number in self.program.backward_calls:
            kept = self.context.templates[self.program.calls[number].template].kept
            shown |= {buffer_shown_inside(self.program, number, value) for value in kept}
        return frozenset(updates.keys() & shown)

    def _call(self, index: int) -> None:
        call = self.program.calls[index]
        lowered = self.context.templates[call.template]
        template = self.program.templates[call.template]
        number = self.context.number(index)
        inputs = tuple(
            self.convert(self._value(ref), self.program.type_of(ref), self._placeholder(index, slot), "F", call.path)
            for slot, ref in enumerate(call.inputs)
        )
        params = self.params(index, False)
        outs = tuple(self.names.fresh(f"{o}_{number}") for o in template.outputs)
        types: tuple[TensorType | None, ...] = tuple(template.type_of(o) for o in template.outputs)
        specs: tuple[Spec | None, ...] = lowered.outputs
        for o, (name, spec) in enumerate(zip(outs, lowered.outputs, strict=True)):
            self.values[ValueRef("call", index, o)] = (name, spec)
        keeps = index in self.program.backward_calls
        if keeps:
            self.saved[index] = self.names.fresh(f"saved_{number}")
            outs, types, specs = (*outs, self.saved[index]), (*types, None), (*specs, None)
        self.lines.append(
            CallForward(
                call.template, number, params, inputs, keeps, outs=outs, types=types, specs=specs, source=call.path
            )
        )
        if keeps and lowered.offload:
            self.lines.append(ParkSaved(self.saved[index], lowered.offload, lowered.offload_tier, call.template))

    def _outputs(self) -> None:
        for number, ref in zip(self.program.output_numbers, self.program.outputs, strict=True):
            name, spec = self._value(ref)
            type_ = self.program.type_of(ref)
            gives = self.program.gives(number)
            wanted = spec.without_partial() if gives else Spec.replicated(len(type_.shape))
            small = not (gives and type_.shape)
            if self.program.training and small and _owes_sums_only(spec):
                self.outputs.append((self._sum(ref, name, spec, type_, gives), wanted))
                continue
            self.outputs.append((self.convert((name, spec), type_, wanted, "F", "output"), wanted))

    def _sum(self, ref: ValueRef, name: str, spec: Spec, type_: TensorType, gives: bool) -> str:
        """The loss, a count or a number that the step gives, its sum over the axes that owe one sent beside the gradients."""
        total = self.names.fresh(f"{name}_reduced")
        axes = tuple(axis for axis, _ in spec.partial)
        whole = Spec.replicated(len(type_.shape))
        what = "loss" if ref == self.program.loss else "output" if gives else "what rows chose"
        self.lines.append(SumLoss(name, axes, outs=(total,), types=(type_,), specs=(whole,), source=what))
        return total

    def _sends(self) -> list[str]:
        """The names of the values that leave for other stages, converted so that they owe nothing."""
        names = []
        boundary = self.program.boundary
        for tensor, ref in zip(boundary.sent, boundary.sent_values, strict=True) if boundary else ():
            held = self._value(ref)
            type_ = self.program.type_of(ref)
            leaves = self.pricer.departure(type_, held[1])[0]
            names.append(self.convert(held, type_, leaves, "F", f"to stage {tensor.target}"))
            self.sent.append(BoundaryEnd(tensor.name, tensor.target, type_, leaves))
        return names

    def _updates(self) -> None:
        for buffer, ref in self.program.buffer_updates.items():
            type_ = self.program.type_of(ref)
            whole = Spec.replicated(len(type_.shape))
            value = self.convert(self._value(ref), type_, whole, "F", buffer)
            self.lines.append(WriteBuffer(value, buffer, self._when(buffer)))

    def _when(self, buffer: str) -> Literal["now", "same", "sum"]:
        """When an update is written: every microbatch that is a part of the batch reads what was there before the step."""
        how = self.program.microbatched.buffers[buffer] if self.program.microbatched else "each"
        return "now" if how == "each" else how


def _owes_sums_only(spec: Spec) -> bool:
    return bool(spec.partial) and not any(spec.dims) and all(op == "sum" for _, op in spec.partial)
