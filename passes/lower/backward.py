"""Lower a stage's backward: calls in reverse, gradients converted, added, stored and sent back.

One function, or two where the schedule runs B (input gradients) and W (parameter gradients) apart.
"""

from __future__ import annotations

from autopar.ir import lines as ir
from autopar.ir.lines import Function, Ref
from autopar.ir.lowered import BoundaryEnd
from autopar.ir.program import Call, ValueRef
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.ops.registry import find
from autopar.passes.lower.builder import Builder, LocalValue
from autopar.passes.lower.context import StageContext
from autopar.passes.lower.convert import cast


class Backward(Builder):
    """`backward` of a stage, and `weights` where B and W are apart."""

    def __init__(self, context: StageContext, saved: dict[int, str]) -> None:
        super().__init__(context, "backward")
        self.saved = saved
        self.gradients: dict[ValueRef, LocalValue] = {}
        """The sum of the gradients that have reached a value so far."""
        self.later: dict[int, str] = {}
        self._fresh: dict[str, frozenset[int]] = {}
        self.received: list[BoundaryEnd] = []
        self.sent: list[BoundaryEnd] = []

    def functions(self) -> tuple[Function, Function | None]:
        """`backward`, and `weights` where B and W are apart."""
        for name in self.saved.values():
            self.names.take(name)
        order = [i for i in reversed(range(len(self.program.calls))) if i in self.program.backward_calls]
        self._arrivals()
        if order:
            if self.program.loss is not None:
                self._seed(self.program.loss)
            self.prefetch(order[0], True)
            self._fetch(order[0])
        for position, index in enumerate(order):
            if position + 1 < len(order):
                self.prefetch(order[position + 1], True)
                self._fetch(order[position + 1])
            self._call(index)
        returns: list[str | None] = [*self._departures(), *self.later.values()]
        backward = self.function(returns, tuple(self.saved.values()))
        return backward, self._weights() if self.context.split else None

    # --- between stages -------------------------------------------------------------------------------------------------

    def _arrivals(self) -> None:
        boundary = self.program.boundary
        for tensor, ref in zip(boundary.sent, boundary.sent_values, strict=True) if boundary else ():
            wanted = self.context.tangent(ref) if tensor.gradient else None
            if wanted is None:
                continue
            type_ = self.program.type_of(ref)
            spec = self.pricer.arrival(type_, wanted)[0]
            name = self.names.fresh(f"d_{tensor.name}")
            self.args[name] = (type_, spec)
            self.received.append(BoundaryEnd(f"d_{tensor.name}", tensor.target, type_, spec))
            self._reach(ref, (name, spec), f"from stage {tensor.target}")

    def _departures(self) -> list[str]:
        names = []
        boundary = self.program.boundary
        for k, tensor in enumerate(boundary.received if boundary else ()):
            if not tensor.gradient:
                continue
            assert boundary is not None
            ref = ValueRef("input", len(boundary.inputs) + k)
            held, type_ = self.gradients[ref], self.program.type_of(ref)
            leaves = self.pricer.departure(type_, held[1])[0]
            names.append(self.convert(held, type_, leaves, "B", f"to stage {tensor.source}"))
            self.sent.append(BoundaryEnd(f"d_{tensor.name}", tensor.source, type_, leaves))
        return names

    # --- gradients ------------------------------------------------------------------------------------------------------

    def _seed(self, loss: ValueRef) -> None:
        type_ = self.program.type_of(loss)
        whole = Spec.replicated(len(type_.shape))
        name = self.names.fresh("d_loss")
        self.lines.append(ir.SeedGradient(outs=(name,), types=(type_,), specs=(whole,), phase="B"))
        self._reach(loss, (name, whole), "loss")

    def _reach(self, ref: ValueRef, arrived: LocalValue, source: str) -> None:
        """A gradient arrives at a value: convert it to the spec wanted there, add it to what came before."""
        total = self.gradients.get(ref)
        if ref.kind == "call":
            wanted = self.context.tangent(ref)
        else:
            wanted = arrived[1] if total is None else total[1]
        if wanted is None:
            return
        type_ = self.program.type_of(ref)
        gradient = self.convert(arrived, type_, wanted, "B", source)
        if total is not None:
            addends = {"self": Ref(total[0]), "other": Ref(gradient)}
            gradient = self.names.fresh(f"{total[0]}_sum")
            self.lines.append(
                ir.Compute(
                    "aten.add.Tensor",
                    addends,
                    outs=(gradient,),
                    types=(type_,),
                    specs=(wanted,),
                    phase="B",
                    source=source,
                )
            )
        self.gradients[ref] = (gradient, wanted)

    def _wanted(self, ref: ValueRef) -> bool:
        """Whether somebody waits for the gradient of a call's input."""
        if ref.kind == "call":
            return self.context.tangent(ref) is not None
        tensor = self.program.boundary_tensor(ref)
        return tensor is not None and tensor.gradient

    def _tangents(self, index: int) -> tuple[str, ...]:
        """Names of the gradients of a call's outputs; zeros where nothing has arrived."""
        template = self.program.template_of(self.program.calls[index])
        tangents: list[str] = []
        for o, tangent in enumerate(template.tangents):
            if tangent is None:
                continue
            total = self.gradients.pop(ValueRef("call", index, o), None)
            if total is None:
                spec = self.context.planned(template.name, tangent)
                type_ = template.type_of(tangent)
                name = self.names.fresh(f"zero_{tangent}_{self.context.number(index)}")
                self.lines.append(ir.ZeroGradient(outs=(name,), types=(type_,), specs=(spec,), phase="B"))
                tangents.append(name)
            else:
                tangents.append(total[0])
        return tuple(tangents)

    def _fetch(self, index: int) -> None:
        """Start bringing back what a call's forward parked."""
        if self.context.templates[self.program.calls[index].template].offload:
            self.lines.append(ir.FetchSaved(self.saved[index], phase="B"))

    def _call(self, index: int) -> None:
        call, number = self.program.calls[index], self.context.number(index)
        template = self.program.templates[call.template]
        lowered = self.context.templates[call.template]
        tangents = self._tangents(index)
        params = self.params(index, True)
        if lowered.offload:
            self.lines.append(ir.AwaitSaved(self.saved[index], phase="B"))
        outs: list[str] = []
        types: list[TensorType | None] = []
        for slot, grad in enumerate(template.input_grads):
            used = grad is not None and self._wanted(call.inputs[slot])
            outs.append(self.names.fresh(f"d_{template.inputs[slot]}_{number}") if used else "_")
            types.append(template.type_of(grad) if grad is not None else None)
        specs = lowered.input_grads
        if not self.context.split:
            names, param_types = self._param_grads(call, number)
            outs, types, specs = [*outs, *names], [*types, *param_types], (*specs, *lowered.param_grads)
        elif lowered.later:
            self.later[index] = self.names.fresh(f"later_{number}")
            outs, types, specs = [*outs, self.later[index]], [*types, None], (*specs, None)
        self.lines.append(
            ir.CallBackward(
                call.template,
                number,
                self.saved[index],
                params,
                tangents,
                outs=tuple(outs),
                types=tuple(types),
                specs=specs,
                phase="B",
                source=call.path,
            )
        )
        if not self.context.split:
            self._store(self, call, outs[len(template.inputs) :])
        for slot, ref in enumerate(call.inputs):
            left = lowered.input_grads[slot]
            if outs[slot] != "_" and left is not None:
                self._reach(ref, (outs[slot], left), call.path)

    # --- parameters -----------------------------------------------------------------------------------------------------

    def _param_grads(self, call: Call, number: int) -> tuple[list[str], list[TensorType | None]]:
        template = self.program.templates[call.template]
        names, types = [], []
        for slot, grad in enumerate(template.param_grads):
            names.append(self.names.fresh(f"d_{template.params[slot]}_{number}") if grad is not None else "_")
            types.append(template.type_of(grad) if grad is not None else None)
        return names, types

    def _store(self, into: Builder, call: Call, results: list[str]) -> None:
        """Parameter gradients of a call go to the store."""
        lowered, template = self.context.templates[call.template], self.program.templates[call.template]
        for slot, name in enumerate(call.params):
            grad_name, arrived, grad = results[slot], lowered.param_grads[slot], template.param_grads[slot]
            if grad_name == "_" or arrived is None or grad is None:
                continue
            wanted = self.context.gradients[name].arrival
            if wanted is not None:
                type_ = self.program.parameters[name].type
                grad_name = _as_stored(into, call, template.type_of(grad), type_, (grad_name, arrived))
                grad_name = into.convert((grad_name, arrived), type_, wanted, "W", call.path)
            owned = grad_name in results and slot in self._fresh_slots(call.template)
            into.lines.append(ir.AddGradient(grad_name, name, owned, phase="W", source=call.path))

    def _fresh_slots(self, template: str) -> frozenset[int]:
        """Slots of the parameters whose gradient is a tensor of its own, that nobody else holds."""
        if template not in self._fresh:
            lowered = self.context.templates[template]
            function = lowered.weights or lowered.backward
            assert function is not None
            returns = function.returns[0 if lowered.weights else len(lowered.input_grads) :]
            read = {name for line in function.lines for name in line.reads()}
            new = {out for line in function.lines if _makes_fresh(line) for out in line.outs} - read
            slots = [slot for slot, name in enumerate(returns) if name in new and function.returns.count(name) == 1]
            self._fresh[template] = frozenset(slots)
        return self._fresh[template]

    def _weights(self) -> Function:
        """`weights`: the parameter gradients of all calls, from what `backward` kept."""
        builder = Builder(self.context, "weights")
        for name in self.later.values():
            builder.names.take(name)
        for index, kept in self.later.items():
            call, number = self.program.calls[index], self.context.number(index)
            results, types = self._param_grads(call, number)
            specs = self.context.templates[call.template].param_grads
            builder.lines.append(
                ir.CallWeights(
                    call.template,
                    number,
                    kept,
                    outs=tuple(results),
                    types=tuple(types),
                    specs=specs,
                    phase="W",
                    source=call.path,
                )
            )
            self._store(builder, call, results)
        return builder.function([], tuple(self.later.values()))


def _makes_fresh(line: ir.Line) -> bool:
    """Whether what a line makes is a tensor of its own."""
    made_by = line.line if isinstance(line, ir.Wait) else line
    definition = find(made_by.op) if isinstance(made_by, ir.Compute) else None
    return isinstance(line, ir.Join) or (definition is not None and definition.fresh)


def _as_stored(into: Builder, call: Call, type_: TensorType, stored: TensorType, gradient: LocalValue) -> str:
    """A parameter's gradient in the dtype that the parameter is stored in: what follows may reduce it."""
    if type_ == stored:
        return gradient[0]
    name = into.names.fresh(f"{gradient[0]}_cast")
    into.lines.append(cast(gradient[0], name, stored, gradient[1], "W", call.path))
    return name
