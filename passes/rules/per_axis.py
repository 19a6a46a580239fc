"""The choices of ops along single axes of meshes: of plans that were found, for problems on meshes with more axes.

The strategies of an op on three axes are as many as those of one axis to the third power, and so are a tensor's specs. Nearly
all of them are of no use: what is fast along one axis of a mesh of two is fast along one of three. So a mesh of more axes is
planned with what the best plans of fewer axes take along any of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.ir.program import Program
from autopar.plan import StagePlan

PerAxis = Mapping[tuple[str, str], frozenset[str]]
"""The choices that an op, by its template and name, has along an axis."""


def taken_by(stages: Iterable[StagePlan]) -> PerAxis:
    """The choices of ops along any axis in any of these plans of one program."""
    taken: dict[tuple[str, str], frozenset[str]] = {}
    for stage in stages:
        for name, template in stage.templates.items():
            for op, strategy in template.strategies.items():
                taken[name, op] = taken.get((name, op), frozenset()).union(strategy)
    return taken


def by_signature(per_axis: PerAxis, program: Program) -> dict[str, frozenset[str]]:
    """The same by the signatures of a program's ops, which are priced once. The program may be of another microbatch count than
    the plans were; an op that none of them has may take anything, and is left out."""
    merged: dict[str, frozenset[str]] = {}
    free: set[str] = set()
    for name, template in program.templates.items():
        for op, call in template.op_calls.items():
            if (name, op) in per_axis:
                merged[call.signature] = merged.get(call.signature, frozenset()) | per_axis[name, op]
            else:
                free.add(call.signature)
    return {signature: choices for signature, choices in merged.items() if signature not in free}
