"""One stage as one readable Python file: tables, a function pair per template, and the step that calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jinja2

from autopar.codegen.actions import stage_functions
from autopar.codegen.printer import Dtypes, Printer, body, statement
from autopar.ir.fusion import fuse_bias
from autopar.ir.lines import Compute, Function
from autopar.ir.lowered import LoweredStage, LoweredTemplate, Row, StoredParameter
from autopar.ir.steps import rows

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("autopar.codegen", "templates"),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
)


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
        if template.weights is not None:
            functions.append(_weights(template, printer))
    return render(
        "stage.py.j2",
        title=title,
        stage=stage,
        functions=functions,
        actions=stage_functions(stage, printer),
        parameters=[_parameter(p, printer) for p in stage.parameters.values()],
        buffers=[
            (n, f"dict(shape={t.shape!r}, dtype={printer.dtype(t.dtype)!r}, spec={((),) * len(t.shape)!r})")
            for n, t in stage.buffers.items()
        ],
        inputs=[_row(row, printer) for row in stage.inputs],
        outputs=[_row(row, printer) for row in stage.outputs],
        gradients=[
            (p.name, f"dict(contributions={p.contributions}, steps={rows(p.reduce)!r})")
            for p in stage.parameters.values()
            if p.contributions
        ],
        ports={
            "RECEIVES": [p.name for p in stage.received],
            "SENDS": [p.name for p in stage.sent],
            "GRADIENT_RECEIVES": [p.name for p in stage.gradients_received],
            "GRADIENT_SENDS": [p.name for p in stage.gradients_sent],
        },
        mesh=dict(stage.mesh.axes),
        user_ops=bool(registered_ops(stage)),
    )


def registered_ops(stage: LoweredStage) -> frozenset[str]:
    """Names of the ops that the user registered and the stage's templates use."""
    lines = (line for t in stage.templates.values() for f in t.functions for line in f.lines)
    ops = (line.op.split(".") for line in lines if isinstance(line, Compute))
    return frozenset(name for namespace, name, *_ in ops if namespace == "autopar_ops")


def _row(row: Row, printer: Printer) -> str:
    return (
        f"dict(index={row.index}, name={row.name!r}, shape={row.type.shape!r}, dtype={printer.dtype(row.type.dtype)!r}, "
        f"spec={row.spec.dims!r}, batch_dim={row.batch_dim!r})"
    )


def _parameter(p: StoredParameter, printer: Printer) -> tuple[str, str]:
    row = f"dict(shape={p.type.shape!r}, dtype={printer.dtype(p.type.dtype)!r}, spec={p.storage.dims!r}"
    row += f", opt_spec={p.optimizer.dims!r}, trainable={p.trainable!r}, gather={rows(p.regather)!r}"
    row += f", tier={p.tier!r}" if p.tier else ""
    row += f", optimizer_tier={p.optimizer_tier!r}" if p.optimizer_tier else ""
    row += ")"
    return p.name, row


def _statements(function: Function, printer: Printer, returned: set[str]) -> list[str]:
    return body(function, lambda line: statement(line, printer), returned)


def _signature(function: Function) -> list[str]:
    return [f"{a}: {s.show(t)}" for a in function.args for t, s in [function.arg_types[a]]]


def _forward(template: LoweredTemplate, printer: Printer) -> dict[str, Any]:
    function = fuse_bias(template.forward, template.saved)
    outs = [n for n in function.returns if n]
    returned = {*outs, *template.saved}
    results = [*outs, f"[{', '.join(template.saved)}]"] if template.backward is not None else outs
    return {
        "name": function.name,
        "args": ["rt", "call", *function.args],
        "doc": _signature(function),
        "what": f"Forward of template {template.name}.",
        "body": _statements(function, printer, returned),
        "result": ", ".join(results),
    }


def _backward(template: LoweredTemplate, printer: Printer) -> dict[str, Any]:
    function = template.backward
    assert function is not None
    returned = {n for n in function.returns if n} | set(template.later)
    lines = _unpack("saved", template.saved, _statements(function, printer, returned))
    results = [n or "None" for n in function.returns]
    if template.later:
        results.append(f"[{', '.join(template.later)}]")
    what = "gradients of its inputs" + ("" if template.weights else ", then of its parameters")
    return {
        "name": function.name,
        "args": ["rt", "call", "saved", *function.args],
        "doc": _signature(function),
        "what": f"Backward of template {template.name}: {what}.",
        "body": lines,
        "result": _tuple(results),
    }


def _weights(template: LoweredTemplate, printer: Printer) -> dict[str, Any]:
    function = template.weights
    assert function is not None
    lines = _unpack("later", function.args, _statements(function, printer, {n for n in function.returns if n}))
    return {
        "name": function.name,
        "args": ["rt", "call", "later"],
        "doc": _signature(function),
        "what": f"Gradients of the parameters of template {template.name}.",
        "body": lines,
        "result": _tuple([n or "None" for n in function.returns]),
    }


def _unpack(source: str, names: Sequence[str], lines: list[str]) -> list[str]:
    """Take the values out of a list, which then holds them no longer."""
    if not names:
        return lines
    comma = "," if len(names) == 1 else ""
    return [f"{', '.join(names)}{comma} = {source}", f"{source}.clear()", *lines]


def _tuple(results: list[str]) -> str:
    return ", ".join(results) + ("," if len(results) == 1 else "")
