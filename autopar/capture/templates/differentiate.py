"""Differentiate: trace one segment's forward and backward into one template graph.

make_fx records the dialect's forward ops, then `torch.autograd.grad` of the segment's outputs with respect to the
inputs and parameters that need it, the gradients of the outputs being placeholders (tangents). Nodes that depend on a
tangent are backward: those that input gradients need are B, the others W.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta, set_current_meta

from autopar.capture.explain import first_line, untraceable, user_frame
from autopar.capture.graph.cast_marks import is_cast
from autopar.capture.graph.precision import cast_again
from autopar.capture.source_lines import source_of
from autopar.capture.templates.canonical import canonicalize
from autopar.capture.templates.fold import Segment
from autopar.capture.while_traced import functions
from autopar.errors import CaptureError
from autopar.ir.call import bind
from autopar.ir.program import Template, is_getitem, op_name
from autopar.ops.dialect import LIFT
from autopar.ops.random import reset_sites
from autopar.ops.registry import find

Tensor = torch.Tensor


def trace_template(
    name: str,
    segment: Segment,
    reads: Sequence[Tensor],
    is_param: Sequence[bool],
    pulled: Sequence[bool],
    mode: FakeTensorMode,
) -> tuple[Template, list[bool]]:
    """The template of `segment` and, per output, whether it carries a gradient.

    `reads`: fake tensors for `segment.reads`, with requires_grad set where a gradient may flow. `pulled`: per output
    whether a gradient may come back to it from the loss.
    """
    training = any(pulled)
    reset_sites()
    leaves = [t.detach().requires_grad_(t.requires_grad and training) for t in reads]
    with mode, torch.set_grad_enabled(training):
        probe = _forward(segment, leaves)
    flows = [bool(o.requires_grad) and p for o, p in zip(probe, pulled, strict=True)]
    tangents = [
        torch.empty_like(o, memory_format=torch.contiguous_format) if f else None
        for o, f in zip(_fresh(probe, mode), flows, strict=True)
    ]
    wanted = [i for i, t in enumerate(leaves) if t.requires_grad]
    got: list[bool] = []

    def joint(values: list[Tensor], grads_out: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        reset_sites()
        outs = _forward(segment, values)
        heads = [o for o, f in zip(outs, flows, strict=True) if f]
        grads: Sequence[Tensor | None] = []
        if heads and wanted:
            grads = torch.autograd.grad(heads, [values[i] for i in wanted], grads_out, allow_unused=True)
        got[:] = [g is not None for g in grads] or [False] * len(wanted)
        return [o.detach() for o in outs], [g for g in grads if g is not None]

    arguments = leaves, [t for t in tangents if t is not None]
    traced = _trace(joint, arguments, mode, training)
    if written := written_in_place(traced.graph):
        traced = _trace(dispatch_functionalize(joint, FunctionalTensorMode()), arguments, mode, training)
        written = written_in_place(traced.graph)
    if written:
        raise CaptureError(
            f"{written[0].target} at {source_of(written[0])} writes in place, which the parallel program cannot keep; use "
            "the op that returns a new tensor instead"
        )
    for node in traced.graph.nodes:
        if _draws(node.target):
            raise CaptureError(
                f"{op_name(node.target)} at {source_of(node)} draws random numbers that would differ from rank to rank; use "
                "rand, randn, randint, bernoulli or dropout, whose numbers depend on positions only"
            )
    template = _assemble(name, traced, segment, is_param, flows, wanted, got)
    mark_input_gradients(template)
    return template, flows


def _trace(joint: Any, arguments: Any, mode: FakeTensorMode, training: bool) -> fx.GraphModule:
    try:
        with mode, torch.set_grad_enabled(training), preserve_node_meta():
            return make_fx(joint, pre_dispatch=False, _error_on_data_dependent_ops=True)(*arguments)
    except CaptureError:
        raise
    except Exception as error:
        where = user_frame(error)
        raise CaptureError(
            f"the backward cannot be traced{f' at {where}' if where else ''}: {first_line(str(error))}. Write it with torch "
            "ops of fixed shapes"
        ) from error


def written_in_place(graph: fx.Graph) -> list[fx.Node]:
    """Nodes that write to an argument: composite ops (`gru_cell`, `pad` in circular mode) do so inside."""
    return [n for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable]


def _draws(target: Any) -> bool:
    """Whether an op draws from torch's generator."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _fresh(values: Sequence[Tensor], mode: FakeTensorMode) -> list[Tensor]:
    with mode:
        return [torch.empty(v.shape, dtype=v.dtype) for v in values]


def _forward(segment: Segment, values: Sequence[Tensor]) -> list[Tensor]:
    """Run the segment's captured nodes through the lift table; a value is cast to a dtype once."""
    env: dict[fx.Node, Any] = dict(zip(segment.reads, values, strict=True))
    casts: dict[Any, Any] = {}
    for node in segment.nodes:
        if is_cast(node) and (same_cast := casts.get((node.args[0], node.kwargs["dtype"]))) is not None:
            env[node] = same_cast
            continue
        args = fx.map_arg(node.args, lambda n: env[n])
        kwargs = {k: v for k, v in fx.map_arg(node.kwargs, lambda n: env[n]).items() if k != "pin_memory"}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        try:
            with set_current_meta(node):
                env[node] = _apply(node.target, args, kwargs)
        except CaptureError:
            raise
        except Exception as error:
            raise untraceable(node.target, source_of(node), error) from error
        _check(node, env[node])
        if is_cast(node):
            casts[node.args[0], node.kwargs["dtype"]] = env[node]
    return [env[w] for w in segment.writes]


