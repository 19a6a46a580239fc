"""The state that rests in memory tiers: per parameter its optimizer state (or all of it), per template the saved values.

Forced kinds become decisions of a stage's plan here; nothing is solved. What is used most goes to the fastest tier:
saved values (every microbatch), then parameters with their gradients, then optimizer state (once per step), each thing
whole, in the first tier that still has room. Saved values that are worth moving own memory on the device: batch inputs,
buffers, parameters and views of these rest there anyway, and single numbers do not pay for their transfer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from autopar.cluster.device import DeviceSpec
from autopar.cluster.tiers import Tier, place
from autopar.errors import NoRoomError
from autopar.ir.program import Program, Template, operand_values, resolve
from autopar.ir.resting import planned
from autopar.ir.setting import Setting
from autopar.ops.registry import find
from autopar.passes.rules.hubs import flow
from autopar.passes.rules.recomputation import recomputation
from autopar.passes.rules.structure import Root, value_root
from autopar.plan import ParameterPlan, StagePlan, TemplatePlan

LEAST_BYTES = 1024
"""Smaller values (global bytes) stay on the device."""


def offloaded(program: Program, stage: StagePlan, device: DeviceSpec, setting: Setting) -> StagePlan:
    """The stage with what `setting.offload` names in the device's tiers. Raises InfeasibleError where they are too small,
    ClusterError where the device has none."""
    if not setting.offload or not program.training:
        return stage
    tiers = device.some_tiers()
    templates, used = stage.templates, dict.fromkeys((t.name for t in tiers), 0.0)
    if "activations" in setting.offload:
        held = least_parked_bytes(program, stage, setting)
        tier = next((t for t in tiers if held <= t.capacity_bytes), None)
        if tier is None:
            largest = max(t.capacity_bytes for t in tiers)
            raise NoRoomError(
                f"saved values of {held / 1e9:.3g} GB per rank at least are to rest in one memory tier, the largest has "
                f"{largest / 1e9:.3g} GB per rank; use more microbatches or ranks, recompute, or offload less"
            )
        used[tier.name] += held
        names = {program.calls[i].template for i in program.backward_calls}
        leaving = {name: parkable(program, name, t) for name, t in stage.templates.items() if name in names}
        templates = {
            name: replace(t, offload=leaving[name], offload_tier=tier.name) if leaving.get(name) else t
            for name, t in stage.templates.items()
        }
    return replace(stage, templates=templates, parameters=_parameters(program, stage, tiers, used, setting))


def parkable(program: Program, name: str, plan: TemplatePlan) -> tuple[str, ...]:
    """The values of a template that may be parked: what it keeps under the plan, and its inputs (kept where all else is
    made again)."""
    template = program.templates[name]
    calls = [call for call in program.calls if call.template == name]
    resting = {
        value
        for slot, value in enumerate(template.inputs)
        if all(
            ref.kind == "buffer" or (ref.kind == "input" and program.boundary_tensor(ref) is None)
            for ref in (call.inputs[slot] for call in calls)
        )
    }
    resting |= _views(template, {*resting, *template.params})
    kept = recomputation(template, flow(template), plan.recompute).kept
    return tuple(
        value
        for value in dict.fromkeys((*kept, *template.inputs))
        if value not in resting and value not in template.params and template.type_of(value).nbytes >= LEAST_BYTES
    )


def _views(template: Template, resting: set[str]) -> set[str]:
    """The resting values, and what ops that only look differently at memory make of them."""
    seen = set(resting)
    for node in template.ops:
        definition = find(template.op_calls[node.name].op)
        if definition is not None and definition.free and any(v in seen for v in list(operand_values(node))[:1]):
            seen.add(node.name)
    return {v for v in template.nodes if resolve(template.nodes[v])[0].name in seen} | seen


def least_parked_bytes(program: Program, stage: StagePlan, setting: Setting) -> float:
    """Bytes that a rank parks at least of one microbatch: every storage once, as its spec says (or shared by all ranks). Where
    other ranks run a part of the program (pipelines), nothing is known of what this one's will be."""
    if setting.in_flight > 1:
        return 0.0
    parked: dict[Root, float] = {}
    for i in program.backward_calls:
        template, plan = program.templates[program.calls[i].template], stage.templates[program.calls[i].template]
        forms = recomputation(template, flow(template), plan.recompute).kept
        for value in forms.keys() & set(parkable(program, template.name, plan)):
            type_, spec = template.type_of(value), plan.specs.get(forms[value])
            root, shown = value_root(program, i, value)
            nbytes = min(spec.local_bytes(type_, stage.mesh) if spec else math.inf, shown / stage.mesh.size)
            if root is not None:
                parked[root] = max(parked.get(root, 0.0), nbytes)
    return float(sum(parked.values()))


def _parameters(
    program: Program, stage: StagePlan, tiers: Iterable[Tier], used: dict[str, float], setting: Setting
) -> dict[str, ParameterPlan]:
    """The parameters' tiers: stored shards first, then optimizer state, the largest first."""
    placed = dict(stage.parameters)
    sizes: dict[str, dict[str, float]] = {"parameters": {}, "optimizer": {}}
    for name, p in placed.items():
        names = (name,) if name in program.gradient_places else ()
        held = planned(program.parameters[name].type, p.storage, p.optimizer, stage.mesh, bool(names), names)
        for row in held.rows(setting):
            sizes[row.moves][name] = sizes[row.moves].get(name, 0.0) + row.nbytes
    wanted: dict[str, float] = {}
    if "parameters" in setting.offload:
        wanted |= {f"value {name}": nbytes for name, nbytes in sizes["parameters"].items()}
    if "optimizer" in setting.offload and setting.optimizer.elements:
        largest_first = sorted(sizes["optimizer"].items(), key=lambda kv: (-kv[1], kv[0]))
        wanted |= {f"state {name}": nbytes for name, nbytes in largest_first}
    for what, tier in place(wanted, list(tiers), used).items():
        kind, _, name = what.partition(" ")
        plan = placed[name]
        placed[name] = replace(plan, tier=tier) if kind == "value" else replace(plan, optimizer_tier=tier)
    return placed
