"""The functions that the actions of a stage run (`forward`, `backward`, `weights`, `prepare`), as statements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.codegen.body import Body
from autopar.codegen.marks import BREAK, local, number, quoted
from autopar.codegen.printer import Printer, show_types, statement
from autopar.ir import lines as ir
from autopar.ir.lines import Function, Line, Ref, Stored
from autopar.ir.lowered import LoweredStage
from autopar.ir.steps import rows
from autopar.ops.runtime_modules import RUNTIME_MODULES
from autopar.runtime.memory.tiers import TIER_KINDS

WHAT = {
    "prepare": "What forward must know of the whole batch, of one microbatch; PREPARED says how all are put together."
    " `prepared`: what is known already.",
    "forward": "F: one microbatch forward. What backward needs is left in a list.",
    "backward": "B: one microbatch backward; gradients of parameters go to rt.grads.",
    "inputs": "B: gradients of what one microbatch reads; what those of parameters need is left in a list.",
    "weights": "W: gradients of parameters of one microbatch.",
}
_RESERVED = ("rt", "torch", "aten", *RUNTIME_MODULES, "user_ops", "float", "range", "reversed", "zip")
"""Names of the file that the functions read."""


def stage_functions(stage: LoweredStage, printer: Printer) -> list[dict[str, Any]]:
    """Name, arguments, docstring, statements and result of every function of the stage."""
    return [_function(function, stage, printer) for function in stage.functions]


def _function(function: Function, stage: LoweredStage, printer: Printer) -> dict[str, Any]:
    returns, what = function.returns, function.name
    inputs = [row.name for row in stage.inputs]
    takes: list[tuple[str, Sequence[str], bool]]
    match function.name.partition("_")[0]:
        case "prepare":
            what, prepared = "prepare", [a for a in function.args if a not in inputs]
            takes, results = [("inputs", inputs, False), ("prepared", prepared, False)], [returns]
        case "forward":
            rest = [a for a in function.args if a not in inputs]
            received, prepared = rest[: len(stage.received)], rest[len(stage.received) :]
            takes = [("inputs", inputs, False), ("received", received, True), ("prepared", prepared, False)]
            a, b = len(stage.outputs), len(stage.outputs) + len(stage.sent)
            results = [returns[:a], returns[a:b], returns[b:]]
        case "backward":
            arrived = [a for a in function.args if a in function.arg_types]
            takes = [("state", stage.state, True), ("received", arrived, True)]
            sent = len(stage.gradients_sent)
            results = [returns[:sent], returns[sent:]]
            what = "inputs" if stage.weights is not None else "backward"
        case _:
            takes, results = [("later", function.args, True)], []
    args = ["rt", *(source for source, _, _ in takes)]
    reserved = {*_RESERVED, *args, *(f.name for t in stage.templates.values() for f in t.functions)}
    body = Body(function, lambda line: _text(line, stage, printer), {n for n in returns if n}, reserved)
    return {
        "name": function.name,
        "what": WHAT[what],
        "args": args,
        "body": [*body.beginning(takes), *body.statements()],
        "result": ", ".join(map(body.listed, results)),
    }


def _text(line: Line, stage: LoweredStage, printer: Printer) -> str:
    """One line of a stage's function."""
    match line:
        case ir.TemplateCall():
            return _template_call(line, stage)
        case ir.Prefetch(key, gathers):
            table = "".join(
                f"    ({quoted(g.name)}, {rows(g.steps)!r}{f', {printer.value(g.dtype)}' if g.dtype else ''}),\n"
                for g in gathers
            )
            return f"rt.prefetch({quoted(str(key))}, [\n{table}])"
        case ir.TakeParameters(key):
            return f"{_targets([*map(local, line.outs)])} = rt.take({BREAK}{quoted(str(key))}{BREAK})"
        case ir.AddGradient(gradient, parameter, owned):
            return f"rt.grads.add({quoted(parameter)}, {local(gradient)}{', owned=True' if owned else ''})"
        case ir.SumLoss(value, axes):
            return f"{local(line.outs[0])} = rt.grads.start_sum({local(value)}, {axes!r})  # {show_types(line)}"
        case ir.SeedGradient():
            return f"{local(line.outs[0])} = torch.full({_shape_and_dtype(line, stage, printer, 'rt.loss_scale, ')})"
        case ir.ZeroGradient():
            return f"{local(line.outs[0])} = torch.zeros({_shape_and_dtype(line, stage, printer)})"
        case ir.ParkSaved(saved, places, tier, template):
            values = [stage.templates[template].saved[i] for i in places]
            what = ", ".join(values[:4]) + (", …" if len(values) > 4 else "")
            return f"rt.park({local(saved)}, {places!r}, {tier!r})  # {what} rest in {TIER_KINDS[tier].holds} until backward"
        case ir.FetchSaved(saved):
            return f"rt.fetch({local(saved)})  # on their way back, one call ahead"
        case ir.AwaitSaved(saved):
            return f"rt.ready({local(saved)})"
        case ir.ReadBuffer(buffer, copy):
            return f"{local(line.outs[0])} = rt.buffers[{quoted(buffer)}]" + (".clone()" if copy else "")
        case ir.WriteBuffer(value, buffer, "now"):
            return f"rt.buffers[{quoted(buffer)}].copy_({local(value)})"
        case ir.WriteBuffer(value, buffer, when):
            return f"rt.update_buffer({quoted(buffer)}, {local(value)}, {when!r})  # at the end of the step"
    return statement(line, printer)


def _shape_and_dtype(line: Line, stage: LoweredStage, printer: Printer, fill: str = "") -> str:
    """Arguments of a factory that makes the block of a line's first result."""
    ((_, type_, spec),) = line.made()
    assert type_ is not None
    assert spec is not None
    shape = spec.local_shape(type_.shape, stage.mesh)
    return f"{printer.value(shape)}, {fill}dtype={printer.value(type_.dtype)}, device=rt.device"


def _template_call(line: ir.TemplateCall, stage: LoweredStage) -> str:
    """A call of a template's function, broken where it is long."""
    template, outs = stage.templates[line.template], [local(name) for name in line.outs]
    match line:
        case ir.CallForward(params=params, inputs=inputs):
            function, arguments = template.forward, [*map(_param, params), *map(local, inputs)]
            if template.backward is not None and not line.keeps:
                outs.append("_")
            left = ", ".join(outs)
        case ir.CallBackward(saved=saved, params=params, tangents=tangents) if template.backward is not None:
            function, arguments = template.backward, [local(saved), *map(_param, params), *map(local, tangents)]
            left = _targets(outs) if outs or function.returns else "_"
        case ir.CallWeights(later=later) if template.weights is not None:
            function, arguments, left = template.weights, [local(later)], _targets(outs)
        case _:
            raise TypeError(f"{type(line).__name__} is no call of a template's function that can be printed")
    return BREAK.join([f"{left} = {function.name}(", "rt", number(line.number), *arguments, ")"])


def _targets(names: Sequence[str]) -> str:
    """The left side of an assignment that unpacks a sequence into these names."""
    return ", ".join(names) + ("," if len(names) == 1 else "")


def _param(p: Ref | Stored) -> str:
    return local(p.name) if isinstance(p, Ref) else f"rt.{'narrow' if p.narrow else 'params'}[{quoted(p.name)}]"
