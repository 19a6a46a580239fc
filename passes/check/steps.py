"""Steps held to the specs that they lead from and to: conversions in functions, and the tables of parameters and gradients."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.errors import CheckError
from autopar.ir.lowered import StoredParameter
from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.steps import AnyStep, RuntimeStep, Step


def stepped(spec: Spec, step: AnyStep, mesh: Mesh, what: str, flat: bool = False) -> Spec:
    """The spec after a step. what: it is done with; flat: that is the runs of a block, one after another. Raises CheckError where
    the spec does not allow it."""
    dims, partial, run, facts = list(spec.dims), dict(spec.partial), spec.run, step.facts
    for axis in step.axes:

        def need(condition: bool, why: str, axis: str = axis) -> None:
            if not condition:
                raise CheckError(f"{step.kind} over {axis} of {what}: {why}")

        need(axis in mesh.sizes, f"the mesh has {', '.join(mesh.names)}")
        if facts.owes < 0:
            owed = step.reduction if isinstance(step, Step) else "sum"
            need(partial.pop(axis, None) == owed, "nothing of that kind is owed over the axis")
        elif 1 not in facts.table.dims:
            need(axis not in spec.axes, "the axis is in use")
        for dim, grows in step.moved:
            held = run if flat else dims[dim]
            need(not flat or dim == 0, "a run is along dim 0")
            need(flat or not facts.table.of_runs, "there are no runs to take from")
            if grows > 0:
                need(held[-1:] == (axis,), "the axis is not the minor-most of that dim")
            held = held[:-1] if grows > 0 else (*held, axis)
            if flat:
                run = held
            else:
                dims[dim] = held
        if facts.owes > 0:
            partial[axis] = "sum"
    return Spec(tuple(dims), tuple(sorted(partial.items())), run)


def check_steps(
    p: StoredParameter, way: str, before: Spec, steps: Iterable[RuntimeStep], after: Spec, mesh: Mesh
) -> None:
    """Raises CheckError where steps of a table do not lead a parameter or its gradient from one spec to the other."""
    spec, flat = before, bool(before.run) and before.owner is None
    for step in steps:
        what = f"{way} of {p.name} {spec.show(p.type)}"
        if step.facts.table.of_owner:
            spec = _owned(spec, step, after, p, mesh, what)
            continue
        if not step.facts.table.of_block:
            spec = stepped(spec, step, mesh, what, flat)
            continue
        block = spec.block.local_shape(p.type.shape, mesh) if spec.block.divides(p.type.shape, mesh) else None
        if spec.run or step.dims != block or flat == (step.kind == "flatten"):
            raise CheckError(
                f"{step.kind} of {what}: it is no block of {step.dims} that becomes its runs, or all of these"
            )
        flat = not flat
        runs = after.run if flat else before.run
        if step.axes != runs:
            raise CheckError(f"{step.kind} of {what}: it is for runs over {step.axes}, there are some over {runs}")
    if spec != after or flat != (bool(after.run) and after.owner is None):
        raise CheckError(f"{way} of {p.name}: steps lead from {before} to {spec}, it is {after}")


def _owned(spec: Spec, step: RuntimeStep, after: Spec, p: StoredParameter, mesh: Mesh, what: str) -> Spec:
    """The spec after a step to the owner of a block or from it."""
    axes, (owner, *sizes) = step.axes, step.dims
    if step.kind == "broadcast":
        block = spec.block.local_shape(p.type.shape, mesh)
        if (spec.run, spec.owner, block) != (axes, owner, tuple(sizes)):
            raise CheckError(f"broadcast of {what}: rank {owner} over {axes} has no block of {sizes} to give")
        return spec.block
    if after.owner is None or owner != after.owner_along(axes, mesh) or not set(axes) <= set(after.run):
        raise CheckError(f"{step.kind} of {what}: rank {owner} over {axes} is not the owner of {after}")
    if step.kind == "reduce":
        return stepped(spec, step, mesh, what)
    if axes != after.run or not spec.axes.isdisjoint(axes):
        raise CheckError(f"own of {what}: it is not whole over {axes}")
    return Spec(spec.dims, spec.partial, axes, owner)
