"""The context that the functions of a stage share while they are lowered: its plan, its templates, and how gradients
reach the store."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass

import torch

from autopar.errors import PlanError
from autopar.ir.lowered import LoweredTemplate, StoredParameter
from autopar.ir.program import Call, Program, Template, ValueRef
from autopar.ir.spec import Spec
from autopar.ir.steps import RuntimeStep
from autopar.ir.types import TensorType
from autopar.passes.lower.body import PlannedTemplate
from autopar.passes.lower.convert import table_steps
from autopar.passes.lower.rooms import rooms
from autopar.passes.lower.template import lines_in_pieces, lower_in_order, lower_in_pieces, lower_template
from autopar.passes.price.compression import compression_of
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.memo import Memo
from autopar.passes.rules.runs import owed_block
from autopar.plan import StagePlan, TemplatePlan
from autopar.runtime.gradients.bucket_sizes import BUCKETED
from autopar.runtime.gradients.gather import GATHERED


@dataclass(frozen=True)
class GradientSteps:
    """How the gradients of one parameter reach its optimizer spec.

    contributions: how many arrive per microbatch; steps: from there in the store; arrival: the spec that each is
    converted to before (None: as it comes).
    """

    contributions: int = 0
    steps: tuple[RuntimeStep, ...] = ()
    arrival: Spec | None = None


@dataclass(frozen=True)
class ParameterUse:
    """A parameter as calls of a template want it: the slot it is passed in, the steps from its storage and the dtype it is
    cast to before (None: as stored), and the type and spec that come out. stem: of its local name. tier: where the shard
    rests ("": on the device). narrow: a copy in the dtype rests beside it."""

    slot: int
    steps: tuple[RuntimeStep, ...]
    dtype: torch.dtype | None
    stem: str
    type: TensorType
    wanted: Spec
    tier: str = ""
    narrow: bool = False

    @property
    def moves(self) -> bool:
        """Whether what is stored is not what is wanted, where it is wanted."""
        return bool(self.steps) or (self.dtype is not None and not self.narrow) or bool(self.tier)


@dataclass
class StageContext:
    """A stage's plan and what lowering derives from it once."""

    program: Program
    stage: StagePlan
    pricer: Pricer
    rules: RuleBook
    split: bool
    compression: str = ""

    def __post_init__(self) -> None:
        self._own = Memo()
        program, stage = self.program, self.stage
        if set(program.templates) - set(stage.templates) or set(program.parameters) - set(stage.parameters):
            raise PlanError("the plan misses templates or parameters of this model; compile again without plan=")
        self.narrow = _narrow(program, stage)
        self.kinds = _kinds(program, stage, self.narrow)
        needs_backward = {program.calls[i].template for i in program.backward_calls}
        self.templates: dict[str, LoweredTemplate] = {
            name: self._template(t, name in needs_backward) for name, t in program.templates.items()
        }
        self.gradients = {name: self._gradient_steps(name) for name in program.trained}

    def _template(self, template: Template, backward: bool) -> LoweredTemplate:
        """Stages that run a template alike on alike meshes share what lowering makes of it, and plans that differ in overlap and
        pieces alone share its lines in order."""
        plan = self.stage.templates[template.name]
        given = template, plan, self.pricer, self.rules
        lines, key = in_order(*given, backward, self.split), _alike(template, plan, self.pricer, backward, self.split)
        overlapped = lower_template, *key, plan.overlap, plan.insists
        whole = self.pricer.memo.get(overlapped, lambda: lower_template(lines, *given))
        # Where B and W are apart, or values rest in memory tiers, nothing is in pieces.
        if plan.pieces == 1 or self.split or plan.offload:
            return whole

        def cut() -> LoweredTemplate:
            return lower_in_pieces(lines, whole, in_pieces(*given, backward), PlannedTemplate(*given))

        return self.pricer.memo.get((lower_in_pieces, *overlapped, plan.pieces, plan.cut), cut)

    def steps(
        self, type_: TensorType, before: Spec, after: Spec, joined: tuple[str, ...] = (), compression: str = ""
    ) -> tuple[RuntimeStep, ...] | None:
        """The cheapest conversion as the runtime's tables have it; None where it has no table form."""
        key = type_, before, after, joined, compression
        return self._own.get(key, lambda: table_steps(self.pricer, *key))

    def number(self, index: int) -> int:
        """Number of a call in the whole program."""
        return index + self.program.first_call

    def planned(self, template: str, value: str) -> Spec:
        """The plan's spec of a placeholder, as it is given to the template."""
        try:
            return self.stage.templates[template].given(value)
        except KeyError:
            raise PlanError(f"the plan has no spec for {template}.{value}; it is for another model") from None

    def tangent(self, ref: ValueRef) -> Spec | None:
        """Spec in which the gradient of a call's output is wanted."""
        template = self.program.template_of(self.program.calls[ref.index])
        tangent = template.tangents[ref.output]
        return None if tangent is None else self.planned(template.name, tangent)

    def parameter_uses(self, call: Call, backward: bool) -> tuple[ParameterUse, ...]:
        """The reads of a call's parameters; calls of a template whose parameters rest alike read alike. Raises
        PlanError where no gather leads there."""
        key = "uses", call.template, backward, tuple(self.kinds[name] for name in call.params)
        return self._own.get(key, lambda: self._parameter_uses(call, backward))

    def _parameter_uses(self, call: Call, backward: bool) -> tuple[ParameterUse, ...]:
        template = self.program.template_of(call)
        specs = self.stage.templates[template.name].specs
        places = [(slot, "late" if backward else "use") for slot in range(len(call.params))]
        if backward:
            places += [(slot, "use") for slot in self.templates[call.template].again_params]
        uses = []
        for slot, hub in places:
            name, wanted = call.params[slot], specs.get(f"{template.params[slot]}@{hub}")
            if wanted is None:
                continue
            stored = self.stage.parameters[name]
            type_ = template.type_of(template.params[slot])
            steps = self.steps(type_, stored.storage, wanted)
            if steps is None:
                raise PlanError(f"parameter {name}: no gather leads from {stored.storage} to {wanted}")
            dtype = None if type_ == self.program.parameters[name].type else type_.dtype
            narrow = name in self.narrow and dtype is not None
            uses.append(ParameterUse(slot, steps, dtype, template.params[slot], type_, wanted, stored.tier, narrow))
        return tuple(uses)

    def _gradient_steps(self, name: str) -> GradientSteps:
        """Contributions that all arrive alike are summed as they come, and reduced in the store."""
        places = tuple((self.program.calls[c].template, slot) for c, slot in self.program.gradient_places[name])
        return self._own.get(("gradient", self.kinds[name], places), lambda: self._steps_from(name, places))

    def _steps_from(self, name: str, places: Collection[tuple[str, int]]) -> GradientSteps:
        """places: (template, slot) of the calls that give the parameter a gradient."""
        specs = {self.templates[template].param_grads[slot] for template, slot in places}
        target = self.stage.parameters[name].optimizer
        first, type_ = next(iter(specs)), self.program.parameters[name].type
        if len(specs) == 1 and first is not None:
            steps = self.steps(type_, first, target, BUCKETED, self.compression)
            if steps is not None:
                return GradientSteps(len(places), steps)
        arrival = target
        if target.run:
            owed = tuple(sorted({p for spec in specs if spec is not None for p in spec.partial}))
            arrival = owed_block(Spec(target.dims, owed), target)
        return GradientSteps(len(places), self.steps(type_, arrival, target, BUCKETED, self.compression) or (), arrival)

    def stored(self) -> dict[str, StoredParameter]:
        """How every parameter of the stage rests. Raises PlanError where no gather leads back to storage."""
        stored = {}
        foreign = self.program.boundary.foreign if self.program.boundary else frozenset()
        room_of = self._rooms(foreign)
        for name, parameter in self.program.parameters.items():
            planned = self.stage.parameters[name]
            regather = self.steps(parameter.type, planned.optimizer, planned.storage, GATHERED)
            if regather is None:
                raise PlanError(f"parameter {name}: no gather leads from {planned.optimizer} to {planned.storage}")
            gradient = self.gradients.get(name, GradientSteps())
            stored[name] = StoredParameter(
                name,
                parameter.type,
                planned.storage,
                planned.optimizer,
                parameter.trainable,
                regather,
                gradient.contributions,
                gradient.steps,
                name not in foreign,
                planned.tier,
                planned.optimizer_tier,
                self._compression(parameter.type, gradient.steps)
                if not planned.tier and planned.optimizer.owner is None
                else "",
                self.narrow.get(name),
                planned.by_microbatch and bool(gradient.steps),
                room_of.get(name, ""),
            )
        return stored

    def _rooms(self, foreign: Collection[str]) -> dict[str, str]:
        """The rooms whose parameters all rest alike, on the device, and in this stage alone."""
        found, ways = rooms(self.program), dict[str, set[int]]()
        for name, room in found.items():
            stored = self.stage.parameters[name]
            apart = bool(stored.tier or stored.storage.run) or name in foreign
            ways.setdefault(room, set()).add(-1 if apart else self.kinds[name])
        return {name: room for name, room in found.items() if len(ways[room]) == 1 and -1 not in ways[room]}

    def _compression(self, type_: TensorType, steps: Collection[RuntimeStep]) -> str:
        """How a gradient travels that is reduced by these steps."""
        sums = any(s.kind in BUCKETED and math.prod(self.pricer.mesh.sizes[a] for a in s.axes) > 1 for s in steps)
        return compression_of(type_, self.compression) if sums else ""


