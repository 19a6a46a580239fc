"""The checker: types every lowered line again, independently of the planner, before anything is written.

From the specs of a line's operands alone it derives what the op's rule says of the results, and compares with what
lowering recorded; for collectives it replays what they do to a spec. It knows rules, not plans: a solver, a lowering
or a hand-edited plan that is wrong is caught here. All ranks of a stage run the same lines without branches, so
collectives match in order; that each one's axis exists on the mesh is checked too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from autopar.errors import CheckError
from autopar.ir import lines as ir
from autopar.ir.actions import splits_backward
from autopar.ir.call import OpCall, Operand
from autopar.ir.lines import Compute, Convert, Function, Line, Ref, label
from autopar.ir.lowered import BoundaryEnd, LoweredProgram, LoweredStage, LoweredTemplate, Row
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Carried, Rule
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.ops.registry import AlongAxis, find
from autopar.passes.check.calls import Typed, check_calls
from autopar.passes.check.steps import check_steps, stepped
from autopar.passes.rules.book import RuleBook
from autopar.passes.schedule.proof import check_table


def check_program(lowered: LoweredProgram, rules: RuleBook) -> None:
    """Every stage, both ends of every transfer, and the action table. Raises CheckError."""
    templates = {(t, stage.mesh.axes): stage.mesh for stage in lowered.stages for t in stage.templates.values()}
    for (template, _), mesh in templates.items():
        _check_template(template, mesh, rules)
    for stage in lowered.stages:
        _check_stage(stage, rules)
    for transfer in lowered.transfers:
        for s, spec in ((transfer.source, transfer.source_spec), (transfer.target, transfer.target_spec)):
            if spec.partial or not spec.divides(transfer.type.shape, lowered.stages[s].mesh):
                raise CheckError(
                    f"transfer {transfer.name}: {spec.show(transfer.type)} cannot cross to or from stage {s}"
                )
    split = splits_backward(lowered.table)
    stages = lowered.stages
    check_table(lowered.table, lowered.graph, stages[0].microbatches, training=stages[0].training, split=split)


def check(stage: LoweredStage, rules: RuleBook) -> None:
    """Types every line of a stage. Raises CheckError naming function and line."""
    for template in stage.templates.values():
        _check_template(template, stage.mesh, rules)
    _check_stage(stage, rules)


def _check_template(template: LoweredTemplate, mesh: Mesh, rules: RuleBook) -> None:
    """The functions of a template."""
    typed = _function(template.forward, mesh, rules, dict(template.forward.arg_types))
    for function, kept in ((template.backward, template.saved), (template.weights, template.later)):
        if function is not None:
            arguments = dict(function.arg_types)
            _same(
                f"{template.name}: {'weights' if function is template.weights else 'backward'}", kept, typed, arguments
            )
            typed = _function(function, mesh, rules, arguments)


def _check_stage(stage: LoweredStage, rules: RuleBook) -> None:
    """The functions that a stage's actions run, what leaves them, and how its parameters rest."""
    typed_by_function: dict[str, dict[str, Typed]] = {}
    for function in stage.functions:
        typed = _function(function, stage.mesh, rules, dict(function.arg_types))
        typed_by_function[function.name] = typed
        ends: dict[str, tuple[Row | BoundaryEnd, ...]] = {
            "forward": (*stage.outputs, *stage.sent),
            "backward": stage.gradients_sent,
        }
        leaving = ends.get(function.name, ())
        for name, end in zip(function.returns, leaving, strict=False):
            if name is not None and typed[name] != (end.type, end.spec):
                raise CheckError(f"{function.name}: {name} leaves as {typed[name][1]}, said to be {end.spec}")
    for row in stage.outputs:
        if row.spec.partial:
            raise CheckError(f"output {row.index} leaves stage {stage.index} as {row.spec}, which owes something")
    check_calls(stage, typed_by_function)
    for p in stage.parameters.values():
        if not p.optimizer.refines(p.storage):
            raise CheckError(f"parameter {p.name}: optimizer spec {p.optimizer} does not refine storage {p.storage}")
        check_steps(p, "the gather after the step", p.optimizer, p.regather, p.storage, stage.mesh)


