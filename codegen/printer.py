"""Lines of a lowered function as Python text.

Common ops print as people write them (`a + b`, `x.reshape(…)`), every other torch op as `aten.<op>(…)`, autopar's own
as calls into the small runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar.codegen.text import comment
from autopar.ir.call import schema_arguments
from autopar.ir.lines import Compute, Convert, Cut, GoOn, Join, Line, Ref, Site, Start, Wait, label
from autopar.ops.discover import target_of
from autopar.ops.registry import AlongAxis, Offset, find

Dtypes = Mapping[torch.dtype, torch.dtype]
TemplateLine = Compute | Convert | Start | GoOn | Wait | Cut | Join
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


class Printer:
    """Prints lines; `dtypes` replaces dtypes in the text (verification runs a float32 program in float64), `local` writes
    local names."""

    def __init__(self, dtypes: Dtypes | None = None, local: Callable[[str], str] = str) -> None:
        self.dtypes, self.local = dict(dtypes or {}), local

    # --- values ---------------------------------------------------------------------------------------------------------

    def value(self, x: Any) -> str:
        """One argument as text."""
        if isinstance(x, Ref):
            return self.local(x.name)
        if isinstance(x, Offset):
            start = f" {'-' if x.start < 0 else '+'} {abs(x.start)}" if x.start else ""
            return f"rt.comm.axis_index({_axes(x.axes)}) * {x.chunk}{start}"
        if isinstance(x, AlongAxis):
            return f"rt.along({', '.join(map(repr, x.axes))})"
        if isinstance(x, Site):
            return f"rt.key(call, {x.number})"
        if isinstance(x, torch.dtype):
            return str(self.dtypes.get(x, x))
        if isinstance(x, float) and not math.isfinite(x):
            return f'float("{x}")'
        if isinstance(x, list):
            return f"[{', '.join(map(self.value, x))}]"
        if isinstance(x, tuple):
            return f"({', '.join(map(self.value, x))}{',' if len(x) == 1 else ''})"
        if isinstance(x, (torch.device, torch.layout, torch.memory_format)):
            return str(x) if not isinstance(x, torch.device) else "rt.device"
        return repr(x)

    def dtype(self, dtype: torch.dtype) -> str:
        """Dtype name in tables, replaced like in code."""
        return str(self.dtypes.get(dtype, dtype)).removeprefix("torch.")

    # --- lines ----------------------------------------------------------------------------------------------------------

    def expression(self, line: TemplateLine) -> str:
        """Right-hand side of a line."""
        match line:
            case Start(line=Convert() as conversion):
                return self._collective(conversion, "start_")
            case Start(line=Compute() as op):
                return self._own(op, "start_")
            case GoOn(handle):
                return f"{self.local(handle)}.go_on()"
            case Wait(handle):
                return f"{self.local(handle)}.wait()"
            case Cut(value, dim=dim):
                return f"{self.local(value)}.chunk({len(line.outs)}, {dim})"
            case Join(pieces, dim):
                pieces = tuple(map(self.local, pieces))
                return " + ".join(pieces) if dim is None else f"torch.cat([{', '.join(pieces)}], {dim})"
            case Convert():
                return self._collective(line)
            case Compute():
                return self._op(line)
        raise TypeError(f"{label(line)} is no line of a template")

    def _op(self, line: Compute) -> str:
        function = _carrier(line)
        if function:
            told = self._told(line)
            return self._call(function, line.op, line.kwargs)[:-1] + (f", {told})" if told else ")")
        if line.op.startswith(("autopar.", "autopar_ops.")):
            return self._own(line)
        if line.op.startswith(("aten.", "prims.")):
            return self._aten(line)
        return self._library(line)

    def _told(self, line: Compute) -> str:
        """The keywords that the op's schema does not have."""
        schema_names = {n for n, _, _ in schema_arguments(target_of(line.op))}
        return ", ".join(f"{k}={self.value(v)}" for k, v in line.kwargs.items() if k not in schema_names)

    def _collective(self, line: Convert, start: str = "") -> str:
        """start: what the names of functions that give a handle begin with."""
        step, dims = line.step, "".join(f"{dim}, " for dim in line.step.dims)
        op = "" if step.reduction == "sum" else f", op={step.reduction!r}"
        parts = {"start": start, "kind": step.kind, "x": self.local(line.value), "dims": dims, "axis": repr(step.axis)}
        return step.facts.text.format(**parts, op=op)

    def _own(self, line: Compute, start: str = "") -> str:
        definition, name = find(line.op), line.op.split(".")[1]
        assert definition is not None
        schema = schema_arguments(target_of(line.op))
        schema_names = {n for n, _, _ in schema}
        given = [n for n, _, _ in schema if n in line.kwargs]
        # the function of a user's op need not have the defaults of its schema; behind these the source has its place
        if line.op.startswith("autopar.") and not definition.told_source:
            given = _without_last_defaults(schema, given, line.kwargs)
        args = [self.value(line.kwargs[n]) for n in given]
        if definition.told_source:
            args.append(repr(comment(line.source, 110)))
        for k, v in line.kwargs.items():
            if k not in schema_names and v is not None and not (k == "offset" and v == 0):
                args.append(f"{k}={self.value(v)}")
        if definition.key_argument is not None and "key" in line.kwargs:
            args = [a for a in args if not a.startswith("key=")]
            args.insert(definition.key_argument, self.value(line.kwargs["key"]))
        if definition.factory:
            args.append("device=rt.device")
        return f"{definition.home}.{start}{name}({', '.join(args)})"

    def _aten(self, line: Compute) -> str:
        arguments = {k: v for k, v in line.kwargs.items() if k not in _DROPPED}
        if line.op in _BINARY and arguments.get("alpha", 1) == 1:
            left, right = arguments["self"], arguments["other"]
            return f"{self.value(left)} {_BINARY[line.op]} {self.value(right)}"
        if line.op in _METHODS:
            size = next(v for k, v in arguments.items() if k in ("shape", "dims", "size"))
            return f"{self.value(arguments['self'])}.{_METHODS[line.op]}({', '.join(map(self.value, size)) or '()'})"
        if line.op == "aten.neg.default":
            return f"-{self.value(arguments['self'])}"
        if line.op == "aten.sum.dim_IntList" and arguments.get("dtype") is None:
            keep = ", keepdim=True" if arguments.get("keepdim") else ""
            return f"{self.value(arguments['self'])}.sum({self.value(arguments['dim'])}{keep})"
        if line.op == "aten._to_copy.default":
            return f"{self.value(arguments['self'])}.to({self.value(arguments['dtype'])})"
        text = self._call(f"{line.op.removesuffix('.default')}", line.op, arguments)
        definition = find(line.op)
        if definition is not None and definition.factory:
            return text[:-1] + (", " if not text.endswith("(") else "") + "device=rt.device)"
        return text

    def _call(self, function: str, op: str, arguments: dict[str, Any]) -> str:
        target = target_of(op)
        keyword_only = {a.name for a in target._schema.arguments if a.kwarg_only}
        args: list[str] = []
        named = False
        for name, has_default, default in schema_arguments(target):
            if name not in arguments:
                continue
            value = arguments[name]
            if has_default and not isinstance(value, Ref) and value == default and type(value) is type(default):
                named = True
                continue
            text = self.value(value)
            args.append(f"{name}={text}" if named or name in keyword_only else text)
        return f"{function}({', '.join(args)})"

    def _library(self, line: Compute) -> str:
        return self._call(f"torch.ops.{line.op.removesuffix('.default')}", line.op, line.kwargs)


