"""Lower a stage: the step that calls its templates, forward then backward, with everything that happens between calls.

Between calls values are converted from the spec the producer leaves to the spec the reader wants; gradients that reach
one value from several calls are converted to one spec and added; parameters are gathered just before use (started one
call ahead); gradients go to the store with the steps that bring them to their optimizer spec.
"""

from __future__ import annotations

from autopar.errors import PlanError
from autopar.ir.lowered import Function, Line, LoweredStage, LoweredTemplate, Ref, RuntimeStep, StoredParameter
from autopar.ir.program import Program, ValueRef
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.passes.costs import Pricer
from autopar.passes.lower.convert import Converter, Names, path, runtime_steps
from autopar.passes.lower.template import lower_template
from autopar.passes.shard.rules import RuleBook
from autopar.plan import Plan, StagePlan

Held = tuple[str, Spec]
MAKE_NEW = ("autopar.linear_dw", "autopar.conv_dw", "autopar.embedding_grad")


def lower(program: Program, plan: Plan, pricer: Pricer, rules: RuleBook) -> tuple[LoweredStage, ...]:
    """Every stage of the plan as local lines. Raises PlanError when the plan does not fit the program."""
    if plan.program != program.fingerprint:
        raise PlanError(
            f"this plan is for another model (plan {plan.program}, model {program.fingerprint}): the model, its shapes "
            "or the example inputs changed; compile again without plan="
        )
    return tuple(_StageLowering(program, plan, stage, pricer, rules).run() for stage in plan.stages)