def _same(where: str, names: tuple[str, ...], kept: dict[str, Typed], read: dict[str, Typed]) -> None:
    """Raises CheckError where a function does not read a value as the one before keeps it."""
    for name in names:
        if name not in kept:
            raise CheckError(f"{where} reads {name}, which nothing makes before")
        if read.get(name, kept[name]) != kept[name]:
            raise CheckError(f"{where} reads {name} as {read[name][1]}, it is kept as {kept[name][1]}")


def _function(function: Function, mesh: Mesh, rules: RuleBook, typed: dict[str, Typed]) -> dict[str, Typed]:
    """`typed`, at first what is known of the arguments, with every value that the lines make. A name is given once, to an
    argument or by one line; a conversion that is started is waited for once."""
    coming: dict[str, Line] = {}
    given = {*function.args, *typed}
    handles = {line.outs[0] for line in function.lines if isinstance(line, ir.Start)}
    for line in function.lines:
        for name in line.reads():
            if name not in given:
                raise CheckError(f"{function.name}: {label(line)} reads {name} before it is made")
            if name in handles and not isinstance(line, (ir.GoOn, ir.Wait)):
                raise CheckError(f"{function.name}: {label(line)} reads {name}, a message that is coming")
        match line:
            case ir.Start(line=started):
                coming[line.outs[0]] = started
            case ir.GoOn(handle, started) | ir.Wait(handle, started) if coming.get(handle) != started:
                raise CheckError(
                    f"{function.name}: {label(started)} is waited for by {handle}, which does not start it"
                )
            case ir.Wait(value=handle):
                del coming[handle]
        derived = _derive(line, mesh, rules, typed, function.name)
        for i, out in enumerate(line.outs):
            if out in given:
                raise CheckError(
                    f"{function.name}: {label(line)} makes {out}, which there is already (from {line.source})"
                )
            given |= {out} - {"_"}
            type_ = line.types[i] if i < len(line.types) else None
            spec = line.specs[i] if i < len(line.specs) else None
            if derived is not None and spec is not None and derived[i] != spec:
                raise CheckError(
                    f"{function.name}: {out} = {label(line)} gives {derived[i]}, lowering says {spec} (from {line.source})"
                )
            if type_ is not None and spec is not None:
                if not spec.divides(type_.shape, mesh):
                    raise CheckError(f"{function.name}: {out} of shape {type_.shape} does not divide as {spec}")
                typed[out] = (type_, spec)
    if coming:
        raise CheckError(f"{function.name}: {', '.join(coming)} is started and not waited for")
    missing = [name for name in function.returns if name is not None and name not in given]
    if missing:
        raise CheckError(f"{function.name} gives out {missing[0]}, which nothing makes")
    return typed


def _derive(line: Line, mesh: Mesh, rules: RuleBook, typed: dict[str, Typed], where: str) -> list[Spec | None] | None:
    """The specs of what a line makes, from those of what it reads; None: the line's own are taken."""
    match line:
        case Compute():
            return _computed(line, mesh, rules, typed, where)
        case Convert():
            return [_converted(line, mesh, typed, where)]
        case ir.Wait(line=started):
            return _derive(started, mesh, rules, typed, where)
        case ir.Cut() | ir.Join():
            return _pieces(line, typed, where)
        case ir.SumLoss(value=value, axes=axes):
            type_, spec = typed[value]
            if spec.partial != tuple((axis, "sum") for axis in axes) or any(spec.dims):
                raise CheckError(f"{where}: {value} {spec.show(type_)} does not owe a sum over {', '.join(axes)} alone")
            return [spec.without_partial()]
    return None


