"""One stage as one readable Python file: tables, a function pair per template, and the step that calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2

from autopar.codegen.actions import stage_functions
from autopar.codegen.body import Body
from autopar.codegen.marks import local, quoted
from autopar.codegen.printer import Dtypes, Printer, home_of, statement
from autopar.codegen.table import table_lines
from autopar.codegen.text import docstring, identifier
from autopar.ir.fusion import fuse_bias
from autopar.ir.lines import Compute, Function, Start
from autopar.ir.lowered import LoweredStage, LoweredTemplate, Row, StoredParameter
from autopar.ir.steps import rows
from autopar.ops.runtime_modules import RUNTIME_MODULES, home_packages
from autopar.runtime.comm.mesh import told_sizes

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("autopar.codegen", "templates"),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
)
_ENVIRONMENT.filters |= {"docstring": docstring, "identifier": identifier}


def render(template: str, **values: Any) -> str:
    """Fill one of the jinja2 templates of this package."""
    return _ENVIRONMENT.get_template(template).render(**values)


def stage_sources(
    stages: Sequence[LoweredStage], title: Callable[[LoweredStage], str], dtypes: Dtypes | None = None
) -> tuple[str, ...]:
    """The file of every stage. A template that stages share is printed once."""
    printer = Printer(dtypes, local)
    templates = dict.fromkeys(template for stage in stages for template in stage.templates.values())
    functions = {template: [*_functions(template, printer)] for template in templates}
    return tuple(_source(stage, title(stage), functions, printer) for stage in stages)


def _source(
    stage: LoweredStage, title: str, functions: Mapping[LoweredTemplate, list[dict[str, Any]]], printer: Printer
) -> str:
    """functions: those of every template, as the file's template takes them."""
    return render(
        "stage.py.j2",
        title=title,
        stage=stage,
        functions=[row for template in stage.templates.values() for row in functions[template]],
        actions=stage_functions(stage, printer),
        parameters=table_lines([_parameter(p, printer) for p in stage.parameters.values()], named=True),
        buffers=table_lines(
            [
                f"{quoted(n)}: dict(shape={t.shape!r}, dtype={printer.dtype(t.dtype)!r}, spec={((),) * len(t.shape)!r})"
                for n, t in stage.buffers.items()
            ],
            named=True,
        ),
        inputs=[_row(row, printer, _rows_of(row)) for row in stage.inputs],
        outputs=[_row(row, printer, f"join={(row.join.how, row.join.dim, row.join.outer)!r}") for row in stage.outputs],
        gradients=table_lines([_gradient(p) for p in stage.parameters.values() if p.contributions], named=True),
        ends={
            "RECEIVES": [p.name for p in stage.received],
            "SENDS": [p.name for p in stage.sent],
            "GRADIENT_RECEIVES": [p.name for p in stage.gradients_received],
            "GRADIENT_SENDS": [p.name for p in stage.gradients_sent],
            "PREPARED": list(stage.prepared),
        },
        mesh=told_sizes(stage.mesh.sizes),
        user_ops=bool(registered_ops(stage)),
        homes=home_packages(RUNTIME_MODULES.keys() & {"ops", *(home_of(line) for line in computed(stage))}),
    )


def computed(stage: LoweredStage) -> Iterator[Compute]:
    """The ops of a stage's templates."""
    lines = (line for t in stage.templates.values() for f in t.functions for line in f.lines)
    begun = (line.line if isinstance(line, Start) else line for line in lines)
    return (line for line in begun if isinstance(line, Compute))


def registered_ops(stage: LoweredStage) -> frozenset[str]:
    """Names of the ops that the user registered and the stage's templates use."""
    ops = (line.op.split(".") for line in computed(stage))
    return frozenset(name for namespace, name, *_ in ops if namespace == "autopar_ops")


def _row(row: Row, printer: Printer, extra: str) -> str:
    return (
        f"dict(index={row.index}, name={row.name!r}, shape={row.type.shape!r}, dtype={printer.dtype(row.type.dtype)!r}, "
        f"spec={row.spec.dims!r}, {extra})"
    )


def _rows_of(row: Row) -> str:
    shared = f", row_axes={row.row_axes!r}" if row.row_axes else ""
    return f"batch_dim={row.batch_dim!r}{shared}"


def _parameter(p: StoredParameter, printer: Printer) -> str:
    row = (
        f"{quoted(p.name)}: dict(shape={p.type.shape!r}, dtype={printer.dtype(p.type.dtype)!r}, spec={p.storage.row!r}"
    )
    row += f", opt_spec={p.optimizer.row!r}, trainable={p.trainable!r}, gather={rows(p.regather)!r}"
    row += f", tier={p.tier!r}" if p.tier else ""
    row += f", optimizer_tier={p.optimizer_tier!r}" if p.optimizer_tier else ""
    row += f", narrow={printer.dtype(p.narrow)!r}" if p.narrow else ""
    row += f", room={quoted(p.room)}" if p.room else ""
    return row + ")"


def _gradient(p: StoredParameter) -> str:
    compression = f", compression={p.compression!r}" if p.compression else ""
    each = ", by_microbatch=True" if p.by_microbatch else ""
    return f"{quoted(p.name)}: dict(contributions={p.contributions}, steps={rows(p.reduce)!r}{compression}{each})"


def _functions(template: LoweredTemplate, printer: Printer) -> Iterator[dict[str, Any]]:
    """A template's functions; what one keeps for the next is a list at the end of its results."""
    front, back, weights = fuse_bias(template.forward, template.saved), template.backward, template.weights
    outs = [n for n in front.returns if n]
    kept = [f"[{', '.join(template.saved)}]"] if back is not None else []
    lines = _statements(front, printer, {*outs, *template.saved})
    yield _row_of(front, ["call", *front.args], f"Forward of template {template.name}.", lines, ", ".join(outs + kept))
    if back is not None:
        kept = [f"[{', '.join(template.later)}]"] if template.later else []
        what = "gradients of its inputs" + ("" if weights else ", then of its parameters")
        lines = _unpack(
            "saved", template.saved, _statements(back, printer, {*filter(None, back.returns), *template.later})
        )
        what = f"Backward of template {template.name}: {what}."
        yield _row_of(back, ["call", "saved", *back.args], what, lines, _tuple([*_results(back), *kept]))
    if weights is not None:
        lines = _unpack("later", weights.args, _statements(weights, printer, {*filter(None, weights.returns)}))
        what = f"Gradients of the parameters of template {template.name}."
        yield _row_of(weights, ["call", "later"], what, lines, _tuple(_results(weights)))


def _row_of(function: Function, args: list[str], what: str, lines: list[str], result: str) -> dict[str, Any]:
    """A function as the file's template takes it; its docstring shows the types of what it is given."""
    types = [f"{a}: {spec.show(type_)}" for a in function.args for type_, spec in [function.arg_types[a]]]
    return {"name": function.name, "args": ["rt", *args], "doc": types, "what": what, "body": lines, "result": result}


def _statements(function: Function, printer: Printer, returned: set[str]) -> list[str]:
    return [*Body(function, lambda line: statement(line, printer), returned).statements()]


def _results(function: Function) -> list[str]:
    return [n or "None" for n in function.returns]


def _unpack(source: str, names: Sequence[str], lines: list[str]) -> list[str]:
    """Take the values out of a list, which then holds them no longer."""
    if not names:
        return lines
    comma = "," if len(names) == 1 else ""
    return [f"{', '.join(names)}{comma} = {source}", f"{source}.clear()", *lines]


def _tuple(results: list[str]) -> str:
    return ", ".join(results) + ("," if len(results) == 1 else "")