def in_order(
    template: Template, plan: TemplatePlan, pricer: Pricer, rules: RuleBook, backward: bool, split: bool = False
) -> LoweredTemplate:
    """A template's lines whole and in order (`lower_in_order`), made once for plans that differ in overlap and pieces alone."""

    def lines() -> tuple[LoweredTemplate, TemplatePlan]:  # the plan is kept, so that no id is given again
        return lower_in_order(template, plan, pricer, rules, backward, split), plan

    return pricer.memo.get((lower_in_order, *_alike(template, plan, pricer, backward, split)), lines)[0]


def in_pieces(
    template: Template, plan: TemplatePlan, pricer: Pricer, rules: RuleBook, backward: bool
) -> LoweredTemplate:
    """The same lines in the pieces that the plan asks for (`lines_in_pieces`)."""

    def lines() -> LoweredTemplate:
        whole = in_order(template, plan, pricer, rules, backward)
        return lines_in_pieces(whole, PlannedTemplate(template, plan, pricer, rules))

    key = lines_in_pieces, *_alike(template, plan, pricer, backward, False), plan.pieces, plan.cut
    return pricer.memo.get(key, lines)


def _alike(template: Template, plan: TemplatePlan, pricer: Pricer, backward: bool, split: bool) -> tuple[Hashable, ...]:
    """All that a template's lines in order follow from."""
    tables, offload = (id(plan.strategies), id(plan.specs), plan.recompute), (plan.offload, plan.offload_tier)
    return template, tables, offload, pricer.mesh.axes, backward, split


