"""Seconds of conversions between specs, for every pair of two lists of specs at once. Specs are given by their numbers
(`autopar.passes.rules.alphabet`)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from autopar.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.spec import REDUCTIONS, Spec
from autopar.ir.types import TensorType
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.alphabet import BIT
from autopar.passes.rules.lattice import Lattice
from autopar.runtime.gradients.bucket_sizes import BUCKETED

READ_S = 1e-18
"""Seconds of a byte of what a rank is given: too few to change a choice, and enough that it is given the block that it wants and
does not cut that out of the whole."""
_OWED = tuple(
    tuple(sorted({"sum", *(op for op in REDUCTIONS if bits & BIT[op])})) for bits in range(1 << len(REDUCTIONS))
)
"""Reductions that conversions are about, by the bits of those that specs owe."""


def numbers_of(pricer: Pricer, type_: TensorType, specs: Iterable[Spec]) -> np.ndarray:
    """The numbers of specs. Raises PlanError where one cannot be on the mesh."""
    number = pricer.shards(type_).letters.number
    try:
        return np.array([number[spec] for spec in specs], int)
    except KeyError as error:
        raise _misfit(type_, error.args[0], pricer.mesh) from None


def conversions_s(
    pricer: Pricer,
    type_: TensorType,
    before: np.ndarray,
    after: np.ndarray,
    joined: tuple[str, ...] = (),
    compression: str = "",
) -> np.ndarray:
    """Seconds from every spec of `before` to every one of `after`; joined, compression: as of `Pricer.joined_s`. Where ops
    have few strategies, conversions go through no specs that shard other dims than these. Raises PlanError where a spec cannot
    be on the mesh."""
    letters = pricer.shards(type_).letters
    if len(letters.specs) == 1:
        return np.zeros((len(before), len(after)))
    owed, cut = letters.owed, None
    if pricer.is_narrowed:
        cut = tuple((letters.sharded[before].any((0, 2)) | letters.sharded[after].any((0, 2))).tolist())
    bits = np.bitwise_or.reduce(owed[before]) | np.bitwise_or.reduce(owed[after])
    lattice = pricer.lattice(type_, _OWED[bits], joined, compression, cut)
    return along(lattice, pricer.mesh, type_, before[:, None], after)


def along(lattice: Lattice, mesh: Mesh, type_: TensorType, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Seconds of conversions along a lattice, of specs that are broadcast against each other. Raises PlanError where one cannot
    be on the mesh."""
    try:
        return lattice.between(before, after)
    except KeyError as error:
        raise _misfit(type_, error.args[0], mesh) from None


def ends_s(pricer: Pricer, kind: str, type_: TensorType, numbers: np.ndarray) -> np.ndarray:
    """Seconds per spec of a value where it enters or leaves the program (kind: as of
    `autopar.passes.rules.structure.call_edges`)."""
    whole = np.zeros(1, int)
    if kind == "read":
        held = pricer.shards(type_).of_bytes(type_, numbers)
        return conversions_s(pricer, type_, whole, numbers)[0] + READ_S * held
    if kind in ("whole", "loss"):
        return conversions_s(pricer, type_, numbers, whole, BUCKETED if kind == "loss" else ())[:, 0]
    letters = pricer.shards(type_).letters
    specs = [letters.specs[n] for n in numbers.tolist()]
    if kind == "settled":
        return np.array([pricer.convert_s(type_, s, s.without_partial()) for s in specs])
    meet = pricer.departure if kind == "depart" else pricer.arrival
    return np.array([meet(type_, s)[1] for s in specs])


def _misfit(type_: TensorType, spec: Spec, mesh: Mesh) -> PlanError:
    return PlanError(
        f"the plan's spec {spec} does not fit a tensor of shape {type_.shape} on mesh {mesh} (axes must be the "
        "mesh's, dims must divide, and axes that share a dim stand in mesh order)"
    )