def _without_last_defaults(
    schema: tuple[tuple[str, bool, Any], ...], names: list[str], arguments: Mapping[str, Any]
) -> list[str]:
    """Names of arguments by position, up to the last that is not its default."""
    names = list(names)
    defaults = {name: default for name, has_default, default in schema if has_default}
    while names and names[-1] in defaults and arguments[names[-1]] == defaults[names[-1]]:
        names.pop()
    return names


def _carrier(line: Compute) -> str:
    """The function of the runtime that sends an op's messages, where it is not the op's own, or that stands for torch's."""
    definition = find(line.op)
    return definition.carrier if definition is not None and (line.carried or definition.always_carried) else ""


def home_of(line: Compute) -> str:
    """The module of the runtime that an op's function is in, "ops" (which has conversions too) where it is torch's."""
    definition = find(line.op)
    if definition is None:
        return "ops"
    return _carrier(line).split(".")[0] or definition.home


def _axes(axes: tuple[str, ...]) -> str:
    return repr(axes[0]) if len(axes) == 1 else repr(axes)


def statement(line: Line, printer: Printer) -> str:
    """An op or a conversion with what it makes: `y = a + b  # f32[8@dp, 128] ~sum(tp)`."""
    assert isinstance(line, TemplateLine), line
    if isinstance(line, Start):
        return f"{printer.local(line.outs[0])} = {printer.expression(line)}"
    if isinstance(line, GoOn):
        return printer.expression(line)
    comma = "," if len(line.outs) == 1 and len(line.types) == 1 and _returns_list(line) else ""
    return f"{', '.join(map(printer.local, line.outs))}{comma} = {printer.expression(line)}  # {show_types(line)}"


def show_types(line: Line) -> str:
    """`f32[8@dp, 128] ~sum(tp)` of what a line makes, for comments."""
    return comment(", ".join(s.show(t) for _, t, s in line.made() if t is not None and s is not None))


def _returns_list(line: Line) -> bool:
    """Whether the op returns its results in a list, which may have one entry."""
    line = line.line if isinstance(line, Wait) else line
    returns = target_of(line.op)._schema.returns if isinstance(line, Compute) else []
    return len(returns) == 1 and str(returns[0].type).startswith("List")
