"""One stage as one readable Python file: tables, a function pair per template, and the step that calls them."""

from __future__ import annotations

from typing import Any

import jinja2

from autopar.codegen.printer import Dtypes, Printer, body, fuse_bias, show_types
from autopar.ir.lowered import Function, Line, LoweredStage, LoweredTemplate, Ref
from autopar.ir.spec import Spec
from autopar.ops.discover import target_of

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("autopar.codegen", "templates"), trim_blocks=True, lstrip_blocks=True,
    keep_trailing_newline=True, undefined=jinja2.StrictUndefined,
)  # fmt: skip


def render(template: str, **values: Any) -> str:
    """Fill one of the jinja2 templates of this package."""
    return _ENVIRONMENT.get_template(template).render(**values)


def stage_source(stage: LoweredStage, title: str, dtypes: Dtypes | None = None) -> str:
    """The file of a stage."""
    printer = Printer(dtypes)
    functions: list[dict[str, Any]] = []
    for template in stage.templates.values():
        functions.append(_forward(template, printer))
        if template.backward is not None:
            functions.append(_backward(template, printer))
    return render(
        "stage.py.j2", title=title, stage=stage, functions=functions, step=_step(stage, printer),
        parameters=[_parameter(p, printer) for p in stage.parameters.values()],
        buffers=[(n, f"dict(shape={t.shape!r}, dtype={printer.dtype(t.dtype)!r}, spec={((),) * len(t.shape)!r})")
                 for n, t in stage.buffers.items()],
        inputs=[_tensor_row(n, t, s, printer) for n, t, s in stage.inputs],
        outputs=[_tensor_row(n, t, s, printer) for n, t, s in stage.outputs],
        gradients=[(p.name, f"dict(contributions={p.contributions}, steps={p.reduce!r})")
                   for p in stage.parameters.values() if p.contributions],
        mesh=dict(stage.mesh.axes), user_ops=_uses(stage, "autopar_ops."),
    )  # fmt: skip


def _uses(stage: LoweredStage, prefix: str) -> bool:
    functions = [f for t in stage.templates.values() for f in (t.forward, t.backward) if f is not None]
    return any(line.op.startswith(prefix) for f in functions for line in f.lines)


def _tensor_row(name: str, type_: Any, spec: Spec, printer: Printer) -> str:
    return f"dict(name={name!r}, shape={type_.shape!r}, dtype={printer.dtype(type_.dtype)!r}, spec={spec.dims!r})"


def _parameter(p: Any, printer: Printer) -> tuple[str, str]:
    row = f"dict(shape={p.type.shape!r}, dtype={printer.dtype(p.type.dtype)!r}, spec={p.storage.dims!r}"
    row += f", opt_spec={p.optimizer.dims!r}, trainable={p.trainable!r}, gather={p.regather!r})"
    return p.name, row


def _statement(printer: Printer) -> Any:
    def text(line: Line) -> str:
        return f"{_targets(line)} = {printer.expression(line)}  # {show_types(line)}"

    return text


def _targets(line: Line) -> str:
    return ", ".join(line.outs) + ("," if len(line.outs) == 1 and len(line.types) == 1 and _is_list(line.op) else "")


def _is_list(op: str) -> bool:
    """Whether the op returns its results in a list, which may have one entry."""
    returns = target_of(op)._schema.returns if "." in op and not op.startswith("comm.") else []
    return len(returns) == 1 and str(returns[0].type).startswith("List")


def _signature(function: Function) -> list[str]:
    return [f"{a}: {s.show(t)}" for a in function.args for t, s in [function.arg_types[a]]]


def _forward(template: LoweredTemplate, printer: Printer) -> dict[str, Any]:
    function = fuse_bias(template.forward)
    outs = [n for n in function.returns if n]
    returned = {*outs, *template.saved}
    results = [*outs, f"[{', '.join(template.saved)}]"] if template.backward is not None else outs
    return {
        "name": function.name, "args": ["rt", "call", *function.args], "doc": _signature(function),
        "what": f"Forward of template {template.name}.",
        "body": body(function, _statement(printer), returned), "result": ", ".join(results),
    }  # fmt: skip


def _backward(template: LoweredTemplate, printer: Printer) -> dict[str, Any]:
    function = template.backward
    assert function is not None
    lines = body(function, _statement(printer), {n for n in function.returns if n})
    if template.saved:
        comma = "," if len(template.saved) == 1 else ""
        lines = [f"{', '.join(template.saved)}{comma} = saved", "saved.clear()", *lines]
    results = [n or "None" for n in function.returns]
    return {
        "name": function.name, "args": ["rt", "call", "saved", *function.args], "doc": _signature(function),
        "what": f"Backward of template {template.name}: gradients of its inputs, then of its parameters.",
        "body": lines, "result": ", ".join(results) + ("," if len(results) == 1 else ""),
    }  # fmt: skip


def _step(stage: LoweredStage, printer: Printer) -> dict[str, Any]:
    def text(line: Line) -> str:
        kind = line.op
        if kind == "call.forward":
            name, index, params, inputs = line.args
            template = stage.templates[name]
            outs = list(line.outs)
            if template.backward is not None and not line.kwargs["keep"]:
                outs.append("_")
            arguments = [*(_param(p) for p in params), *(x.name for x in inputs)]
            return _call(", ".join(outs), template.forward.name, ["rt", str(index), *arguments])
        if kind == "call.backward":
            name, index, saved, params, tangents = line.args
            function = stage.templates[name].backward
            assert function is not None
            targets = ", ".join(line.outs) + ("," if len(line.outs) == 1 else "")
            arguments = [saved.name, *(_param(p) for p in params), *(t.name for t in tangents)]
            return _call(targets, function.name, ["rt", str(index), *arguments])
        if kind == "params.prefetch":
            key, gathers = line.args
            rows = "".join(f"    ({name!r}, {steps!r}),\n" for name, steps in gathers)
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
            return f"{line.outs[0]} = torch.ones({type_.shape!r}, dtype={printer.value(type_.dtype)}, device=rt.device)"
        if kind == "grads.zero":
            type_, spec = line.args
            local = spec.local_shape(type_.shape, stage.mesh)
            return f"{line.outs[0]} = torch.zeros({local!r}, dtype={printer.value(type_.dtype)}, device=rt.device)"
        if kind == "buffer.read":
            return f"{line.outs[0]} = rt.buffers[{line.args[0]!r}]"
        if kind == "buffer.write":
            return f"rt.buffers[{line.args[0]!r}].copy_({line.args[1].name})"
        return f"{_targets(line)} = {printer.expression(line)}  # {show_types(line)}"

    function = stage.step
    returned = {n for n in function.returns if n}
    return {
        "inputs": list(function.args), "body": body(function, text, returned),
        "result": ", ".join(n or "None" for n in function.returns),
    }  # fmt: skip


def _param(p: Ref | str) -> str:
    return p.name if isinstance(p, Ref) else f"rt.params[{p!r}]"


def _call(targets: str, function: str, arguments: list[str]) -> str:
    one = f"{targets} = {function}({', '.join(arguments)})"
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
    return f"{targets} = {function}(\n{joined}\n)"
