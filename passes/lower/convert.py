"""Conversions between specs: as lines of a function, each of a value once, or as steps in the runtime's tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.ir.lines import Compute, Convert, Line, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.steps import RuntimeStep, Step
from autopar.ir.types import TensorType
from autopar.passes.lower.names import Names
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.runs import gather_steps, owed_block, scatter_steps
from autopar.runtime.comm.reshard import TABLE_STEPS


class Converter:
    """Appends conversion lines through `append`; equal conversions of one value are made once."""

    def __init__(self, pricer: Pricer, names: Names, append: Callable[[Line], None]) -> None:
        self.pricer, self.names, self.append = pricer, names, append
        self._converted: dict[tuple[str, Spec], str] = {}

    def convert(
        self, name: str, stem: str, type_: TensorType, before: Spec, after: Spec, phase: str, source: str
    ) -> str:
        """Name of the value `name` (of spec `before`) in spec `after`; stem: of the names of what comes between."""
        for step, spec in path(self.pricer, type_, before, after):
            key = (name, spec)
            if key not in self._converted:
                out = self.names.fresh(f"{stem}_{step.facts.noun}")
                whole = gathered_extent(step, type_, spec, self.pricer.mesh)
                made = Convert(name, step, stem, whole, outs=(out,), types=(type_,), specs=(spec,))
                self.append(replace(made, phase=phase, source=source))
                self._converted[key] = out
            name = self._converted[key]
        return name


def gathered_extent(step: Step, type_: TensorType, spec: Spec, mesh: Mesh) -> int | None:
    """The length of a dim that is gathered from unequal blocks, or None. spec: after the step."""
    if step.kind != "all_gather" or not mesh.uneven:
        return None
    size, axes = type_.shape[step.dim], spec.dims[step.dim]
    return mesh.extent(size, axes) if mesh.is_uneven(size, (*axes, step.axis)) else None


def cast(value: str, out: str, type_: TensorType, spec: Spec, phase: str, source: str) -> Compute:
    """The line that makes `out`, a value in the dtype of `type_`."""
    kwargs = {"self": Ref(value), "dtype": type_.dtype}
    return Compute(
        "aten._to_copy.default", kwargs, outs=(out,), types=(type_,), specs=(spec,), phase=phase, source=source
    )


def path(
    pricer: Pricer, type_: TensorType, before: Spec, after: Spec, joined: tuple[str, ...] = (), compression: str = ""
) -> list[tuple[Step, Spec]]:
    """The cheapest conversion; joined, compression: as of `Pricer.joined_s`."""
    if before == after:
        return []
    ops = tuple(sorted({"sum", *(op for _, op in before.partial), *(op for _, op in after.partial)}))
    return pricer.lattice(type_, ops, joined, compression).path(before, after)


def table_steps(
    pricer: Pricer, type_: TensorType, before: Spec, after: Spec, joined: tuple[str, ...] = (), compression: str = ""
) -> tuple[RuntimeStep, ...] | None:
    """The cheapest conversion of a parameter or its gradient for the runtime's tables, from a run or to one too; None where it
    has no table form. joined, compression: as of `Pricer.joined_s`."""
    if before == after:
        return ()
    there = owed_block(before, after) if after.run else after
    between = runtime_steps(path(pricer, type_, before.block, there, joined, compression), type_, pricer.mesh)
    if between is None:
        return None
    gathers = gather_steps(before, type_.shape, pricer.mesh)
    return (*gathers, *between, *scatter_steps(there, after, type_.shape, pricer.mesh))


def runtime_steps(steps: list[tuple[Step, Spec]], type_: TensorType, mesh: Mesh) -> tuple[RuntimeStep, ...] | None:
    """Steps for the runtime's tables, or None when one of them has no table form."""
    table: list[RuntimeStep] = []
    for step, after in steps:
        if step.kind not in TABLE_STEPS:
            return None
        if not step.dims and table and table[-1].kind == step.kind:
            table[-1] = RuntimeStep(step.kind, (*table[-1].axes, step.axis))
        else:
            whole = gathered_extent(step, type_, after, mesh)
            table.append(RuntimeStep(step.kind, step.axes, step.dims if whole is None else (*step.dims, whole)))
    return tuple(table)