def _pieces(line: ir.Cut | ir.Join, typed: dict[str, Typed], where: str) -> list[Spec | None]:
    """Pieces are equal, and are sharded and owed as the whole is, whose rows they have on every rank. Raises CheckError."""
    made = [(type_, spec) for _, type_, spec in line.made() if type_ is not None and spec is not None]
    read = [typed[name] for name in line.reads()]
    (type_, spec), parts = (read[0], made) if isinstance(line, ir.Cut) else (made[0], read)
    shape = list(type_.shape)
    if line.dim is not None:
        shape[line.dim] //= len(parts)
    rest = line.dim is not None and type_.shape[line.dim] % len(parts)
    if rest or parts != [(TensorType(tuple(shape), type_.dtype), spec)] * len(parts):
        raise CheckError(f"{where}: {label(line)} of {', '.join(line.reads())} does not have equal pieces of {type_}")
    return [spec] * len(line.outs)


def _computed(line: Compute, mesh: Mesh, rules: RuleBook, typed: dict[str, Typed], where: str) -> list[Spec | None]:
    """The specs of a line's results by the op's rule, its operands being sharded as they are."""
    operands = [typed[n] for n in line.reads()]
    rule = rules.rule(_global_call(line, [t for t, _ in operands]))
    carried = _carried(line, rule, where)
    divided = {*rule.shardable, *rule.inner, *(f for one in carried.values() for f in one.factors)}
    taken: dict[str, tuple[str, ...]] = {}
    owed: dict[str, set[int]] = {}
    for i, ((_, spec), labels) in enumerate(zip(operands, rule.operands, strict=True)):
        for axes, dim in zip(spec.dims, labels or ((),) * len(spec.dims), strict=True):
            by_factor = _by_factor(dim, axes, divided, rule, mesh)
            if by_factor is None:
                raise CheckError(f"{where}: operand {i} of {line.op} is sharded where the rule `{rule}` forbids it")
            for factor, own in by_factor.items():
                if taken.setdefault(factor, own) != own:
                    raise CheckError(
                        f"{where}: operands of {line.op} disagree about factor {factor}: {taken[factor]} and {own}"
                    )
        for axis, _ in spec.partial:
            owed.setdefault(axis, set()).add(i)
    for labels, out in zip(rule.results, line.specs, strict=True):
        for axes, dim in zip(out.dims if out else (), labels or (), strict=False):
            for factor, own in (_by_factor(dim, axes, divided, rule, mesh) or {}).items():
                if factor not in rule.contracted:
                    taken.setdefault(factor, own)
    _check_carried(line, rule, carried, taken, mesh, where)
    summed = (factor for factor in taken if rule.added and factor in rule.summed)
    for axis in {axis for factor in summed for axis in taken[factor]}:
        if owed.pop(axis, set()) != rule.added:
            raise CheckError(f"{where}: {line.op} adds operands {sorted(rule.added)} once for every rank along {axis}")
    for axis, owing in owed.items():
        if frozenset(owing) not in rule.linear:
            raise CheckError(f"{where}: {line.op} is not linear in operands {sorted(owing)}, owed over {axis}")
    results = enumerate(rule.results)
    return [_result(rule, i, taken, owed, carried) if labels is not None else None for i, labels in results]


def _by_factor(
    dim: Sequence[str], axes: tuple[str, ...], divided: Collection[str], rule: Rule, mesh: Mesh
) -> dict[str, tuple[str, ...]] | None:
    """Which axes of a dim shard each of its factors that may be: the next factor is cut where those before it are cut into
    single indices. None where axes are left over."""
    by_factor: dict[str, tuple[str, ...]] = {}
    rest = list(axes)
    for factor in dim:
        if factor not in divided:
            break
        size, parts, own = rule.factors[factor].size, 1, list[str]()
        while rest and parts < size:
            own.append(rest.pop(0))
            parts *= mesh.sizes[own[-1]]
        by_factor[factor] = tuple(own)
        if parts < size:
            break
    return None if rest else by_factor


