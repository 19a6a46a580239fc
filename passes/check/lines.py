"""The checker: types every lowered line again, independently of the planner, before anything is written.

From the specs of a line's operands alone it derives what the op's rule says of the results, and compares with what
lowering recorded; for collectives it replays what they do to a spec. It knows rules, not plans: a solver, a lowering
or a hand-edited plan that is wrong is caught here. All ranks of a stage run the same lines without branches, so
collectives match in order; that each one's axis exists on the mesh is checked too.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import CheckError
from autopar.ir.call import OpCall, Operand
from autopar.ir.lowered import Function, Line, LoweredProgram, LoweredStage, Port, Ref, Row
from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.ops.registry import find
from autopar.passes.rules.book import RuleBook
from autopar.passes.schedule.proof import check_table

Typed = tuple[TensorType, Spec]


def check_program(lowered: LoweredProgram, rules: RuleBook) -> None:
    """Every stage, both ends of every transfer, and the action table. Raises CheckError."""
    for stage in lowered.stages:
        check(stage, rules)
    for transfer in lowered.transfers:
        for s, spec in ((transfer.source, transfer.source_spec), (transfer.target, transfer.target_spec)):
            if spec.partial or not spec.divides(transfer.type.shape, lowered.stages[s].mesh):
                raise CheckError(
                    f"transfer {transfer.name}: {spec.show(transfer.type)} cannot cross to or from stage {s}"
                )
    split = any(action.kind == "W" for row in lowered.table for action in row)
    stages = lowered.stages
    check_table(lowered.table, lowered.graph, stages[0].microbatches, training=stages[0].training, split=split)


def check(stage: LoweredStage, rules: RuleBook) -> None:
    """Types every line of a stage. Raises CheckError naming function and line."""
    for template in stage.templates.values():
        produced = _function(template.forward, stage.mesh, rules, dict(template.forward.arg_types))
        if template.backward is not None:
            start = dict(template.backward.arg_types)
            _same(f"{template.name}: backward", template.saved, produced, start)
            produced = _function(template.backward, stage.mesh, rules, start)
        if template.weights is not None:
            start = dict(template.weights.arg_types)
            _same(f"{template.name}: weights", template.later, produced, start)
            _function(template.weights, stage.mesh, rules, start)
    for function in stage.functions:
        made = _function(function, stage.mesh, rules, dict(function.arg_types))
        ends: dict[str, tuple[Row | Port, ...]] = {
            "forward": (*stage.outputs, *stage.sent),
            "backward": stage.gradients_sent,
        }
        leaving = ends.get(function.name, ())
        for name, port in zip(function.returns, leaving, strict=False):
            if name is not None and made[name] != (port.type, port.spec):
                raise CheckError(f"{function.name}: {name} leaves as {made[name][1]}, said to be {port.spec}")
    for p in stage.parameters.values():
        for fine, coarse in zip(p.optimizer.dims, p.storage.dims, strict=True):
            if fine[: len(coarse)] != coarse:
                raise CheckError(
                    f"parameter {p.name}: optimizer spec {p.optimizer} does not refine storage {p.storage}"
                )


def _same(where: str, names: tuple[str, ...], made: dict[str, Typed], read: dict[str, Typed]) -> None:
    for name in names:
        if name not in made:
            raise CheckError(f"{where} reads {name}, which nothing makes before")
        if read.get(name, made[name]) != made[name]:
            raise CheckError(f"{where} reads {name} as {read[name][1]}, it is kept as {made[name][1]}")


def _function(function: Function, mesh: Mesh, rules: RuleBook, known: dict[str, Typed]) -> dict[str, Typed]:
    for line in function.lines:
        for name in line.reads():
            if name not in known and not line.op.startswith(("call.", "tier.")):
                raise CheckError(f"{function.name}: {line.op} reads {name} before it is made")
        derived = _derive(line, mesh, rules, known, function.name)
        for i, out in enumerate(line.outs):
            type_ = line.types[i] if i < len(line.types) else None
            spec = line.specs[i] if i < len(line.specs) else None
            if derived is not None and spec is not None and derived[i] != spec:
                raise CheckError(
                    f"{function.name}: {out} = {line.op} gives {derived[i]}, lowering says {spec} (from {line.source})"
                )
            if type_ is not None and spec is not None:
                if not spec.divides(type_.shape, mesh):
                    raise CheckError(f"{function.name}: {out} of shape {type_.shape} does not divide as {spec}")
                known[out] = (type_, spec)
    return known


def _derive(line: Line, mesh: Mesh, rules: RuleBook, known: dict[str, Typed], where: str) -> list[Spec | None] | None:
    if line.op.startswith("comm."):
        return [_collective(line, mesh, known, where)]
    if line.op == "grads.sum":
        source, axes = line.args
        type_, spec = known[source.name]
        if spec.partial != tuple((axis, "sum") for axis in axes) or any(spec.dims):
            raise CheckError(
                f"{where}: {source.name} {spec.show(type_)} does not owe a sum over {', '.join(axes)} alone"
            )
        return [spec.without_partial()]
    if line.op.split(".")[0] in ("call", "params", "grads", "buffer", "tier"):
        return None
    reads = [known[n] for n in line.reads()]
    rule = rules.rule(_global_call(line, [t for t, _ in reads]))
    taken: dict[str, tuple[str, ...]] = {}
    owed: dict[str, set[int]] = {}
    for i, ((_, spec), labels) in enumerate(zip(reads, rule.operands, strict=True)):
        for axes, dim in zip(spec.dims, labels or ((),) * len(spec.dims), strict=True):
            lead = next((f for f in dim if f in rule.shardable), None)
            if axes and lead is None:
                raise CheckError(f"{where}: operand {i} of {line.op} is sharded where the rule `{rule}` forbids it")
            if lead is not None and taken.setdefault(lead, axes) != axes:
                raise CheckError(
                    f"{where}: operands of {line.op} disagree about factor {lead}: {taken[lead]} and {axes}"
                )
        for axis, _ in spec.partial:
            owed.setdefault(axis, set()).add(i)
    for labels, out in zip(rule.results, line.specs, strict=True):
        for axes, dim in zip(out.dims if out else (), labels or (), strict=False):
            lead = next((f for f in dim if f in rule.shardable), None)
            if lead is not None and lead not in rule.contracted:
                taken.setdefault(lead, axes)
    for axis, operands in owed.items():
        if frozenset(operands) not in rule.linear:
            raise CheckError(f"{where}: {line.op} is not linear in operands {sorted(operands)}, owed over {axis}")
    return [_result(rule, i, taken, owed) if labels is not None else None for i, labels in enumerate(rule.results)]


def _result(rule: object, index: int, taken: dict[str, tuple[str, ...]], owed: dict[str, set[int]]) -> Spec:
    labels = rule.results[index]  # type: ignore[attr-defined]
    held = {f for dim in labels for f in dim}
    dims = tuple(next((taken[f] for f in dim if taken.get(f)), ()) for dim in labels)
    partial = {(axis, "sum") for axis in owed}
    for f, axes in taken.items():
        if f not in held and f in rule.contracted:  # type: ignore[attr-defined]
            partial |= {(axis, rule.factors[f].reduce) for axis in axes}  # type: ignore[attr-defined]
    return Spec(dims, tuple(sorted(partial)))


def _global_call(line: Line, operands: list[TensorType]) -> OpCall:
    """The op on global shapes: local shape arguments back to global ones, tensors to operands."""
    order = iter(range(len(operands)))

    def place(arg: object) -> object:
        if isinstance(arg, Ref):
            return Operand(next(order))
        if isinstance(arg, (list, tuple)):
            return [place(a) for a in arg]
        return arg

    arguments = {k: place(v) for k, v in line.kwargs.items()}
    call = OpCall(line.op, arguments, tuple(operands), tuple(line.types))
    definition = find(line.op)
    if definition is None or definition.globalize is None:
        return call
    return replace(call, arguments={**arguments, **definition.globalize(call)})


def _collective(line: Line, mesh: Mesh, known: dict[str, Typed], where: str) -> Spec:
    kind = line.op.removeprefix("comm.")
    source, axis, *rest = line.args
    if axis not in mesh.sizes:
        raise CheckError(f"{where}: {kind} over axis {axis}, the mesh has {', '.join(mesh.names)}")
    type_, spec = known[source.name]
    dims = list(spec.dims)
    partial = dict(spec.partial)

    def need(condition: bool, what: str) -> None:
        if not condition:
            raise CheckError(f"{where}: {kind} over {axis} of {source.name} {spec.show(type_)}: {what}")

    if kind == "all_gather":
        need(bool(dims[rest[0]]) and dims[rest[0]][-1] == axis, "the axis is not the minor-most of that dim")
        dims[rest[0]] = dims[rest[0]][:-1]
    elif kind == "slice":
        need(axis not in spec.axes, "the axis is in use")
        dims[rest[0]] = (*dims[rest[0]], axis)
    elif kind == "all_reduce":
        need(partial.pop(axis, None) == rest[0], "nothing of that kind is owed over the axis")
    elif kind == "reduce_scatter":
        need(partial.pop(axis, None) == rest[1], "nothing of that kind is owed over the axis")
        dims[rest[0]] = (*dims[rest[0]], axis)
    elif kind == "all_to_all":
        split, joined = rest
        need(bool(dims[joined]) and dims[joined][-1] == axis, "the axis is not the minor-most of the joined dim")
        dims[joined] = dims[joined][:-1]
        dims[split] = (*dims[split], axis)
    else:
        need(axis not in spec.axes, "the axis is in use")
        partial[axis] = "sum"
    return Spec(tuple(dims), tuple(sorted(partial.items())))
