"""Advice on a step as data and in words: what limits every group of ranks, how well it scales, which changes are better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.ir.text import time_text
from autopar.passes.account.limits import limit_of
from autopar.report.advice.mismatch import Mismatch
from autopar.report.advice.scaling import Scaling


@dataclass(frozen=True)
class GroupAdvice:
    """The limits of groups of ranks that are alike. groups: their numbers; stages: that they run; seconds: of a step, by limit;
    stage_limits: what limits the actions of each stage of the first."""

    groups: tuple[int, ...]
    stages: tuple[int, ...]
    seconds: Mapping[str, float]
    stage_limits: tuple[str, ...]

    @property
    def limit(self) -> str:
        """The limit that takes most of the step."""
        return limit_of(self.seconds)

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        stages = f"stage{'s' if len(self.stages) > 1 else ''} {_numbers(self.stages)}"
        shown = sorted(((s, limit) for limit, s in self.seconds.items() if s >= 0.005 * self.step_s), reverse=True)
        parts = ", ".join(f"{limit} {time_text(s)} ({s / self.step_s:.0%})" for s, limit in shown)
        inside = f" (actions of each by {', '.join(self.stage_limits)})" if len(self.stage_limits) > 1 else ""
        return f"{stages}: limited by {self.limit}{inside}; {parts}"


@dataclass(frozen=True)
class Suggestion:
    """A change that is better. limit: that it moves; options: fields of Options that are others; batch_before, batch_after:
    samples of a step; alters: how what is computed changes ("": not at all). step_before_s, step_after_s: predicted, or
    measured where the change is one of the loader (limit "input"); efficiency_before, efficiency_after: of scaling, where both
    are known and the batch is the same."""

    text: str
    limit: str
    options: Mapping[str, Any]
    batch_before: int
    batch_after: int
    step_before_s: float
    step_after_s: float
    alters: str = ""
    efficiency_before: float | None = None
    efficiency_after: float | None = None

    @property
    def gain(self) -> float:
        """How many times as many samples a second."""
        return self.batch_after / self.step_after_s / (self.batch_before / self.step_before_s)

    def __str__(self) -> str:
        said = []
        if self.efficiency_before is not None and self.efficiency_after is not None:
            said.append(f"scaling efficiency {self.efficiency_before:.0%} → {self.efficiency_after:.0%}")
        step = f"step {time_text(self.step_before_s)} → {time_text(self.step_after_s)}"
        if self.batch_after != self.batch_before:
            times = self.batch_after / self.batch_before
            step += f" for {times:g} × the samples ({1 - 1 / self.gain:.0%} less a sample)"
        said.append(step)
        if self.batch_after != self.batch_before:
            said.append(f"needs global batch {self.batch_after}, which changes what is computed")
        elif self.alters:
            said.append(f"changes what is computed: {self.alters}")
        return f"{self.text}: {', '.join(said)}"


@dataclass(frozen=True)
class Advice:
    """The advice on a step. predicted_s, measured_s: of a step, the measured one with the wait for its batch (None: no profile);
    unscaled: why no scaling efficiency is known; left_out: levers for which time was too short."""

    predicted_s: float
    measured_s: float | None
    groups: tuple[GroupAdvice, ...]
    scaling: Scaling | None = None
    unscaled: str = ""
    mismatches: tuple[Mismatch, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        measured = "" if self.measured_s is None else f", measured {time_text(self.measured_s)}"
        yield f"step predicted {time_text(self.predicted_s)}{measured}"
        yield from (f"first: {one}" for one in self.mismatches)
        yield from map(str, self.groups)
        if self.scaling is not None:
            yield str(self.scaling)
        elif self.unscaled:
            yield f"no scaling efficiency: {self.unscaled}"
        if self.suggestions:
            yield "what to change:"
        yield from (f"  {one}" for one in self.suggestions)
        if self.left_out:
            yield f"not looked at, as time was over: {', '.join(self.left_out)}"

    def facts(self) -> dict[str, Any]:
        """The advice as plain data."""
        scaling = self.scaling
        return {
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "limits": [
                {
                    "groups": list(one.groups),
                    "stages": list(one.stages),
                    "limit": one.limit,
                    "limit_s": one.seconds[one.limit],
                    "step_s": one.step_s,
                    "seconds": dict(one.seconds),
                    "stage_limits": list(one.stage_limits),
                    "sentence": str(one),
                }
                for one in self.groups
            ],
            "scaling": None
            if scaling is None
            else {
                "efficiency": scaling.efficiency,
                "ratio": scaling.ratio,
                "devices": scaling.devices,
                "base_devices": scaling.base_devices,
                "samples_per_device_s": scaling.rate,
                "base_samples_per_device_s": scaling.base_rate,
                "measured": scaling.measured,
                "sentence": str(scaling),
            },
            "unscaled": self.unscaled,
            "mismatches": [
                {"what": one.what, "ratio": one.ratio, "do": one.do, "sentence": str(one)} for one in self.mismatches
            ],
            "suggestions": [
                {
                    "change": one.text,
                    "limit": one.limit,
                    "options": {name: str(value) for name, value in one.options.items()},
                    "batch_before": one.batch_before,
                    "batch_after": one.batch_after,
                    "step_before_s": one.step_before_s,
                    "step_after_s": one.step_after_s,
                    "efficiency_before": one.efficiency_before,
                    "efficiency_after": one.efficiency_after,
                    "alters": one.alters,
                    "sentence": str(one),
                }
                for one in self.suggestions
            ],
            "left_out": list(self.left_out),
        }


def _numbers(numbers: tuple[int, ...]) -> str:
    """`0, 2 to 5`."""
    spans: list[list[int]] = []
    for n in sorted(numbers):
        if spans and spans[-1][1] == n - 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in spans)
