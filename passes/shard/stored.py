"""How the states of a group of parameters rest, as arrays: the numbers of their specs, and beside them the few that are runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.passes.price.pricer import Pricer


@dataclass(frozen=True)
class Stored:
    """numbers: of every state's spec in the alphabet, or of the block whose elements are cut. runs: by state its spec, where it
    is a run."""

    numbers: np.ndarray
    runs: Mapping[int, Spec] = field(default_factory=dict)

    @staticmethod
    def of(numbers: np.ndarray, specs: Sequence[Spec]) -> Stored:
        """The states with these specs. numbers: of their blocks."""
        return Stored(numbers, {i: spec for i, spec in enumerate(specs) if spec.run})

    def local_bytes(self, type_: TensorType, pricer: Pricer) -> np.ndarray:
        """Bytes on a rank of a tensor stored so."""
        nbytes = pricer.shards(type_).of_bytes(type_.nbytes, self.numbers)
        for i, spec in self.runs.items():
            nbytes[i] = spec.local_bytes(type_, pricer.mesh)
        return nbytes

    def used_s(self, seconds: np.ndarray, pricer: Pricer, type_: TensorType, after: np.ndarray) -> np.ndarray:
        """Seconds from these states (rows) to uses in the specs with these numbers. seconds: the same from blocks."""
        specs = pricer.shards(type_).letters.specs
        for i, run in self.runs.items():
            seconds[i] = [pricer.convert_s(type_, run, specs[n]) for n in after.tolist()]
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
        """Seconds from gradients in the specs with these numbers to these states (columns). seconds: as of `used_s`; joined,
        compression: as of `Pricer.joined_s`."""
        specs = pricer.shards(type_).letters.specs
        for i, run in self.runs.items():
            seconds[:, i] = [pricer.convert_s(type_, specs[n], run, joined, compression) for n in before.tolist()]
        return seconds
