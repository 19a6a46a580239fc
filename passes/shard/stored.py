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
