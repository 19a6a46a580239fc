"""Stages of a pipeline that are alike: the same calls under the same plan, of other parameters.

The inner stages of a model with equal layers differ in names alone, so what one of them costs is what all of them cost.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

from autopar.ir.lowered import BoundaryEnd, LoweredStage
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program, ValueRef
from autopar.plan import StagePlan


def stage_kind(part: Program, plan: StagePlan, kind: Callable[[str], Hashable]) -> Hashable:
    """All that the seconds and bytes of a stage follow from on one mesh. kind: of a parameter, beside how it is planned.

    Plans of templates are told apart by their tables, which plans made from each other share.
    """
    parameters = {name: i for i, name in enumerate(part.parameters)}
    buffers = {name: i for i, name in enumerate(part.buffers)}
    boundary = part.boundary

    def place(ref: ValueRef) -> Hashable:
        return ref.kind, buffers[ref.name] if ref.kind == "buffer" else ref.index, ref.output

    calls = tuple(
        (call.template, call.prologue, tuple(parameters[p] for p in call.params), tuple(map(place, call.inputs)))
        for call in part.calls
    )
    boundary_tensors: Hashable = ()
    foreign: frozenset[str] = frozenset()
    if boundary is not None:
        sent = zip(boundary.sent, boundary.sent_values, strict=True)
        received = tuple(tensor.gradient for tensor in boundary.received)
        boundary_tensors = (received, tuple((tensor.gradient, place(ref)) for tensor, ref in sent))
        foreign = boundary.foreign
    templates = ((name, plan.templates[name]) for name in part.templates)
    return (
        calls,
        tuple(
            (
                (id(t.strategies), id(t.specs), name, t.recompute, t.recompute_calls, t.recompute_after),
                (t.offload, t.offload_tier, t.overlap, t.pieces, t.cut),
            )
            for name, t in templates
        ),
        tuple((kind(name), plan.parameters[name], name in foreign) for name in part.parameters),
        tuple(b.type for b in part.buffers.values()),
        tuple((buffers[name], place(ref)) for name, ref in part.buffer_updates.items()),
        (tuple(type_ for _, type_ in part.inputs), part.batch_dims),
        (tuple(map(place, part.outputs)), part.loss is None),
        boundary_tensors,
    )


def like_stage(stage: LoweredStage, part: Program, mesh: Mesh) -> LoweredStage:
    """A lowered stage in the place of one that is like it: the same functions, other neighbours."""
    boundary = part.boundary
    if boundary is None:
        return stage
    received = [(c.name, c.source, c.gradient) for c in boundary.received]
    sent = [(c.name, c.target, c.gradient) for c in boundary.sent]
    return replace(
        stage,
        index=boundary.stage,
        mesh=mesh,
        outputs=tuple(replace(row, index=i) for row, i in zip(stage.outputs, boundary.outputs, strict=True)),
        received=_ends(stage.received, ((name, peer) for name, peer, _ in received)),
        sent=_ends(stage.sent, ((name, peer) for name, peer, _ in sent)),
        gradients_received=_ends(stage.gradients_received, ((f"d_{n}", peer) for n, peer, back in sent if back)),
        gradients_sent=_ends(stage.gradients_sent, ((f"d_{n}", peer) for n, peer, back in received if back)),
    )


def _ends(ends: Sequence[BoundaryEnd], named: Iterable[tuple[str, int]]) -> tuple[BoundaryEnd, ...]:
    return tuple(replace(end, name=name, peer=peer) for end, (name, peer) in zip(ends, named, strict=True))