def _narrow(program: Program, stage: StagePlan) -> dict[str, torch.dtype]:
    """The dtypes of the copies that rest beside parameters: that in which all calls read it that do not read it as stored."""
    planned = {name for name, p in stage.parameters.items() if p.narrow and not p.tier}
    read = {(name, dtype) for name, dtype in narrow_reads(program) if name in planned}
    times = Counter(name for name, _ in read)
    return {name: dtype for name, dtype in read if times[name] == 1}


def narrow_reads(program: Program) -> Iterator[tuple[str, torch.dtype]]:
    """The parameters that calls read in another dtype than they are stored in, with that dtype."""
    for call in program.calls:
        template = program.template_of(call)
        for param, name in zip(template.params, call.params, strict=True):
            type_ = template.type_of(param)
            if type_ != program.parameters[name].type:
                yield name, type_.dtype


def _kinds(program: Program, stage: StagePlan, narrow: Mapping[str, torch.dtype]) -> dict[str, int]:
    """Numbers of the stage's parameters, the same for those that are of one type and rest alike."""
    numbers: dict[tuple[object, ...], int] = {}
    kinds = {}
    for name, parameter in program.parameters.items():
        planned = stage.parameters[name]
        kind = parameter.type, planned.storage, planned.optimizer, planned.tier, narrow.get(name)
        kinds[name] = numbers.setdefault(kind, len(numbers))
    return kinds
