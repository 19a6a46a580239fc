"""Products of one input, which a program makes one by one and frameworks all at once, with their weights side by side.

What a product reaches of the peak falls as it is narrower (`costmodel/compute.py`), so each of them takes its part of the seconds
of one that is as wide as all. The same holds for the products of their gradients, whose sum is the gradient of the input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.costmodel.compute import half_dim
from autopar.ir.lines import Compute, Function, Line, Start
from autopar.passes.price.pricer import Pricer

PRODUCT, OF_INPUT, OF_WEIGHT = (f"autopar.{name}" for name in ("linear", "linear_dx", "linear_dw"))


@dataclass(frozen=True)
class SideBySide:
    """The features that products have side by side on a rank, by their input, and the input of every weight. half: features of
    which a product reaches half of its rate."""

    features: Mapping[str, float] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    half: float = 0.0

    def source(self, line: Line) -> str:
        """The input that a product, or the product of one of its gradients, has with others; empty for other lines."""
        if not isinstance(line, Compute):
            return ""
        second = (*line.reads(), "", "")[1]
        return second if line.op == OF_WEIGHT else self.inputs.get(second, "") if line.op in (PRODUCT, OF_INPUT) else ""

    def share(self, line: Compute, held: Mapping[str, float]) -> float:
        """The share of a line's seconds that is left where it is a part of all; one where it is alone. held: bytes of values."""
        source = self.source(line)
        if source not in self.features:
            return 1.0
        first, second = (*line.reads(), "", "")[:2]
        own = _features(line, held, first, second)
        return (1 + self.half / max(own, self.features[source])) / (1 + self.half / own)


def side_by_side(forward: Function | None, held: Mapping[str, float], pricer: Pricer) -> SideBySide | None:
    """The products that a framework makes all at once; None where emitted programs run. held: bytes of the function's values."""
    if forward is None or pricer.software.is_emitted:
        return None
    features: dict[str, float] = {}
    inputs: dict[str, str] = {}
    for line in forward.lines:
        begun = line.line if isinstance(line, Start) else line
        if isinstance(begun, Compute) and begun.op == PRODUCT:
            source, weight = tuple(begun.reads())[:2]
            inputs[weight] = source
            features[source] = features.get(source, 0.0) + _features(begun, held, source, weight)
    return SideBySide(features, inputs, half_dim(pricer.device, pricer.software.low_dtype or "bfloat16"))


def _features(line: Compute, held: Mapping[str, float], first: str, second: str) -> float:
    """Features n that a product with sides m n, n k and m k (in any order) has on a rank, of 16 bits an element."""
    sides = {PRODUCT: (line.outs[0], second, first), OF_INPUT: (first, second, line.outs[0])}
    one, other, without = (held[name] / 2 for name in sides.get(line.op, (line.outs[0], first, second)))
    return math.sqrt(one * other / without)
