"""Runs of elements: which there are of a parameter, and the steps to and from the block that they are cut from.

What rests of a parameter may be a run (`autopar/ir/spec.py`) where no dim divides by the ranks that are to share it. A run is
gathered to its block, from where the lattice goes on, and a gradient comes to its block in the spec that owes over the run's
axes what it owes:

    f32[3, 3] run(dp)  --all_gather, unflatten-->  f32[3, 3]
    f32[3, 3] ~sum(dp)  --flatten, reduce_scatter-->  f32[3, 3] run(dp)

What an optimizer needs whole is not cut but has an owner among these ranks (`owned_states`):

    f32[3, 3] whole(dp=1)  --broadcast-->  f32[3, 3]
    f32[3, 3] ~sum(dp)  --reduce, own-->  f32[3, 3] whole(dp=1)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations

from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.steps import RuntimeStep, passed
from autopar.passes.rules.alphabet import refinements, shards
from autopar.passes.rules.lattice import CollectiveCost

States = tuple[tuple[Spec, Spec], ...]
"""Pairs of storage and optimizer specs."""


def run_states(axes: tuple[tuple[str, int], ...], shape: tuple[int, ...]) -> States:
    """How a trained parameter may be stored and updated with runs: those of every block over axes that no dims can take in equal
    parts together with its own, which are stored too, or of which the optimizer's state is beside a coarser block. Also such a
    state beside a coarser block whose free dims do not divide, and whose others the axes would cut the other way round: of
    f32[7, 8] [., @tp] a run over dp, as [., @dp.tp] is no part of it."""
    if not shape:
        return ()
    on_mesh, mesh = shards(axes, len(shape)), Mesh(axes)
    letters, divides = on_mesh.letters, on_mesh.divide(shape).tolist()
    blocks = [
        s for s, fits, owes in zip(letters.specs, divides, letters.owed.tolist(), strict=True) if fits and not owes
    ]
    uneven = {s for s in blocks if s.is_uneven(shape, mesh)}
    taken, coarser = {block.axes for block in blocks if block not in uneven}, dict[Spec, list[Spec]]()
    for a, b in zip(*(n.tolist() for n in refinements(letters)), strict=True):
        if divides[a] and divides[b] and (a == b or letters.specs[b] not in uneven):
            coarser.setdefault(letters.specs[b], []).append(letters.specs[a])
    finer = {(storage, block.axes) for block, several in coarser.items() for storage in several}
    states = []
    for block in blocks:
        elements = math.prod(block.local_shape(shape, mesh))
        free = [axis for axis in letters.axes if axis not in block.axes]
        for run in (run for n in range(1, len(free) + 1) for run in combinations(free, n)):
            together, spec = block.axes.union(run), Spec(block.dims, (), run)
            if together not in taken and elements > 1:
                states += [(spec, spec), *((storage, spec) for storage in coarser[block])]
            elif () in block.dims and elements >= mesh.product(run):
                states += [(storage, spec) for storage in coarser[block] if (storage, together) not in finer]
    return tuple(states)


def owned_states(axes: tuple[tuple[str, int], ...], shape: tuple[int, ...]) -> States:
    """How a trained parameter that is updated as a whole tensor may rest on one rank along axes: all of it, or its gradient and
    optimizer's state alone. Which one is the owner is chosen when all parameters are known."""
    several = [axis for axis, size in axes if size > 1]
    if math.prod(shape) < 2:
        return ()
    whole = Spec.replicated(len(shape))
    owned = [Spec(whole.dims, (), run, 0) for n in range(1, len(several) + 1) for run in combinations(several, n)]
    return tuple((storage, spec) for spec in owned for storage in (whole, spec))


def owed_block(before: Spec, after: Spec) -> Spec:
    """The block of a run in the spec in which its elements are cut: it owes the sums that `before` owes over the run's axes."""
    return Spec(after.dims, tuple((axis, op) for axis, op in before.partial if axis in after.run and op == "sum"))


def gather_steps(spec: Spec, shape: tuple[int, ...], mesh: Mesh) -> tuple[RuntimeStep, ...]:
    """From a run to its block."""
    if not spec.run:
        return ()
    if spec.owner is not None:
        return (RuntimeStep("broadcast", spec.run, (spec.owner, *spec.block.local_shape(shape, mesh))),)
    gathers = (RuntimeStep("all_gather", (axis,), (0,)) for axis in reversed(spec.run))
    return (*gathers, RuntimeStep("unflatten", spec.run, spec.block.local_shape(shape, mesh)))


def scatter_steps(before: Spec, spec: Spec, shape: tuple[int, ...], mesh: Mesh) -> tuple[RuntimeStep, ...]:
    """From a block as of `owed_block` to its run."""
    if not spec.run:
        return ()
    owed = {axis for axis, _ in before.partial}
    if spec.owner is not None:
        summed = tuple(axis for axis in spec.run if axis in owed)
        sums = (RuntimeStep("reduce", summed, (spec.owner_along(summed, mesh),)),) if summed else ()
        return (*sums, RuntimeStep("own", spec.run, (spec.owner,)))
    cuts = (RuntimeStep("reduce_scatter" if axis in owed else "take", (axis,), (0,)) for axis in spec.run)
    return (RuntimeStep("flatten", spec.run, spec.block.local_shape(shape, mesh)), *cuts)


def steps_s(steps: Iterable[RuntimeStep], held: float, mesh: Mesh, cost: CollectiveCost, copy_s: float) -> float:
    """Seconds of steps. held: bytes of a rank before them."""
    seconds = 0.0
    for step, axis, size, before in passed(steps, held, mesh):
        seconds += step.facts.copied_s(before, size, step.dims, copy_s)
        seconds += cost(step.kind, step.facts.full_bytes(before, size), axis) if step.facts.sends else 0.0
    return seconds
