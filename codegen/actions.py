"""The functions that the actions of a stage run (`forward`, `backward`, `weights`, `prepare`), as statements."""

from __future__ import annotations

from typing import Any

from autopar.codegen.printer import Printer, body, show_types, targets
from autopar.ir.lowered import Function, Line, LoweredStage, Ref

WHAT = {
    "prepare": "What forward must know of the whole batch, of one microbatch; the runtime takes the mean over all.",
    "forward": "F: one microbatch forward. What backward needs is left in a list.",
    "backward": "B: one microbatch backward; gradients of parameters go to rt.grads.",
    "inputs": "B: gradients of what one microbatch reads; what those of parameters need is left in a list.",
    "weights": "W: gradients of parameters of one microbatch.",
}


TIERS = {"ddr": "host memory", "nvme": "a file"}


def stage_functions(stage: LoweredStage, printer: Printer) -> list[dict[str, Any]]:
    """Name, arguments, docstring, statements and result of every function of the stage."""
    made = []
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
        made.append(row)
    return made


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
    kind = line.op
    if kind.startswith("call."):
        return _use(line, stage)
    if kind == "params.prefetch":
        key, gathers = line.args
        rows = "".join(
            f"    ({name!r}, {steps!r}{f', {printer.value(dtype)}' if dtype else ''}),\n"
            for name, steps, dtype in gathers
        )
        return f"rt.prefetch({key!r}, [\n{rows}])"
    if kind == "params.take":
        return f"{', '.join(line.outs)}{',' if len(line.outs) == 1 else ''} = rt.take({line.args[0]!r})"
    if kind == "grads.add":
        owned = ", owned=True" if line.kwargs.get("owned") else ""
        return f"rt.grads.add({line.args[0]!r}, {line.args[1].name}{owned})"
    if kind == "grads.sum":
        return f"{line.outs[0]} = rt.grads.start_sum({line.args[0].name}, {line.args[1]!r})  # {show_types(line)}"
    if kind == "grads.seed":
        (type_,) = line.args
        dtype = printer.value(type_.dtype)
        return f"{line.outs[0]} = torch.full({type_.shape!r}, rt.loss_scale, dtype={dtype}, device=rt.device)"
    if kind == "grads.zero":
        type_, spec = line.args
        local = spec.local_shape(type_.shape, stage.mesh)
        return f"{line.outs[0]} = torch.zeros({local!r}, dtype={printer.value(type_.dtype)}, device=rt.device)"
    if kind == "tier.park":
        saved, places, tier, name = line.args
        values = [stage.templates[name].saved[i] for i in places]
        what = ", ".join(values[:4]) + (", …" if len(values) > 4 else "")
        shown = f"({', '.join(map(str, places))}{',' if len(places) == 1 else ''})"
        return f"rt.park({saved.name}, {shown}, {tier!r})  # {what} rest in {TIERS.get(tier, tier)} until backward"
    if kind == "tier.fetch":
        return f"rt.fetch({line.args[0].name})  # on their way back, one call ahead"
    if kind == "tier.ready":
        return f"rt.ready({line.args[0].name})"
    if kind == "buffer.read":
        return f"{line.outs[0]} = rt.buffers[{line.args[0]!r}]" + (".clone()" if line.kwargs.get("copy") else "")
    if kind == "buffer.write":
        return f"rt.buffers[{line.args[0]!r}].copy_({line.args[1].name})"
    return f"{targets(line)} = {printer.expression(line)}  # {show_types(line)}"


def _use(line: Line, stage: LoweredStage) -> str:
    """A call of a template's function."""
    name, index, *rest = line.args
    template = stage.templates[name]
    outs = list(line.outs)
    if line.op == "call.forward":
        params, inputs = rest
        if template.backward is not None and not line.kwargs["keep"]:
            outs.append("_")
        arguments = [*(_param(p) for p in params), *(x.name for x in inputs)]
        return _call(", ".join(outs), template.forward.name, ["rt", str(index), *arguments])
    left = ", ".join(outs) + ("," if len(outs) == 1 else "")
    if line.op == "call.weights":
        assert template.weights is not None
        return _call(left, template.weights.name, ["rt", str(index), rest[0].name])
    saved, params, tangents = rest
    assert template.backward is not None
    arguments = [saved.name, *(_param(p) for p in params), *(t.name for t in tangents)]
    if not template.backward.returns and not outs:
        left = "_"
    return _call(left, template.backward.name, ["rt", str(index), *arguments])


def _param(p: Ref | str) -> str:
    return p.name if isinstance(p, Ref) else f"rt.params[{p!r}]"


def _call(left: str, function: str, arguments: list[str]) -> str:
    one = f"{left} = {function}({', '.join(arguments)})"
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
    return f"{left} = {function}(\n{joined}\n)"