def _check(node: fx.Node, value: Any) -> None:
    """Raises CaptureError for what is computed in another dtype or shape than captured, and for what is read and not computed."""
    captured = node.meta.get("val")
    op = node.all_input_nodes[0].target if is_getitem(node) else node.target
    if value is None and isinstance(captured, Tensor) and node.users:
        number = node.args[1] if is_getitem(node) else 0
        raise CaptureError(
            f"{op} at {source_of(node)}: its result {number} is for its own backward, and is not computed here; compute what you "
            "read of it from the op's input"
        )
    if isinstance(value, Tensor) and isinstance(captured, Tensor) and value.dtype != captured.dtype:
        raise CaptureError(
            f"{op} at {source_of(node)} gives {captured.dtype} from operands of several dtypes, and would give "
            f"{value.dtype} here; cast its operands to one dtype (x.to(dtype))"
        )
    if isinstance(value, Tensor) and isinstance(captured, Tensor) and node.users and value.shape != captured.shape:
        raise CaptureError(
            f"{op} at {source_of(node)} has a result of shape {tuple(value.shape)}, which torch traces as "
            f"{tuple(captured.shape)}; give it operands with a batch dim"
        )


def _apply(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if target is functions.OP:
        return functions.run(args[0], list(args[1]))
    if target in LIFT:
        return LIFT[target](*args, **kwargs)
    return target(*args, **kwargs)


def _assemble(
    name: str,
    module: fx.GraphModule,
    segment: Segment,
    is_param: Sequence[bool],
    flows: Sequence[bool],
    wanted: Sequence[int],
    got: Sequence[bool],
) -> Template:
    canonicalize(module)
    graph = module.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    reads, tangents = placeholders[: len(segment.reads)], placeholders[len(segment.reads) :]
    output = graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    outs, grads = results[: len(flows)], results[len(flows) :]
    _mark_phases(graph, tangents, outs)
    cast_again(graph)
    taken: set[str] = {n.name for n in graph.nodes}
    for node, read in zip(reads, segment.reads, strict=True):
        _rename(node, _local_name(read.name, segment.path), taken)
    flowing = iter(tangents)
    slots = [next(flowing) if f else None for f in flows]
    for slot, write in zip(slots, segment.writes, strict=True):
        if slot is not None:
            _rename(slot, f"d_{write.name}", taken)
    by_read: dict[int, fx.Node] = {}
    flowing_grads = iter(grads)
    for index, has in zip(wanted, got, strict=True):
        if has:
            by_read[index] = next(flowing_grads)
    params = [i for i, p in enumerate(is_param) if p]
    for i in params:
        reads[i].meta["stored"] = segment.reads[i].meta["val"].dtype
    inputs = [i for i, p in enumerate(is_param) if not p]

    def grad(i: int) -> str | None:
        return by_read[i].name if i in by_read else None

    return Template(
        name,
        graph,
        tuple(reads[i].name for i in params),
        tuple(reads[i].name for i in inputs),
        tuple(o.name for o in outs),
        tuple(s.name if s is not None else None for s in slots),
        tuple(grad(i) for i in inputs),
        tuple(grad(i) for i in params),
        any(_is_random(n) for n in graph.nodes),
    )


def _local_name(name: str, path: str) -> str:
    """Name of a read value inside its template: no kind prefix, no path of the block."""
    name = re.sub(r"^(p|b|c)_(model_)?", "", name)
    return name.removeprefix(re.sub(r"\W", "_", path.split("@")[0]) + "_") if path else name


def _is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers (attention without dropout has the site -1)."""
    definition = find(op_name(node.target))
    return definition is not None and definition.random and bind(node.target, node.args, node.kwargs)["site"] != -1


def _rename(node: fx.Node, name: str, taken: set[str]) -> None:
    name = re.sub(r"\W", "_", name)
    base, k = name, 1
    while name in taken and name != node.name:
        name, k = f"{base}_{k}", k + 1
    taken.discard(node.name)
    taken.add(name)
    node._rename(name)
    node.target = name


def _mark_phases(graph: fx.Graph, tangents: Sequence[fx.Node], outs: Sequence[fx.Node]) -> None:
    """Phase F or W, and source, of every node; `mark_input_gradients` then finds the B among the W."""
    after_tangents = set(tangents)
    for node in graph.nodes:
        if any(n in after_tangents for n in node.all_input_nodes):
            after_tangents.add(node)
    forward = _ancestors(outs)
    for node in graph.nodes:
        node.meta["phase"] = (
            "F" if node in forward or (node.op == "placeholder" and node not in after_tangents) else "W"
        )
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["source"] = source_of(node) or next(
                (n.meta["source"] for n in node.all_input_nodes if n.meta.get("source")), ""
            )
        else:
            node.meta["source"] = ""


def mark_input_gradients(template: Template) -> None:
    """Nodes that gradients of inputs need are B; what is left of backward stays W."""
    nodes = template.nodes
    for node in _ancestors([nodes[g] for g in template.input_grads if g is not None]):
        if node.meta["phase"] == "W":
            node.meta["phase"] = "B"
    for tangent in template.tangents:
        if tangent is not None:
            nodes[tangent].meta["phase"] = "B"


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen
