"""Kernels of one device as they were measured: what a profile knows beyond peaks, one bandwidth and one curve.

On a CPU what an op takes depends on which op it is: `gelu` computes for longer than it waits for memory, a norm's gradient is
several passes, a small tensor lies in a cache, and the first thing that any op does is to find its code. So a calibration times
the ops of programs one by one: those that pass over memory at several sizes, products at several shapes.

    passes    {"aten.gelu": ((8e3, 6e-6), (4e6, 4e-4))}      8 kB read and written take 6 us, 4 MB take 400 us
    products  {"autopar.linear": (4e-6, 9e10, 6.0)}          T = 4 us + flops / 90 GFLOP/s · (1+6/m)(1+6/n)(1+6/k)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import numpy as np

from autopar.cluster.checks import RATE, Rate, Seconds
from autopar.errors import ClusterError
from autopar.runtime.data.fields import Form, kept
from autopar.runtime.data.schema import SchemaError, listed, number, row, shown

COPY = "copy"
"""The pass whose seconds an op has that was not measured."""
FILL = "aten.full"
"""The pass that writes one number everywhere."""

_ROWS = listed(row(RATE, RATE), least=2, most=64)


def _points(rows: object, path: str) -> tuple[tuple[float, float], ...]:
    """Raises SchemaError where bytes do not ascend."""
    points = tuple((float(nbytes), float(seconds)) for nbytes, seconds in _ROWS(rows, path))
    if any(a[0] >= b[0] for a, b in pairwise(points)):
        raise SchemaError(f"{path}: bytes must ascend, got {shown([nbytes for nbytes, _ in points])}")
    return points


Points = Annotated[tuple[tuple[float, float], ...], Form(_points, lambda points: [list(point) for point in points])]
"""(bytes, seconds), the bytes ascending."""


def seconds_at(points: Points, nbytes: Any) -> Any:
    """Seconds of so many bytes (a number or an array): on straight lines between the points, below the first what it takes, and
    beyond the last at the rate of the last two."""
    x, y = np.array(points).T
    slope = max(float((y[-1] - y[-2]) / (x[-1] - x[-2])), 0.0)
    return np.interp(nbytes, x, y) + slope * np.maximum(np.asarray(nbytes) - x[-1], 0.0)


class Product(NamedTuple):
    """T = launch_s + flops / rate · (1 + half_dim / dim) for every dim that it has: those of a product, or the keys and the head
    width of attention. FLOP/s."""

    launch_s: Seconds
    rate: Rate
    half_dim: Annotated[float, number(0, 1e9)]

    def seconds(self, flops: float, dims: Sequence[float]) -> float:
        """Seconds of one op."""
        return self.launch_s + flops / self.rate * math.prod(1 + self.half_dim / max(dim, 1.0) for dim in dims)


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of ops by their names without overload: `passes` by bytes read and written, `products` by FLOPs and dims.
    causal_tile: keys that attention skips at once where a causal mask hides them all (0: every single one)."""

    passes: Mapping[str, Points]
    products: Mapping[str, Product] = field(default_factory=dict, metadata=kept(required=True))
    causal_tile: Annotated[float, number(0, 1e9)] = 0.0

    def __post_init__(self) -> None:
        if COPY not in self.passes:
            raise ClusterError(f"kernels: passes has no {COPY!r}, which says what unknown ops take; measure again")
        object.__setattr__(
            self, "_hash", hash((tuple(self.passes.items()), tuple(self.products.items()), self.causal_tile))
        )

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def pass_s(self, op: str, nbytes: Any) -> Any:
        """Seconds of an op that reads and writes so many bytes (a number or an array)."""
        return seconds_at(self.passes.get(op, self.passes[COPY]), nbytes)

    def slower(self, factor: float) -> KernelTimes:
        """The same where everything takes `factor` times as long."""
        passes = {op: tuple((n, s * factor) for n, s in points) for op, points in self.passes.items()}
        products = {
            op: p._replace(launch_s=p.launch_s * factor, rate=p.rate / factor) for op, p in self.products.items()
        }
        return replace(self, passes=passes, products=products)
