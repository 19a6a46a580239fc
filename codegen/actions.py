"""The functions that the actions of a stage run (`forward`, `backward`, `weights`, `prepare`), as statements."""

from __future__ import annotations

from typing import Any

from autopar.codegen.printer import Printer, body, show_types, statement
from autopar.ir import lines as ir
from autopar.ir.lines import Function, Line, Ref, Stored
from autopar.ir.lowered import LoweredStage
from autopar.ir.steps import rows

WHAT = {
    "prepare": "What forward must know of the whole batch, of one microbatch; PREPARED says how all are put together.",
    "forward": "F: one microbatch forward. What backward needs is left in a list.",
    "backward": "B: one microbatch backward; gradients of parameters go to rt.grads.",
    "inputs": "B: gradients of what one microbatch reads; what those of parameters need is left in a list.",
    "weights": "W: gradients of parameters of one microbatch.",
}


TIERS = {"ddr": "host memory", "nvme": "a file"}


def stage_functions(stage: LoweredStage, printer: Printer) -> list[dict[str, Any]]:
    """Name, arguments, docstring, statements and result of every function of the stage."""
    functions = []
    for function in stage.functions:
        returns = [n or "None" for n in function.returns]
        lines = body(function, lambda line: _text(line, stage, printer), {n for n in function.returns if n})
        row: dict[str, Any] = {
            "name": function.name,
            "what": WHAT[function.name],
            "args": ["rt"],
            "take": [],
            "result": "",
        }
        if function.name == "prepare":
            row |= {"args": ["rt", "inputs"], "take": [_take("inputs", [r.name for r in stage.inputs])]}
            row["result"] = f"[{', '.join(returns)}]"
        elif function.name == "forward":
            row |= _forward(function, stage, returns)
        elif function.name == "backward":
            count = len(stage.gradients_sent)
            arrived = [a for a in function.args if a in function.arg_types]
            row |= {
                "args": ["rt", "state", "received"],
                "what": WHAT["inputs" if stage.weights is not None else "backward"],
            }
            row["take"] = [_take("state", stage.state, True), _take("received", arrived, True)]
            row["result"] = f"[{', '.join(returns[:count])}], [{', '.join(returns[count:])}]"
        else:
            row |= {"args": ["rt", "later"], "take": [_take("later", function.args, True)]}
        row["body"] = [t for group in row.pop("take") for t in group] + lines
        functions.append(row)
    return functions


def _forward(function: Function, stage: LoweredStage, returns: list[str]) -> dict[str, Any]:
    rows = [r.name for r in stage.inputs]
    rest = [a for a in function.args if a not in rows]
    received, prepared = rest[: len(stage.received)], rest[len(stage.received) :]
    a, b = len(stage.outputs), len(stage.outputs) + len(stage.sent)
    groups = (returns[:a], returns[a:b], returns[b:])
    return {
        "args": ["rt", "inputs", "received", "prepared"],
        "take": [_take("inputs", rows), _take("received", received, True), _take("prepared", prepared)],
        "result": ", ".join(f"[{', '.join(g)}]" for g in groups),
    }


def _take(source: str, names: Any, empty: bool = False) -> list[str]:
    if not names:
        return []
    lines = [f"{', '.join(names)}{',' if len(names) == 1 else ''} = {source}"]
    return [*lines, f"{source}.clear()"] if empty else lines


def _text(line: Line, stage: LoweredStage, printer: Printer) -> str:
    """One line of a stage's function."""
    match line:
        case ir.TemplateCall():
            return _template_call(line, stage)
        case ir.Prefetch(key, gathers):
            table = "".join(
                f"    ({g.name!r}, {rows(g.steps)!r}{f', {printer.value(g.dtype)}' if g.dtype else ''}),\n"
                for g in gathers
            )
            return f"rt.prefetch({str(key)!r}, [\n{table}])"
        case ir.TakeParameters(key):
            return f"{', '.join(line.outs)}{',' if len(line.outs) == 1 else ''} = rt.take({str(key)!r})"
        case ir.AddGradient(gradient, parameter, owned):
            return f"rt.grads.add({parameter!r}, {gradient}{', owned=True' if owned else ''})"
        case ir.SumLoss(value, axes):
            return f"{line.outs[0]} = rt.grads.start_sum({value}, {axes!r})  # {show_types(line)}"
        case ir.SeedGradient():
            return f"{line.outs[0]} = torch.full({_shape_and_dtype(line, stage, printer, 'rt.loss_scale, ')})"
        case ir.ZeroGradient():
            return f"{line.outs[0]} = torch.zeros({_shape_and_dtype(line, stage, printer)})"
        case ir.ParkSaved(saved, places, tier, template):
            values = [stage.templates[template].saved[i] for i in places]
            what = ", ".join(values[:4]) + (", …" if len(values) > 4 else "")
            return f"rt.park({saved}, {places!r}, {tier!r})  # {what} rest in {TIERS.get(tier, tier)} until backward"
        case ir.FetchSaved(saved):
            return f"rt.fetch({saved})  # on their way back, one call ahead"
        case ir.AwaitSaved(saved):
            return f"rt.ready({saved})"
        case ir.ReadBuffer(buffer, copy):
            return f"{line.outs[0]} = rt.buffers[{buffer!r}]" + (".clone()" if copy else "")
        case ir.WriteBuffer(value, buffer, "now"):
            return f"rt.buffers[{buffer!r}].copy_({value})"
        case ir.WriteBuffer(value, buffer, when):
            return f"rt.update_buffer({buffer!r}, {value}, {when!r})  # at the end of the step"
    return statement(line, printer)


def _shape_and_dtype(line: Line, stage: LoweredStage, printer: Printer, fill: str = "") -> str:
    """Arguments of a factory that makes the block of a line's first result."""
    ((_, type_, spec),) = line.made()
    assert type_ is not None
    assert spec is not None
    shape = spec.local_shape(type_.shape, stage.mesh)
    return f"{shape!r}, {fill}dtype={printer.value(type_.dtype)}, device=rt.device"


def _template_call(line: ir.TemplateCall, stage: LoweredStage) -> str:
    """A call of a template's function."""
    template, number, outs = stage.templates[line.template], str(line.number), list(line.outs)
    left = ", ".join(outs) + ("," if len(outs) == 1 else "")
    match line:
        case ir.CallForward(params=params, inputs=inputs):
            if template.backward is not None and not line.keeps:
                outs.append("_")
            return _call(", ".join(outs), template.forward, [number, *map(_param, params), *inputs])
        case ir.CallBackward(saved=saved, params=params, tangents=tangents):
            assert template.backward is not None
            if not template.backward.returns and not outs:
                left = "_"
            return _call(left, template.backward, [number, saved, *map(_param, params), *tangents])
        case ir.CallWeights(later=later):
            assert template.weights is not None
            return _call(left, template.weights, [number, later])
    raise TypeError(f"{type(line).__name__} is no call of a template's function that can be printed")


def _param(p: Ref | Stored) -> str:
    return p.name if isinstance(p, Ref) else f"rt.params[{p.name!r}]"


def _call(left: str, function: Function, arguments: list[str]) -> str:
    """`left = function(rt, …)`, over several lines where it is long."""
    arguments = ["rt", *arguments]
    one = f"{left} = {function.name}({', '.join(arguments)})"
    if len(one) <= 116:
        return one
    lines: list[str] = []
    current = "   "
    for a in arguments:
        if len(current) + len(a) > 112:
            lines.append(current)
            current = "   "
        current += f" {a},"
    lines.append(current)
    joined = "\n".join(lines)
    return f"{left} = {function.name}(\n{joined}\n)"
