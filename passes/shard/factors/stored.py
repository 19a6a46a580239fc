"""How the states of a group of parameters rest, as arrays: the numbers of their specs, and beside them the few that are runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.alphabet import refinements, shards
from autopar.passes.rules.runs import States, owned_states, run_states


@dataclass(frozen=True)
class Stored:
    """numbers: of every state's spec in the alphabet, or of the block whose elements are cut. runs: by state its spec, where it
    is a run, or whole on one rank."""

    numbers: np.ndarray
    runs: Mapping[int, Spec] = field(default_factory=dict)

    @staticmethod
    def of(numbers: np.ndarray, specs: Sequence[Spec]) -> Stored:
        """The states with these specs. numbers: of their blocks."""
        return Stored(numbers, {i: spec for i, spec in enumerate(specs) if spec.run})

    def local_bytes(self, type_: TensorType, pricer: Pricer) -> np.ndarray:
        """Bytes on a rank of a tensor stored so; on average, where one rank has it whole."""
        nbytes = pricer.shards(type_).of_bytes(type_, self.numbers)
        for i, spec in self.runs.items():
            nbytes[i] = spec.local_bytes(type_, pricer.mesh) * spec.share(pricer.mesh)
        return nbytes

    def gathered_s(
        self, seconds: np.ndarray, pricer: Pricer, type_: TensorType, joined: tuple[str, ...] = ()
    ) -> np.ndarray:
        """Seconds from these states (rows) to specs of values. seconds: the same from blocks; joined: as of `Pricer.joined_s`."""
        own_s = {run: pricer.convert_s(type_, run, run.block, joined) for run in set(self.runs.values())}
        seconds = seconds.copy() if self.runs else seconds
        for i, run in self.runs.items():
            seconds[i] += own_s[run]
        return seconds

    def reduced_s(
        self,
        seconds: np.ndarray,
        pricer: Pricer,
        type_: TensorType,
        before: np.ndarray,
        joined: tuple[str, ...],
        compression: str,
    ) -> np.ndarray:
        """Seconds from gradients in the specs with these numbers to these states (columns). seconds: the same to blocks; joined,
        compression: as of `Pricer.joined_s`."""
        specs = [pricer.shards(type_).letters.specs[n] for n in before.tolist()]
        columns = {
            run: [pricer.convert_s(type_, spec, run, joined, compression) for spec in specs]
            for run in set(self.runs.values())
        }
        seconds = seconds.copy() if self.runs else seconds
        for i, run in self.runs.items():
            seconds[:, i] = columns[run]
        return seconds


@dataclass(frozen=True, eq=False)
class Resting:
    """The pairs of specs in which a group of parameters may rest, and by them how it is stored and how it is updated."""

    states: States
    stored: Stored
    optimizer: Stored

    @staticmethod
    def of(states: States, numbers: Callable[[list[Spec]], np.ndarray]) -> Resting:
        """The same of some states. numbers(specs): the numbers of specs that are blocks."""
        storage, updated = ([state[i] for state in states] for i in (0, 1))
        stored, optimizer = (Stored.of(numbers([s.block for s in specs]), specs) for specs in (storage, updated))
        return Resting(states, stored, optimizer)


def possible_states(
    axes: tuple[tuple[str, int], ...], shape: tuple[int, ...], updated: bool, whole: bool, runs: bool
) -> Resting:
    """How a parameter may be stored and updated on a mesh: as every spec, and its optimizer's shards as every refinement of it;
    whole where its optimizer asks for that, on every rank or on one. Shapes that are cut alike (`Mesh.cut_alike`) may rest alike.

    updated: whether any step changes its value. runs: whether it may rest in runs, or on one rank alone.
    """
    mesh, on_mesh = Mesh(axes), shards(axes, len(shape))
    divides, specs = on_mesh.divide(shape), on_mesh.letters.specs
    coarse, fine = refinements(on_mesh.letters)
    possible = divides[coarse] & divides[fine] & (updated | (coarse == fine))
    if mesh.uneven:  # ranks share equally what no op wants in unequal blocks
        for i in np.flatnonzero(possible & (coarse != fine)).tolist():
            dims = zip(shape, specs[coarse[i]].dims, specs[fine[i]].dims, strict=True)
            possible[i] = not any(a != b and mesh.is_uneven(n, b) for n, a, b in dims)
    if whole:
        possible &= fine == 0
    pairs = zip(coarse[possible].tolist(), fine[possible].tolist(), strict=True)
    others = (owned_states if whole else run_states)(axes, shape) if runs else ()
    in_runs = (pair for pair in others if updated or pair[0] == pair[1])
    states = (*((specs[a], specs[b]) for a, b in pairs), *in_runs)
    number = on_mesh.letters.number
    return Resting.of(states, lambda specs: np.array([number[spec] for spec in specs], int))
