"""Whether two captured programs are the same, node for node: names of values aside, which tell in which order they were made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from autopar.capture.while_traced.alike import traced_in_full
from autopar.ir.program import Program, Template, op_name


def described(program: Program) -> list[Any]:
    """All that a program is, one line a node and call."""
    numbers = {name: i for i, name in enumerate(program.templates)}
    lines: list[Any] = [line for template in program.templates.values() for line in _of_template(template)]
    lines += [(numbers[c.template], c.params, c.inputs, c.path, c.start, c.prologue) for c in program.calls]
    lines += [program.parameters, program.buffers, program.inputs, program.outputs, program.buffer_updates]
    return [
        *lines,
        program.guards,
        dict(program.conditions),
        program.batch_dims,
        program.extras,
        str(program.structure),
    ]


def _of_template(template: Template) -> Iterator[Any]:
    number = {node.name: i for i, node in enumerate(template.graph.nodes)}

    def plain(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return "node", number[arg.name]
        if isinstance(arg, (list, tuple)):
            return [plain(one) for one in arg]
        return {k: plain(v) for k, v in arg.items()} if isinstance(arg, dict) else arg

    def places(names: Sequence[str | None]) -> list[int | None]:
        return [None if name is None else number[name] for name in names]

    yield places(template.params), places(template.inputs), places(template.outputs), places(template.tangents)
    yield places(template.input_grads), places(template.param_grads), template.random
    for node in template.graph.nodes:
        op = op_name(node.target) if node.op == "call_function" else node.op
        yield op, str(plain(node.args)), str(plain(node.kwargs)), *map(node.meta.get, ("type", "phase", "source"))


def assert_same_in_full(captured: Callable[[], Program]) -> None:
    """A program is the same where every call is traced."""
    short = described(captured())
    with traced_in_full():
        full = described(captured())
    different = next(((one, other) for one, other in zip(short, full, strict=False) if one != other), None)
    assert different is None, different
    assert len(short) == len(full)
