"""Kernels that were measured one by one on a GPU, beside what the cost model says of them.

`python -m benchmarks.measured_kernels [FILE]` prints residuals by kind of a file that `make gpu-report` has written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autopar.cluster.device import DeviceSpec, device_preset
from autopar.costmodel.compute import matmul_time_s
from autopar.costmodel.flash import attention_share, causal_tile

RECORDED = Path(__file__).resolve().parent.parent / "tests/gpu/recorded/kernels/nvidia-h100-80gb-hbm3.json"
LEAST_S = 5e-5
"""Products that take less are as long as their launch, which a program's host hides."""
DTYPE = "bfloat16"


@dataclass(frozen=True)
class Kernel:
    """One measured kernel. what: `attention`, with `flash` (torch's) or `cudnn`, its way; `product`; `grouped product`, all three
    ways in a row. row: as recorded."""

    what: str
    row: Mapping[str, Any]
    seconds: float

    @property
    def is_attention(self) -> bool:
        """Whether it is attention, one way."""
        return "attention" in self.what

    def predicted_s(self, device: DeviceSpec) -> float:
        """The seconds that the cost model says."""
        row = self.row
        if self.what == "product":
            m, n, k = row["shape"]
            return matmul_time_s(device, m, n, k, DTYPE, launch=True)
        if self.what == "grouped product":
            one = matmul_time_s(device, row["rows"], row["hidden"], row["width"], DTYPE, grouped=True)
            return 3 * float(row["experts"]) * one
        seq, head, flops = row["length"], row["head"], row["forward_s"] * row["forward_flops_a_second"]
        backward = self.what.endswith("backward")
        way = {"eager": row["kernel"] == "flash", "backward": backward}
        skipped = causal_tile(device, seq, **way) / seq if row["causal"] else 0.0
        share = attention_share(device, seq, head, **way)
        return float((2.5 if backward else 1.0) * flops * (1 + skipped) / (device.peak(DTYPE) * share))


def kernels_of(record: Mapping[str, Any]) -> list[Kernel]:
    """The kernels of a record that the cost model has prices for."""
    found = [
        Kernel(f"{one['kernel']} attention {way}", one, one[f"{way}_s"])
        for one in record["attention"]
        if "forward_s" in one
        for way in ("forward", "backward")
    ]
    found += [Kernel("product", one, one["seconds"]) for one in record["products"] if one["seconds"] > LEAST_S]
    grouped = (one for one in record["grouped products"] if "seconds" in one)
    return found + [Kernel("grouped product", one, sum(one["seconds"].values())) for one in grouped]


def recorded(path: Path = RECORDED) -> list[Kernel]:
    """The kernels of a file."""
    return kernels_of(json.loads(path.read_text()))


def residuals(kernels: Sequence[Kernel], device: DeviceSpec) -> dict[str, np.ndarray]:
    """Relative errors of the predicted seconds, by kind."""
    kinds = dict.fromkeys(one.what for one in kernels)
    return {
        kind: np.array([k.predicted_s(device) / k.seconds - 1 for k in kernels if k.what == kind]) for kind in kinds
    }


def main(argv: list[str]) -> int:
    """Command line."""
    kernels = recorded(Path(argv[0])) if argv else recorded()
    for kind, errors in residuals(kernels, device_preset("h100")).items():
        size = np.abs(errors)
        said = f"median {np.median(size):.1%}, max {size.max():.1%}, bias {np.median(errors):+.1%}"
        print(f"{kind:28s} {len(errors):3d} rows, {said}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
