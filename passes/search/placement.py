"""Where ranks go: logical ranks on physical ones so that what a plan sends most runs over the fastest links.

The traffic is that of the lowered program, bytes per step and direction between pairs of ranks: every collective as the
ring (or the pairs) along its axis, everything that crosses between stages, and what stages tell each other about shared
parameters. `passes.place` finds a cheap order and says what none is cheaper than, for few ranks as far as it can in EXACT_S. A
plan gets a placement only when that beats leaving ranks in order by more than GAIN; on clusters of one level ranks stay in order.
Where devices differ, ranks change places with ranks on the same kind of device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from autopar.cluster import ClusterSpec
from autopar.costmodel.collective import is_to_all
from autopar.ir.lowered import LoweredProgram, LoweredStage
from autopar.ir.mesh import Mesh
from autopar.passes.account.program import Account
from autopar.passes.place import Placement, Traffic, Tree, mesh_traffic, place
from autopar.passes.place.traffic import Shape, grid_lines, summed
from autopar.plan import Plan

GAIN = 0.01
"""Least part of the cost that a placement must save."""

EXACT_S = 1.0
"""Seconds that the proof may take, of the solver's own clock, which counts work: the same on every machine."""

MOST_RANKS = 8192
"""Ranks of larger clusters stay in order: a search would take seconds, and meshes have their inner axis on fast links."""

Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(senders, receivers, bytes per step) of pairs of logical ranks."""


def find_placement(
    plan: Plan, lowered: LoweredProgram, counted: Account, cluster: ClusterSpec
) -> tuple[Placement | None, Plan]:
    """The placement that was found, None where none was looked for; and the plan with it, where it is worth it."""
    if plan.placement or not 1 < plan.ranks <= MOST_RANKS:
        return None, plan
    tree = Tree.of(cluster, range(plan.ranks))
    if len(tree.groups) < 2 or tree.groups[0].max() == 0 or tree.distance[0] == tree.distance[-1]:
        return None, plan
    found = place(program_traffic(lowered, counted, plan.ranks), cluster, enough=GAIN, time_limit_s=EXACT_S)
    if found.cost >= found.identity_cost * (1 - GAIN):
        return found, plan
    logical = np.empty(plan.ranks, int)
    logical[list(found.physical)] = np.arange(plan.ranks)
    return found, replace(plan, placement=tuple(logical.tolist()))


def placement_gain(plan: Plan, lowered: LoweredProgram, counted: Account, cluster: ClusterSpec) -> float:
    """The part of the cost (bytes times seconds per byte) that the plan's placement saves."""
    if not plan.placement:
        return 0.0
    tree = Tree.of(cluster, range(plan.ranks))
    traffic = program_traffic(lowered, counted, plan.ranks)
    in_order = tree.cost(traffic, np.arange(plan.ranks))
    return 1 - tree.cost(traffic, np.argsort(plan.placement)) / in_order if in_order else 0.0


def program_traffic(lowered: LoweredProgram, counted: Account, ranks: int) -> Traffic:
    """Bytes per step and direction between logical ranks."""
    parts = [*_collectives(lowered, counted), *_transfers(lowered), *_shared(lowered)]
    first, second = (np.concatenate([np.empty(0, int), *(part[k] for part in parts)]) for k in range(2))
    traffic = summed(ranks, first, second, np.concatenate([np.empty(0), *(part[2] for part in parts)]))
    return replace(traffic, lines=_lines([stage.mesh for stage in lowered.stages], ranks))


def _lines(meshes: Sequence[Mesh], ranks: int) -> tuple[np.ndarray, ...]:
    """The lines along the axes of every stage's own ranks, of the first stage on them, and, where all stages have as many, those
    of the ranks that have the same number in their stages."""
    own = {mesh.offset: mesh for mesh in reversed(meshes)}
    ends = [0, *(mesh.offset + mesh.size for mesh in own.values())]
    if any(offset < end for offset, end in zip(sorted(own), sorted(ends), strict=False)):
        return ()
    lines = [np.arange(ranks) for _ in range(max(len(mesh.axes) for mesh in own.values()))]
    for offset, mesh in own.items():
        for axis, line in enumerate(grid_lines([int(size) for _, size in mesh.axes])):
            lines[axis][offset : offset + mesh.size] = offset + line
    if len({mesh.size for mesh in own.values()}) == 1:
        size = meshes[0].size
        across = np.arange(ranks)
        for offset in own:
            across[offset : offset + size] = min(own) + np.arange(size)
        lines.append(across)
    return tuple(lines)


def _collectives(lowered: LoweredProgram, counted: Account) -> Iterator[Pairs]:
    """Along every axis of a mesh: rings for reductions and gathers, all pairs for all-to-alls."""
    for stage, account in zip(lowered.stages, counted.stages, strict=True):
        mesh = stage.mesh
        rings: dict[str, float] = {}
        pairs: dict[str, float] = {}
        for c in account.collectives:
            size = mesh.sizes[c.axis]
            if is_to_all(c.kind):
                pairs[c.axis] = pairs.get(c.axis, 0.0) + c.times * c.nbytes / size
            else:
                passes = 2 if c.kind == "all_reduce" else 1
                rings[c.axis] = rings.get(c.axis, 0.0) + c.times * passes * c.nbytes * (size - 1) / size
        traffic_by_shape: tuple[tuple[dict[str, float], Shape], ...] = ((rings, "ring"), (pairs, "all"))
        for weights, shape in traffic_by_shape:
            if weights:
                traffic = mesh_traffic(mesh.sizes, weights, dict.fromkeys(mesh.names, shape))
                yield traffic.first + mesh.offset, traffic.second + mesh.offset, traffic.weight


def _transfers(lowered: LoweredProgram) -> Iterator[Pairs]:
    """Values and gradients that cross between stages."""
    totals: dict[tuple[int, int], float] = {}
    for t in lowered.transfers:
        target = lowered.stages[t.target].mesh
        key = (t.source, t.target)
        totals[key] = (
            totals.get(key, 0.0) + t.target_spec.local_bytes(t.type, target) * lowered.stages[t.target].microbatches
        )
    for (source, goal), nbytes in totals.items():
        yield _between(lowered.stages[source].mesh, lowered.stages[goal].mesh, nbytes)


def _shared(lowered: LoweredProgram) -> Iterator[Pairs]:
    """Parameters that several stages hold, from their owner to the others."""
    for name, (owner, *others) in lowered.shared.items():
        for other in others:
            yield _between(lowered.stages[owner].mesh, lowered.stages[other].mesh, _held(lowered.stages[other], name))


def _held(stage: LoweredStage, name: str) -> float:
    """Bytes of a parameter's value on a rank of the stage (its gradient goes the other way)."""
    p = stage.parameters.get(name)
    return p.stored_bytes(stage.mesh) if p is not None else 0.0


def _between(source: Mesh, target: Mesh, nbytes: float) -> Pairs:
    """nbytes to every rank of the target, from the source ranks at the same part of their range."""
    n = max(source.size, target.size)
    k = np.arange(n)
    there = target.offset + k * target.size // n
    each = nbytes * target.size / n
    return source.offset + k * source.size // n, there, np.full(n, float(each))
