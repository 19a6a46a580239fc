"""Ops that ranks compute alike, each for itself, by kernels that give no two of them the same bits on a GPU.

A value that is replicated along a mesh axis is made once per rank of it. Where its op adds in an order of its own
(`autopar.ops.unordered`), the copies differ in their last bits, and with them the gradients and in the end the parameters that
ranks hold copies of; no message makes them one again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.lines import Compute, Function
from autopar.ir.lowered import LoweredProgram
from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ops.registry import find


@dataclass(frozen=True)
class Alike:
    """An op that ranks along a mesh axis compute alike. always: there is no kernel for it that adds in a fixed order."""

    op: str
    axis: str
    always: bool
    source: str


def computed_alike(program: LoweredProgram) -> list[Alike]:
    """Such ops of a program that is trained, each once per axis and line of the model."""
    found: dict[Alike, None] = {}
    for stage in program.stages if program.stages[0].training else ():
        for template in stage.templates.values():
            for function in template.functions:
                found |= dict.fromkeys(_of_function(function, stage.mesh))
    return list(found)


def _of_function(function: Function, mesh: Mesh) -> Iterator[Alike]:
    specs: dict[str, Spec | None] = {name: spec for name, (_, spec) in function.arg_types.items()}
    for line in function.lines:
        if isinstance(line, Compute) and (definition := find(line.op)) is not None and definition.unordered:
            yield from _of_line(line, specs, mesh, definition.unordered == "always")
        specs |= {name: spec for name, _, spec in line.made()}


def _of_line(line: Compute, specs: Mapping[str, Spec | None], mesh: Mesh, always: bool) -> Iterator[Alike]:
    whose = [*(specs.get(name) for name in line.reads()), *line.specs]
    apart = {axis for spec in whose if spec is not None for axis in spec.axes} | {axis for axis, _ in line.carried}
    for axis, size in mesh.axes:
        if size > 1 and axis not in apart:
            yield Alike(line.op, axis, always, line.source)
