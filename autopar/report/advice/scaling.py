"""Scaling efficiency: how much of a device's throughput is left where there are many.

    efficiency = (samples/s ÷ devices) ÷ (samples/s ÷ devices, of the base)

The base is one node of the cluster, or one device where the cluster is one node. As with weak scaling its devices have as many
samples each, so its batch is smaller, and mesh, stages and microbatches are the best for it: what the ratio loses is what
messages, bubbles and waiting for others take beyond those of one node. Both steps are measured, or both are predicted by the
price of every plan.

The base has to itself what more devices divide, such as the optimizer's update, so the ratio can be above 1. It is no efficiency
then, and is told as what it is. Batches of other sizes have other bases, so their efficiencies are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Generic, TypeVar

from autopar.capture.examples.inputs import batch_size
from autopar.cluster import resized
from autopar.compiled import Compiled
from autopar.errors import AutoparError, InputError
from autopar.options import Options
from autopar.report.advice.replanned import Replanner

P = TypeVar("P", bound=Compiled)
FREE: dict[str, Any] = {
    "mesh": None,
    "strategy": "auto",
    "pp": None,
    "schedule": "auto",
    "chunks": None,
    "stage_boundaries": None,
}
"""Options that leave mesh and stages to the search."""
WHOLE = 1.005
"""The largest ratio that is shown as 100 %."""


@dataclass(frozen=True)
class Scaling:
    """Samples a second of every device, of a program and of its base. devices, base_devices: those that they are for."""

    rate: float
    devices: int
    base_rate: float
    base_devices: int
    measured: bool = False

    @property
    def ratio(self) -> float:
        """The ratio of the two rates."""
        return self.rate / self.base_rate

    @property
    def efficiency(self) -> float | None:
        """The ratio where it is an efficiency; None where the base is slower, device by device."""
        return self.ratio if self.ratio <= WHOLE else None

    def __str__(self) -> str:
        how = "measured" if self.measured else "predicted"
        base = "1 device" if self.base_devices == 1 else f"{self.base_devices:,} devices"
        if self.efficiency is None:
            return (
                f"no scaling efficiency: a device of {self.devices:,} computes {self.ratio:.3g} × as many samples a second as "
                f"one of {self.base_devices:,}, which divide less of the model's own work ({how})"
            )
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
    """The scaling of a measured step. base: a program for fewer devices, whose step was measured too. Raises InputError where
    it has another number of samples on a device."""
    wanted = Fraction(samples(program) * base.cluster.size, program.cluster.size)
    if samples(base) != wanted:
        raise InputError(
            f"advice: baseline= has a batch of {samples(base)} on {base.cluster.size} devices; scaling is beside as many "
            f"samples on each device, which are {float(wanted):g} here: compile the baseline with that batch"
        )
    return Scaling(
        rate_of(program, step_s), program.cluster.size, rate_of(base, base_step_s), base.cluster.size, measured=True
    )


class Bases(Generic[P]):
    """Predicted scaling of a request's programs, whose bases are planned when they are first asked for."""

    def __init__(self, replanner: Replanner[P]) -> None:
        self._replanner = replanner
        self._base_s: dict[str, float | str] = {}

    def scaling(self, program: Compiled) -> Scaling | str:
        """The scaling of a program of the request under some options; or, in words, why there is none."""
        base, ranks = base_devices(program), program.cluster.size
        if ranks == 1:
            return "one device is its own base"
        if samples(program) * base % ranks:
            return f"a batch of {samples(program)} on {ranks} devices is no whole number of samples on {base}"
        options = replace(program.options, **FREE, microbatches=None, order=None, constraints={})
        key = repr(options)
        if key not in self._base_s:
            self._base_s[key] = self._planned_s(options, base, Fraction(base, ranks))
        base_s = self._base_s[key]
        if isinstance(base_s, str):
            return base_s
        rate = samples(program) * base / ranks / base_s / base
        return Scaling(rate_of(program, program.decision.predicted.step_time_s), ranks, rate, base)

    def _planned_s(self, options: Options, devices: int, times: Fraction) -> float | str:
        """Seconds of a base's step; or, in words, why there is none."""
        try:
            cluster = resized(self._replanner.program.request.cluster, devices)
            small = self._replanner.replanned(options, cluster=cluster, times=times)
        except AutoparError as error:
            return f"no plan for {devices} of the devices: {str(error).splitlines()[0]}"
        return small.decision.predicted.step_time_s
