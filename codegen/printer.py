"""Lines of a lowered function as Python text: the calls that they are (`runtime_call.py`), and what they make."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar.codegen.runtime_call import RuntimeCall, call_of, carrier
from autopar.codegen.text import comment
from autopar.ir.lines import Compute, Convert, Cut, GoOn, Join, Line, Ref, Site, Start, Wait
from autopar.ir.mesh import Extent
from autopar.ops.discover import target_of
from autopar.ops.registry import AlongAxis, Offset, find

Dtypes = Mapping[torch.dtype, torch.dtype]
TemplateLine = Compute | Convert | Start | GoOn | Wait | Cut | Join


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
        if isinstance(x, RuntimeCall):
            return self.call(x)
        if isinstance(x, Offset):
            if x.size:
                return f"rt.comm.block_start({x.size}, {_axes(x.axes)}){f' + {x.start}' if x.start else ''}"
            start = f" {'-' if x.start < 0 else '+'} {abs(x.start)}" if x.start else ""
            return f"rt.comm.axis_index({_axes(x.axes)}) * {x.chunk}{start}"
        if isinstance(x, Extent):
            return f"rt.comm.block_size({x.size}, {_axes(x.axes)})"
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
            case GoOn(handle):
                return f"{self.local(handle)}.go_on()"
            case Wait(handle):
                return f"{self.local(handle)}.wait()"
        return self.call(call_of(line))

    def call(self, call: RuntimeCall) -> str:
        """A call, a method or operators as text."""
        args = [*map(self.value, call.args)]
        if call.function in "+-*/":
            return f" {call.function} ".join(args) if len(args) > 1 else f"{call.function}{args[0]}"
        owner = args.pop(0) if call.function.startswith(".") else ""
        args += [f"{name}={self.value(value)}" for name, value in call.kwargs.items()]
        return f"{owner}{call.function}({', '.join(args)})"


def home_of(line: Compute) -> str:
    """The module of the runtime that an op's function is in, "ops" (which has conversions too) where it is torch's."""
    definition = find(line.op)
    if definition is None:
        return "ops"
    return carrier(line).split(".")[0] or definition.home


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