def _carried(line: Compute, rule: Rule, where: str) -> dict[str, Carried]:
    """The choices with messages that axes take. Raises CheckError for one that the rule does not have, and where the op is told
    of other axes than these."""
    for _, choice in line.carried:
        if choice not in rule.carries:
            raise CheckError(f"{where}: {line.op} has no choice {choice}; its rule is `{rule}`")
    told = sorted(value.axes for value in line.kwargs.values() if isinstance(value, AlongAxis))
    choices = dict.fromkeys(choice for _, choice in line.carried)
    taken = {choice: tuple(axis for axis, one in line.carried if one == choice) for choice in choices}
    if told != sorted(taken.values()) or any(len(axes) > rule.carries[choice].axes for choice, axes in taken.items()):
        raise CheckError(
            f"{where}: {line.op} is told to send along {told}, its choices with messages are {list(line.carried)}"
        )
    return {axis: rule.carries[choice] for axis, choice in line.carried}


def _check_carried(
    line: Compute, rule: Rule, carried: dict[str, Carried], taken: dict[str, tuple[str, ...]], mesh: Mesh, where: str
) -> None:
    """An axis that carries shards all factors of its choice, and shares none but the first with an axis that does not; a factor
    that the rule wants whole is sharded by no other axis. More axes than may cut unequal blocks cut equal ones. Raises
    CheckError."""
    for axis, one in carried.items():
        for factor in one.factors:
            axes = taken.get(factor, ())
            others = [other for other in axes if carried.get(other) != one]
            if axis not in axes or (others and (factor != one.factors[0] or factor not in rule.shardable)):
                raise CheckError(
                    f"{where}: {line.op} carries {one.choice} along {axis}, but {factor} is sharded by {axes}"
                )
            equally = sum(other == one for other in carried.values()) > one.uneven
            if equally and mesh.is_uneven(rule.factors[factor].size, axes):
                raise CheckError(f"{where}: {line.op} carries {one.choice} in blocks of {factor} of unequal size")


def _result(
    rule: Rule, index: int, taken: dict[str, tuple[str, ...]], owed: dict[str, set[int]], carried: dict[str, Carried]
) -> Spec:
    """taken: the axes that shard each factor; owed: the operands that owe a sum over each axis; carried: choices by axis."""
    labels = rule.results[index] or ()
    held = {f for dim in labels for f in dim}
    dims = tuple(tuple(axis for f in dim for axis in taken.get(f, ())) for dim in labels)
    partial = {(axis, "sum") for axis in owed}
    for f, axes in taken.items():
        if f not in held and f in rule.contracted:
            partial |= {(axis, rule.factors[f].reduce) for axis in axes if axis not in carried}
    partial |= {(axis, "sum") for axis, one in carried.items() if index in one.owed}
    return Spec(dims, tuple(sorted(partial)))


def _global_call(line: Compute, operands: list[TensorType]) -> OpCall:
    """The op on global shapes: local shape arguments back to global ones, tensors to operands."""
    order = iter(range(len(operands)))

    def place(arg: object) -> object:
        if isinstance(arg, Ref):
            return Operand(next(order))
        if isinstance(arg, (list, tuple)):
            return [place(a) for a in arg]
        return arg

    arguments = {k: place(v) for k, v in line.kwargs.items() if not isinstance(v, AlongAxis)}
    call = OpCall(line.op, arguments, tuple(operands), tuple(line.types))
    definition = find(line.op)
    if definition is None or definition.globalize is None:
        return call
    return replace(call, arguments={**arguments, **definition.globalize(call)})


def _converted(line: Convert, mesh: Mesh, typed: dict[str, Typed], where: str) -> Spec:
    """The spec of a line's value after its conversion step. Raises CheckError where the value's spec does not allow it."""
    type_, spec = typed[line.value]
    try:
        return stepped(spec, line.step, mesh, f"{line.value} {spec.show(type_)}")
    except CheckError as error:
        raise CheckError(f"{where}: {error}") from None
