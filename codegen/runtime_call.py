"""The call that a line of a template is: which function, with which arguments. It is printed into files (`printer.py`) and
made on tensors without data (`autopar.passes.memory.probe`).

Common ops are what people write (`a + b`, `x.reshape(…)`), every other torch op is `aten.<op>(…)`, autopar's own are functions
of the small runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.codegen.text import comment
from autopar.ir.call import schema_arguments
from autopar.ir.lines import Compute, Convert, Cut, Join, Ref, Start, label
from autopar.ops.discover import target_of
from autopar.ops.registry import find

TemplateCallLine = Compute | Convert | Cut | Join | Start
DEVICE = torch.device("meta")
"""The device of the rank, as an argument."""
_BINARY = {
    "aten.add.Tensor": "+",
    "aten.sub.Tensor": "-",
    "aten.mul.Tensor": "*",
    "aten.div.Tensor": "/",
    "aten.add.Scalar": "+",
    "aten.sub.Scalar": "-",
    "aten.mul.Scalar": "*",
    "aten.div.Scalar": "/",
}
_METHODS = {"aten.reshape.default": "reshape", "aten.permute.default": "permute", "aten.expand.default": "expand"}
_DROPPED = ("device", "layout", "pin_memory", "memory_format")
_KEPT_LAYOUTS = (torch.channels_last, torch.channels_last_3d)


@dataclass(frozen=True)
class RuntimeCall:
    """A call of a function by its dotted name (`ops.linear`), of a method of its first argument (`.reshape`), or an operator
    between all arguments (`+`). Arguments may be values by name (`Ref`), places of the rank (`Offset`, `AlongAxis`, `Site`)
    and calls."""

    function: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def call_of(line: TemplateCallLine) -> RuntimeCall:
    """The call whose result a line names."""
    match line:
        case Start(line=Convert() as conversion):
            return _collective(conversion, "start_")
        case Start(line=Compute() as op):
            return _own(op, "start_")
        case Convert():
            return _collective(line)
        case Compute():
            return _op(line)
        case Cut(value, dim=dim):
            return RuntimeCall(".chunk", (Ref(value), len(line.outs), dim))
        case Join(pieces, None):
            return RuntimeCall("+", tuple(map(Ref, pieces)))
        case Join(pieces, dim):
            return RuntimeCall("torch.cat", ([*map(Ref, pieces)], dim))
    raise TypeError(f"{label(line)} is no line of a template")


def carrier(line: Compute) -> str:
    """The function of the runtime that sends an op's messages, where it is not the op's own, or that stands for torch's."""
    definition = find(line.op)
    return definition.carrier if definition is not None and (line.carried or definition.always_carried) else ""


def _op(line: Compute) -> RuntimeCall:
    function = carrier(line)
    if function:
        schema_names = {n for n, _, _ in schema_arguments(target_of(line.op))}
        told = {k: v for k, v in line.kwargs.items() if k not in schema_names}
        return _call(function, line.op, line.kwargs, told)
    if line.op.startswith(("autopar.", "autopar_ops.")):
        return _own(line)
    if line.op.startswith(("aten.", "prims.")):
        return _aten(line)
    return _call(f"torch.ops.{line.op.removesuffix('.default')}", line.op, line.kwargs)


def _collective(line: Convert, start: str = "") -> RuntimeCall:
    """start: what the names of functions that give a handle begin with."""
    step, facts = line.step, line.step.facts
    axis = RuntimeCall("rt.comm.axis_index", (step.axis,)) if facts.by_index else step.axis
    op: dict[str, Any] = {} if step.reduction == "sum" else {"op": step.reduction}
    if line.whole is not None:
        op["whole"] = line.whole
    return RuntimeCall(facts.function.format(start=start, kind=step.kind), (Ref(line.value), *step.dims, axis), op)


def _own(line: Compute, start: str = "") -> RuntimeCall:
    definition, name = find(line.op), line.op.split(".")[1]
    assert definition is not None
    schema = schema_arguments(target_of(line.op))
    schema_names = {n for n, _, _ in schema}
    given = [n for n, _, _ in schema if n in line.kwargs]
    # the function of a user's op need not have the defaults of its schema; behind these the source has its place
    if line.op.startswith("autopar.") and not definition.told_source:
        given = _without_last_defaults(schema, given, line.kwargs)
    args = [line.kwargs[n] for n in given]
    if definition.told_source:
        args.append(comment(line.source, 110))
    kwargs = {
        k: v
        for k, v in line.kwargs.items()
        if k not in schema_names and v is not None and not (k == "offset" and v == 0)
    }
    if definition.key_argument is not None and "key" in kwargs:
        args.insert(definition.key_argument, kwargs.pop("key"))
    if definition.factory:
        kwargs["device"] = DEVICE
    return RuntimeCall(f"{definition.home}.{start}{name}", tuple(args), kwargs)


def _aten(line: Compute) -> RuntimeCall:
    arguments = {k: v for k, v in line.kwargs.items() if k not in _DROPPED}
    if line.op in _BINARY and arguments.get("alpha", 1) == 1:
        return RuntimeCall(_BINARY[line.op], (arguments["self"], arguments["other"]))
    if line.op in _METHODS:
        size = next(v for k, v in arguments.items() if k in ("shape", "dims", "size"))
        return RuntimeCall(f".{_METHODS[line.op]}", (arguments["self"], *(size or [()])))
    if line.op == "aten.neg.default":
        return RuntimeCall("-", (arguments["self"],))
    if line.op == "aten.sum.dim_IntList" and arguments.get("dtype") is None:
        keep = {"keepdim": True} if arguments.get("keepdim") else {}
        return RuntimeCall(".sum", (arguments["self"], arguments["dim"]), keep)
    if line.op == "aten.clone.default" and (layout := line.kwargs.get("memory_format")) in _KEPT_LAYOUTS:
        return RuntimeCall(".contiguous", (arguments["self"],), {"memory_format": layout})
    if line.op == "aten._to_copy.default":
        return RuntimeCall(".to", (arguments["self"], arguments["dtype"]))
    definition = find(line.op)
    device = {"device": DEVICE} if definition is not None and definition.factory else {}
    return _call(line.op.removesuffix(".default"), line.op, arguments, device)


def _call(function: str, op: str, arguments: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> RuntimeCall:
    """A function with the arguments of an op that are not defaults: by place up to the first that is. more: by name."""
    target = target_of(op)
    keyword_only = {a.name for a in target._schema.arguments if a.kwarg_only}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    named = False
    for name, has_default, default in schema_arguments(target):
        if name not in arguments:
            continue
        value = arguments[name]
        if has_default and not isinstance(value, Ref) and value == default and type(value) is type(default):
            named = True
        elif named or name in keyword_only:
            kwargs[name] = value
        else:
            args.append(value)
    return RuntimeCall(function, tuple(args), kwargs | dict(more or {}))


def _without_last_defaults(
    schema: tuple[tuple[str, bool, Any], ...], names: list[str], arguments: Mapping[str, Any]
) -> list[str]:
    """Names of arguments by position, up to the last that is not its default."""
    names = list(names)
    defaults = {name: default for name, has_default, default in schema if has_default}
    while names and names[-1] in defaults and arguments[names[-1]] == defaults[names[-1]]:
        names.pop()
    return names
