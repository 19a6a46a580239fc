"""A compiled program as a `Layout`, with the decisions of its plan that a layout does not have.

What an axis of a mesh is follows from what it cuts: dims of the batch of inputs (dp), other dims of inputs (cp), parameters as
they are read beside the batch (ep), or else parameters and features (tp).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from math import prod

from torch import nn

from autopar.compiled import Compiled
from autopar.errors import AutoparError
from autopar.exchange.keys import Facts
from autopar.exchange.layout import Layout, NotCarried, StageUnits
from autopar.ir.memory_levers import MOVABLE, OFFLOAD_KINDS, RECOMPUTE_POLICIES
from autopar.ir.program import Template, operand_values
from autopar.passes.batch.microbatches import Microbatches
from autopar.passes.rules.policies import policy_set
from autopar.plan import StagePlan, TemplatePlan

_LAYER = re.compile(r"(.*\.)?\d+")


def layout_of(program: Compiled) -> tuple[Layout, tuple[NotCarried, ...]]:
    """The layout of a program's plan, and what of the plan it does not say."""
    plan = program.plan
    stage = max(plan.stages, key=lambda s: s.calls[1] - s.calls[0])
    roles, left = _roles(program), list(_apart(program))
    sizes = dict.fromkeys(("dp", "cp", "ep", "tp"), 1)
    for axis, size in stage.mesh.axes:
        sizes[roles.get(axis, "dp")] *= int(size)
    sharding = {axis for axis in stage.mesh.names if roles.get(axis, "dp") in ("dp", "ep", "cp")}
    zero, cut, unlike = _zero(program, stage, sharding)
    left += unlike
    dp = sizes["dp"] * sizes["ep"]
    names = {str(s.mesh.axes) for s in plan.stages}
    if len(names) > 1:
        left.append(NotCarried("stages have meshes of their own", f"that of the longest, {stage.mesh}, for all"))
    modules, odd = _modules(program, {axis for axis in stage.mesh.names if roles.get(axis) == "tp"})
    recompute, recomputed = _recompute(program)
    layers = _recompute_layers(program)
    if layers is None and any(t.recompute_calls is not None for s in plan.stages for t in s.templates.values()):
        recomputed.append(
            NotCarried("the first calls of a block recompute otherwise than the others", "all of them alike")
        )
    groups = len(program.lowered.graph.groups)
    batch = program.request.batch
    timed = tuple(plan.table)
    layout = Layout(
        dp=dp,
        replicas=max(1, dp // cut) if zero else 1,
        tp=sizes["tp"],
        cp=sizes["cp"],
        ep=sizes["ep"],
        pp=groups,
        virtual_stages=len(plan.stages) // groups,
        schedule=plan.schedule if groups > 1 else "",
        table=timed,
        micro_batch=max(1, batch // (dp * plan.microbatches)) if batch else None,
        global_batch=batch or None,
        stages=_units(program) if groups > 1 else (),
        sequence_parallel=_cuts_sequence(program, {a for a, role in roles.items() if role == "tp"}),
        zero=zero,
        reshard_after_forward=True if zero == 3 else None,
        recompute=recompute,
        recompute_layers=layers,
        offload=_offload(program),
        precision=plan.precision,
        modules=modules,
    )
    return layout, (*left, *odd, *recomputed)


def facts_of(program: Compiled) -> Facts:
    """The facts that formats say of the program beside its layout."""
    levels = program.cluster.levels
    per_node = min(levels[0].group_size if levels else program.plan.ranks, program.plan.ranks)
    integers = [t for _, t in program.ir.inputs if not t.dtype.is_floating_point and len(t.shape) == 2]
    sequence = int(integers[0].shape[1]) if integers else None
    blocks = layer_paths(program)
    classes = tuple(dict.fromkeys(type(program.model.get_submodule(path)).__name__ for path in blocks))
    return Facts(sequence, blocks, classes, type(program.model).__name__, per_node, program.plan.ranks)


def layer_paths(program: Compiled) -> tuple[str, ...]:
    """Paths of the repeated modules that calls are, in order."""
    return tuple(dict.fromkeys(call.path for call in program.ir.calls if _LAYER.fullmatch(call.path) and call.params))


def counts_over_the_batch(program: Compiled, dp: int) -> NotCarried | None:
    """The loss as a decision that gets lost, where that of the batch is another than the mean of the losses of equal parts of it,
    which data parallelism elsewhere takes: it divides by a number of tokens, or samples depend on each other. Else None."""
    if dp == 1 or not program.training:
        return None
    why = "the mean over data-parallel ranks and microbatches; divide by counts of the whole batch yourself"
    hangs = program.ir.microbatched
    if hangs is not None and hangs.separate:
        return NotCarried("microbatches whose samples depend on each other", why)
    try:
        parts = program.ir if program.plan.microbatches > 1 else _whole(program).at(dp)
    except AutoparError as error:
        return NotCarried(f"the step of the whole batch ({error})", why)
    if any(call.prologue for call in parts.calls):
        return NotCarried("a loss that is divided by a count over the whole batch", why)
    return None


def _whole(program: Compiled) -> Microbatches:
    """The step of the whole batch of a program that takes it at once, in the natural order."""
    captured = program.request.capture() if program.plan.order else program.captured
    return Microbatches(captured, program.rules)


def _roles(program: Compiled) -> dict[str, str]:
    """The role of each axis of the meshes, of dp, cp, ep and tp."""
    batch: set[str] = set()
    sequence: set[str] = set()
    read: set[str] = set()
    for stage in program.plan.stages:
        for call in program.ir.calls[slice(*stage.calls)]:
            template, how = program.ir.templates[call.template], stage.templates[call.template]
            for name, ref in zip(template.inputs, call.inputs, strict=True):
                if ref.kind == "input":
                    spec, dim = how.given(name), program.ir.batch_dims[ref.index]
                    for place, axes in enumerate(spec.dims):
                        (batch if place == dim else sequence).update(axes)
            for name in template.params:
                read.update(a for axes in how.specs[f"{name}@use"].dims for a in axes)
    names = {axis for stage in program.plan.stages for axis in stage.mesh.names}
    return {
        axis: ("ep" if axis in read else "dp")
        if axis in batch
        else "cp"
        if axis in sequence
        else "tp"
        if axis in read
        else "dp"
        for axis in names
    }


def _zero(program: Compiled, stage: StagePlan, axes: set[str]) -> tuple[int, int, list[NotCarried]]:
    """(stage of ZeRO of most bytes, ranks that it cuts over, parameters that are otherwise)."""
    weights: Counter[tuple[int, int]] = Counter()
    of: dict[str, tuple[int, int]] = {}
    for name, p in stage.parameters.items():
        if name not in program.ir.trained:
            continue
        stored, updated = (s.axes & axes for s in (p.storage, p.optimizer))
        whole = p.optimizer.owner is not None
        level = 3 if stored else 0 if not updated and not whole else 2 if p.by_microbatch else 1
        of[name] = level, prod(int(stage.mesh.sizes[a]) for a in updated)
        weights[of[name]] += program.ir.parameters[name].type.nbytes
    if not weights:
        return 0, 1, []
    most = weights.most_common(1)[0][0]
    others = [name for name, how in of.items() if how != most]
    words = f"{len(others)} of {len(of)} parameters, such as {others[0]}, rest otherwise" if others else ""
    return *most, [NotCarried(words, f"ZeRO {most[0]} over {most[1]} ranks, as most bytes are")] if others else []


def _modules(program: Compiled, tp: set[str]) -> tuple[dict[str, str], list[NotCarried]]:
    """Style by module path; and parameters that are read in blocks which no style says."""
    styles: dict[str, str] = {}
    odd: list[NotCarried] = []
    if not tp:
        return {}, []
    for stage in program.plan.stages:
        for call in program.ir.calls[slice(*stage.calls)]:
            template, how = program.ir.templates[call.template], stage.templates[call.template]
            dims = {p: _cut_dims(how, p, tp) for p in template.params}
            for placeholder, name in zip(template.params, call.params, strict=True):
                for alias in (name, *program.ir.parameters[name].aliases):
                    path, _, own = alias.rpartition(".")
                    module = program.model.get_submodule(path) if path else program.model
                    style = _style(module, own, dims[placeholder], template, placeholder, dims)
                    if style and own == "weight":
                        if styles.setdefault(path, style) != style:
                            odd.append(NotCarried(f"{path} is read in two ways", f"{styles[path]} for all"))
                    elif dims[placeholder] and own != "bias":
                        odd.append(
                            NotCarried(f"{name} is read in blocks of dim {dims[placeholder][0]}", "whole on every rank")
                        )
    return styles, list(dict.fromkeys(odd))


def _cut_dims(how: TemplatePlan, placeholder: str, tp: set[str]) -> tuple[int, ...]:
    """The dims of a parameter that tp cuts where it is read."""
    return tuple(dim for dim, axes in enumerate(how.specs[f"{placeholder}@use"].dims) if tp & set(axes))


def _style(
    module: nn.Module, own: str, cut: tuple[int, ...], template: Template, name: str, dims: dict[str, tuple[int, ...]]
) -> str:
    """The style of a module whose parameter is read with these dims cut; empty where no style says it."""
    if len(cut) != 1 or own != "weight":
        return ""
    if isinstance(module, nn.Embedding):
        return "vocab" if cut == (0,) else ""
    if not isinstance(module, nn.Linear):
        return ""
    if cut == (0,):
        return "colwise" if _meets(template, name, dims, (1,), forward=True) else "colwise_gather"
    return "rowwise" if _meets(template, name, dims, (0,), forward=False) else "rowwise_split"


def _meets(
    template: Template, name: str, dims: dict[str, tuple[int, ...]], cut: tuple[int, ...], forward: bool
) -> bool:
    """Whether what a parameter's product makes (or is made from) meets a product with a parameter that is cut so, before it meets
    another product."""
    of_params = {
        node.name: set(operand_values(node)) & dims.keys() for node in template.ops if node.meta["phase"] == "F"
    }
    matrices = {op: {p for p in params if len(template.type_of(p).shape) > 1} for op, params in of_params.items()}
    nodes = template.nodes
    start = [op for op, params in matrices.items() if name in params]
    seen, todo = set(start), list(start)
    while todo:
        node = nodes[todo.pop()]
        neighbours = list(node.users) if forward else list(node.all_input_nodes)
        for other in neighbours:
            if other.name in seen or other.op != "call_function" or other.meta.get("phase", "F") != "F":
                continue
            seen.add(other.name)
            if found := matrices.get(other.name):
                if any(dims[p] == cut for p in found):
                    return True
                continue
            todo.append(other.name)
    return False


def _cuts_sequence(program: Compiled, tp: set[str]) -> bool:
    """Whether tp cuts a dim of what one layer gives to the next that is no dim of features, the last."""
    for stage in program.plan.stages:
        for call in program.ir.calls[slice(*stage.calls)]:
            if not _LAYER.fullmatch(call.path):
                continue
            template, how = program.ir.templates[call.template], stage.templates[call.template]
            for name, ref in zip(template.inputs, call.inputs, strict=True):
                if ref.kind == "call" and any(tp & set(axes) for axes in how.given(name).dims[:-1]):
                    return True
    return False


def _units(program: Compiled) -> tuple[StageUnits, ...]:
    """The units of every stage."""
    calls = program.ir.calls
    layers = [i for i, call in enumerate(calls) if call.path in set(layer_paths(program))]
    first, last = (layers[0], layers[-1]) if layers else (len(calls), -1)
    return tuple(
        StageUnits(
            len(dict.fromkeys(calls[i].path for i in layers if begin <= i < end)),
            embedding=begin < first and end > begin,
            loss=end > last + 1,
        )
        for begin, end in (stage.calls for stage in program.plan.stages)
    )


def _recompute(program: Compiled) -> tuple[str, list[NotCarried]]:
    """The policy of Options.recompute that a plan follows, or the nearest, and how it differs from that."""
    made = {
        (name, how.recompute) for stage in program.plan.stages for name, how in stage.templates.items() if how.recompute
    }
    if not made:
        return "none", []
    asked = program.options.recompute
    if asked in RECOMPUTE_POLICIES:
        return asked, []
    every = {name: program.ir.templates[name] for stage in program.plan.stages for name in stage.templates}
    for policy in RECOMPUTE_POLICIES:
        if made == {(n, again) for n, t in every.items() if (again := policy_set(t, policy))}:
            return policy, []
    dear = any(set(again) - set(policy_set(every[name], "selective")) for name, again in made)
    nearest = "full" if dear else "selective"
    values = sum(len(again) for _, again in made)
    return nearest, [
        NotCarried(f"{values} values that backward makes again are chosen one by one", f"recompute {nearest}")
    ]


def _recompute_layers(program: Compiled) -> int | None:
    """The layers of every stage that recompute, where these are as many in all and the others recompute nothing; None where all
    do, or that cannot be said."""
    numbers = {
        how.recompute_calls
        for stage in program.plan.stages
        for name, how in stage.templates.items()
        if how.recompute and sum(call.template == name for call in program.ir.calls[slice(*stage.calls)]) > 1
    }
    keep = not any(how.recompute_after for stage in program.plan.stages for how in stage.templates.values())
    return next(iter(numbers)) if len(numbers) == 1 and keep else None


def _offload(program: Compiled) -> str:
    """The kind of Options.offload that moves what the plan moves."""
    parameters = [p for stage in program.plan.stages for p in stage.parameters.values()]
    moved = {
        "activations": any(how.offload for stage in program.plan.stages for how in stage.templates.values()),
        "parameters": any(p.tier for p in parameters),
        "optimizer": any(p.optimizer_tier or p.tier for p in parameters),
    }
    moves = frozenset(what for what in MOVABLE if moved[what])
    exact = [kind.name for kind in OFFLOAD_KINDS.values() if kind.moves == moves]
    return exact[0] if exact else "all"


def _apart(program: Compiled) -> Iterator[NotCarried]:
    """Decisions that no layout has."""
    plan = program.plan
    templates = [how for stage in plan.stages for how in stage.templates.values()]
    if plan.order:
        yield NotCarried(
            f"causal sequences in zigzag order of {plan.order} ranks", "the order of the system that reads the file"
        )
    if plan.gradient_compression:
        yield NotCarried(f"gradients travel as {plan.gradient_compression}", "as they are")
    if plan.placement:
        yield NotCarried("ranks have a placement on devices", "ranks in order")
    if any(stage.mesh.uneven for stage in plan.stages):
        yield NotCarried("ranks hold unequal blocks", "equal blocks")
    if any(how.pieces > 1 for how in templates):
        yield NotCarried("blocks run in pieces, so that messages of one travel beside another", "whole blocks")
    if any(how.overlap for how in templates):
        yield NotCarried("lines of a block run while messages travel", "the system's own overlap")
    if program.request.buckets or program.request.entries:
        yield NotCarried("other shapes of batches and other steps", "this step alone")
