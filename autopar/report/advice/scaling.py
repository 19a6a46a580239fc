"""Scaling efficiency: how much of a device's throughput is left where there are many.

    efficiency = (samples/s ÷ devices) ÷ (samples/s ÷ devices, of the base)

The base is one node of the cluster, or one device where the cluster is one node. As with weak scaling its devices have as many
samples each, so its batch is smaller: what the ratio loses is what messages, bubbles and waiting for others take beyond those of
one node. Both steps are measured, or both are predicted by the price of every plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from autopar.capture.examples.inputs import batch_size
from autopar.cluster import resized
from autopar.compiled import Compiled
from autopar.errors import AutoparError
from autopar.report.advice.replanned import Replanner

P = TypeVar("P", bound=Compiled)


@dataclass(frozen=True)
class Scaling:
    """Samples a second of every device, of a program and of its base. devices, base_devices: those that they are for."""

    rate: float
    devices: int
    base_rate: float
    base_devices: int
    measured: bool = False

    @property
    def efficiency(self) -> float:
        """The ratio of the two rates."""
        return self.rate / self.base_rate

    def at(self, rate: float) -> Scaling:
        """The same base, beside another rate of samples a second of a device."""
        return replace(self, rate=rate)

    def __str__(self) -> str:
        how = "measured" if self.measured else "predicted"
        base = "1 device" if self.base_devices == 1 else f"{self.base_devices:,} devices"
        return f"scaling efficiency {self.efficiency:.0%} on {self.devices:,} devices, against {base} ({how})"


def samples(program: Compiled) -> int:
    """Samples of a step's global batch."""
    return batch_size(program.request.inputs, program.options.batch_dims)


def rate_of(program: Compiled, step_s: float) -> float:
    """Samples a second of a device, those that the plan leaves idle among them."""
    return samples(program) / step_s / program.cluster.size


def base_devices(program: Compiled) -> int:
    """Devices of one node, or 1 where there is one node."""
    node = program.cluster.levels[0].group_size if program.cluster.levels else program.cluster.size
    return node if node < program.cluster.size else 1


def measured_scaling(program: Compiled, step_s: float, base: Compiled, base_step_s: float) -> Scaling:
    """The scaling of a measured step. base: a program for fewer devices, whose step was measured too."""
    return Scaling(
        rate_of(program, step_s), program.cluster.size, rate_of(base, base_step_s), base.cluster.size, measured=True
    )


def predicted_scaling(replanner: Replanner[P]) -> Scaling | str:
    """The scaling that is predicted; or, in words, why there is none."""
    program = replanner.program
    base, ranks = base_devices(program), program.cluster.size
    if ranks == 1:
        return "one device is its own base"
    if samples(program) * base % ranks:
        return f"a batch of {samples(program)} on {ranks} devices is no whole number of samples on {base}"
    options = replace(
        program.options,
        mesh=None,
        strategy="auto",
        pp=None,
        chunks=None,
        schedule="auto",
        stage_boundaries=None,
        microbatches=None,
        order=None,
        constraints={},
    )
    try:
        small = replanner.replanned(options, cluster=resized(program.request.cluster, base), times=base / ranks)
    except AutoparError as error:
        return f"no plan for {base} of the devices: {str(error).splitlines()[0]}"
    step_s, base_s = (one.decision.predicted.step_time_s for one in (program, small))
    return Scaling(rate_of(program, step_s), ranks, rate_of(small, base_s), base)