class _StageLowering:
    def __init__(self, program: Program, plan: Plan, stage: StagePlan, pricer: Pricer, rules: RuleBook) -> None:
        self.program, self.plan, self.stage, self.pricer = program, plan, stage, pricer
        missing = set(program.templates) - set(stage.templates)
        if missing or set(program.parameters) - set(stage.parameters):
            raise PlanError("the plan misses templates or parameters of this model; compile again without plan=")
        self.lines: list[Line] = []
        self.names = Names()
        self.converter = Converter(pricer, self.names, self.lines.append)
        needs_backward = {program.calls[i].template for i in program.backward_calls}
        self.templates: dict[str, LoweredTemplate] = {
            name: lower_template(t, stage.templates[name], pricer, rules, name in needs_backward)
            for name, t in program.templates.items()
        }
        self.values: dict[ValueRef, Held] = {}
        self.grads: dict[ValueRef, Held] = {}  # gradients that have reached a value, in the spec its tangent wants
        self.saved: dict[int, str] = {}
        self.contributions = self._grad_steps()

    # --- parameters -----------------------------------------------------------------------------------------------------

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

    def _gather(self, index: int, late: bool) -> list[tuple[str, str, tuple[RuntimeStep, ...], Spec, Spec]]:
        """(parameter, local stem, steps, storage, wanted) of what call `index` needs gathered or sliced."""
        call = self.program.calls[index]
        template = self.program.template_of(call)
        kind = "late" if late else "use"
        found = []
        for slot, name in enumerate(call.params):
            hub = f"{template.params[slot]}@{kind}"
            wanted = self.stage.templates[template.name].specs.get(hub)
            if wanted is None:
                continue
            storage = self.stage.parameters[name].storage
            steps = runtime_steps(path(self.pricer, self.program.parameters[name].type, storage, wanted))
            if steps is None:
                raise PlanError(f"parameter {name}: no gather leads from {storage} to {wanted}")
            found.append((name, template.params[slot], steps, storage, wanted))
        return found

    def _prefetch(self, index: int, late: bool) -> None:
        gathers = [(name, steps) for name, _, steps, _, _ in self._gather(index, late) if steps]
        if gathers:
            key = f"{index}{'b' if late else 'f'}"
            self.lines.append(Line((), "params.prefetch", (key, tuple(gathers)), phase="B" if late else "F",
                                   source=self.program.calls[index].path))  # fmt: skip

    def _params(self, index: int, late: bool) -> list[Ref | str]:
        """Arguments for the parameters of a call: stored shards by name, gathered ones by local name."""
        gathers = self._gather(index, late)
        taken = [(name, stem) for name, stem, steps, _, _ in gathers if steps]
        local: dict[str, str] = {}
        if taken:
            for name, stem in taken:
                local[name] = self.names.fresh(f"{stem}_{index}{'b' if late else 'f'}")
            self.lines.append(
                Line(tuple(local[n] for n, _ in taken), "params.take", (f"{index}{'b' if late else 'f'}",),
                     types=tuple(self.program.parameters[n].type for n, _ in taken),
                     specs=tuple(w for _, _, steps, _, w in gathers if steps), phase="B" if late else "F")
            )  # fmt: skip
        return [Ref(local[name]) if steps else name for name, _, steps, _, _ in gathers]

    # --- the step -------------------------------------------------------------------------------------------------------

    def run(self) -> LoweredStage:
        first, last = self.stage.calls
        self._inputs()
        order = list(range(first, last))
        if order:
            self._prefetch(order[0], False)
        for position, index in enumerate(order):
            if position + 1 < len(order):
                self._prefetch(order[position + 1], False)
            self._forward(index)
        outputs = self._outputs()
        self._updates()
        backward = [i for i in reversed(order) if i in self.program.backward_calls]
        if backward:
            self._seed()
            self._prefetch(backward[0], True)
        for position, index in enumerate(backward):
            if position + 1 < len(backward):
                self._prefetch(backward[position + 1], True)
            self._backward(index)
        types = {n: (t, s) for n, t, s in self.input_rows}
        step = Function(
            "step", tuple(n for n, _, _ in self.input_rows), tuple(self.lines), tuple(n for n, _ in outputs), types
        )
        return LoweredStage(
            self.stage.mesh, self.templates, step, self._stored(),
            {name: b.type for name, b in self.program.buffers.items()}, tuple(self.input_rows),
            tuple(
                (name, self.program.type_of(ref), spec)
                for (name, spec), ref in zip(outputs, self.program.outputs, strict=True)
            ),
            self.program.training, self.plan.microbatches,
        )  # fmt: skip

    def _inputs(self) -> None:
        self.input_rows: list[tuple[str, TensorType, Spec]] = []
        for i, (name, type_) in enumerate(self.program.inputs):
            ref = ValueRef("input", i)
            wanted = {self._placeholder(call, slot) for call, slot in self.program.readers.get(ref, ())}
            only = next(iter(wanted)) if len(wanted) == 1 else None
            spec = only if only is not None and not only.partial else Spec.replicated(len(type_.shape))
            local = self.names.fresh("".join(c if c.isalnum() else "_" for c in name).lstrip("0123456789_") or f"x{i}")
            self.input_rows.append((local, type_, spec))
            self.values[ref] = (local, spec)

    def _placeholder(self, call: int, slot: int) -> Spec:
        template = self.program.template_of(self.program.calls[call])
        return self._planned(template.name, template.inputs[slot])

    def _planned(self, template: str, value: str) -> Spec:
        try:
            return self.stage.templates[template].specs[value]
        except KeyError:
            raise PlanError(f"the plan has no spec for {template}.{value}; it is for another model") from None

    def _value(self, ref: ValueRef) -> Held:
        if ref.kind == "buffer" and ref not in self.values:
            type_ = self.program.buffers[ref.name].type
            name = self.names.fresh(ref.name.replace(".", "_"))
            spec = Spec.replicated(len(type_.shape))
            self.lines.append(Line((name,), "buffer.read", (ref.name,), types=(type_,), specs=(spec,)))
            self.values[ref] = (name, spec)
        return self.values[ref]

    def _forward(self, index: int) -> None:
        call = self.program.calls[index]
        lowered = self.templates[call.template]
        arguments = []
        for slot, ref in enumerate(call.inputs):
            name, spec = self._value(ref)
            wanted = self._placeholder(index, slot)
            arguments.append(
                Ref(self.converter.convert(name, name, self.program.type_of(ref), spec, wanted, "F", call.path))
            )
        params = self._params(index, False)
        template = self.program.templates[call.template]
        outs = tuple(self.names.fresh(f"{o}_{index}") for o in template.outputs)
        keeps = index in self.program.backward_calls
        if keeps:
            self.saved[index] = self.names.fresh(f"saved_{index}")
        types = tuple(template.type_of(o) for o in template.outputs)
        self.lines.append(
            Line((*outs, self.saved[index]) if keeps else outs, "call.forward",
                 (call.template, index, tuple(params), tuple(arguments)), {"keep": keeps},
                 (*types, None) if keeps else types, (*lowered.outputs, None) if keeps else lowered.outputs,
                 "F", call.path)
        )  # fmt: skip
        for o, (name, spec) in enumerate(zip(outs, lowered.outputs, strict=True)):
            self.values[ValueRef("call", index, o)] = (name, spec)

    def _outputs(self) -> list[Held]:
        outputs = []
        for i, ref in enumerate(self.program.outputs):
            name, spec = self._value(ref)
            type_ = self.program.type_of(ref)
            wanted = Spec.replicated(len(type_.shape)) if self.program.training else spec.without_partial()
            if self.program.training and i == 0 and _owes_sums_only(spec):
                outputs.append((self._sum_loss(name, spec, type_), wanted))
                continue
            outputs.append((self.converter.convert(name, name, type_, spec, wanted, "F", "output"), wanted))
        return outputs

    def _sum_loss(self, name: str, spec: Spec, type_: TensorType) -> str:
        """The loss, its sum over the axes that owe one sent beside the gradients."""
        made = self.names.fresh(f"{name}_reduced")
        axes = tuple(axis for axis, _ in spec.partial)
        whole = Spec.replicated(len(type_.shape))
        self.lines.append(Line((made,), "grads.sum", (Ref(name), axes), types=(type_,), specs=(whole,), source="loss"))
        return made

    def _updates(self) -> None:
        for buffer, ref in self.program.buffer_updates.items():
            name, spec = self._value(ref)
            type_ = self.program.type_of(ref)
            whole = Spec.replicated(len(type_.shape))
            made = self.converter.convert(name, name, type_, spec, whole, "F", buffer)
            self.lines.append(Line((), "buffer.write", (buffer, Ref(made))))

    # --- backward -------------------------------------------------------------------------------------------------------

    def _tangent(self, ref: ValueRef) -> Spec | None:
        template = self.program.template_of(self.program.calls[ref.index])
        tangent = template.tangents[ref.output]
        return None if tangent is None else self._planned(template.name, tangent)

    def _seed(self) -> None:
        ref = self.program.outputs[0]
        wanted = self._tangent(ref)
        assert wanted is not None
        type_ = self.program.type_of(ref)
        whole = Spec.replicated(len(type_.shape))
        name = self.names.fresh("d_loss")
        self.lines.append(Line((name,), "grads.seed", (type_,), types=(type_,), specs=(whole,), phase="B"))
        self._reach(ref, (name, whole), "loss")

    def _reach(self, ref: ValueRef, held: Held, source: str) -> None:
        """A gradient arrives at a value: convert it to the tangent's spec, add it to what came before."""
        wanted = self._tangent(ref)
        if wanted is None:
            return
        type_ = self.program.type_of(ref)
        made = self.converter.convert(held[0], held[0], type_, held[1], wanted, "B", source)
        total = self.grads.get(ref)
        if total is None:
            self.grads[ref] = (made, wanted)
            return
        name = self.names.fresh(f"{total[0]}_sum")
        self.lines.append(
            Line((name,), "aten.add.Tensor", (), {"self": Ref(total[0]), "other": Ref(made)}, (type_,), (wanted,),
                 "B", source)
        )  # fmt: skip
        self.grads[ref] = (name, wanted)

    def _backward(self, index: int) -> None:
        call = self.program.calls[index]
        template = self.program.templates[call.template]
        lowered = self.templates[call.template]
        tangents = []
        for o, tangent in enumerate(template.tangents):
            if tangent is None:
                continue
            ref = ValueRef("call", index, o)
            total = self.grads.pop(ref, None)
            if total is None:
                spec = self._planned(template.name, tangent)
                type_ = template.type_of(tangent)
                name = self.names.fresh(f"zero_{tangent}_{index}")
                self.lines.append(Line((name,), "grads.zero", (type_, spec), types=(type_,), specs=(spec,), phase="B"))
                tangents.append(Ref(name))
            else:
                tangents.append(Ref(total[0]))
        params = self._params(index, True)
        results: list[str] = []
        types: list[TensorType | None] = []
        for slot, grad in enumerate(template.input_grads):
            used = grad is not None and call.inputs[slot].kind == "call"
            results.append(self.names.fresh(f"d_{template.inputs[slot]}_{index}") if used else "_")
            types.append(template.type_of(grad) if grad is not None else None)
        for slot, grad in enumerate(template.param_grads):
            results.append(self.names.fresh(f"d_{template.params[slot]}_{index}") if grad is not None else "_")
            types.append(template.type_of(grad) if grad is not None else None)
        specs = (*lowered.input_grads, *lowered.param_grads)
        self.lines.append(
            Line(tuple(results), "call.backward", (call.template, index, Ref(self.saved[index]), tuple(params), tuple(tangents)),
                 {}, tuple(types), specs, "B", call.path)
        )  # fmt: skip
        for slot, name in enumerate(call.params):
            grad_name, arrived = results[len(template.inputs) + slot], lowered.param_grads[slot]
            if grad_name == "_" or arrived is None:
                continue
            _, _, target = self.contributions[name]
            if target is not None:
                type_ = self.program.parameters[name].type
                grad_name = self.converter.convert(grad_name, grad_name, type_, arrived, target, "W", call.path)
            owned = grad_name in results and self._fresh(template.name, len(template.inputs) + slot)
            self.lines.append(
                Line((), "grads.add", (name, Ref(grad_name)), {"owned": owned}, phase="W", source=call.path)
            )
        for slot, ref in enumerate(call.inputs):
            left = lowered.input_grads[slot]
            if results[slot] != "_" and left is not None:
                self._reach(ref, (results[slot], left), call.path)

    def _fresh(self, template: str, result: int) -> bool:
        """Is this result of a template's backward a tensor of its own, that nobody else holds?"""
        function = self.templates[template].backward
        assert function is not None
        name = function.returns[result] or ""
        maker = next((line.op for line in function.lines if name in line.outs), "")
        readers = sum(name in line.reads() for line in function.lines)
        return maker in MAKE_NEW and not readers and function.returns.count(name) == 1

    def _stored(self) -> dict[str, StoredParameter]:
        stored = {}
        for name, parameter in self.program.parameters.items():
            planned = self.stage.parameters[name]
            regather = runtime_steps(
                path(self.pricer, parameter.type, planned.optimizer, planned.storage, bucketed=True)
            )
            if regather is None:
                raise PlanError(f"parameter {name}: no gather leads from {planned.optimizer} to {planned.storage}")
            count, steps, _ = self.contributions.get(name, (0, (), None))
            stored[name] = StoredParameter(
                name, parameter.type, planned.storage, planned.optimizer, parameter.trainable, regather, count, steps
            )
        return stored


def _owes_sums_only(spec: Spec) -> bool:
    return bool(spec.partial) and not any(spec.dims) and all(op == "sum" for _, op in spec.partial)
