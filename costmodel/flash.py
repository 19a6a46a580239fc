"""The share of a device's peak that flash attention reaches, by the generation of its kernels, the way, length and width of head.

    share = curve · of_head(head) / (1 + half_seq / seq)
    share = curve · of_head(head) / (1 + (half_seq + tile) / seq)     of half the FLOPs, under a causal mask

`curve` is what forward reaches of the device's peak at great length with heads of 128: `EfficiencyCurve.attention`, or
`attention_eager` for kernels of the generation before. Kernels skip keys that a mask hides by tiles, so rows look at some too
many. The constants of both generations are fitted to 36 rows each way that were measured on an H100
(`tests/gpu/recorded/kernels`): heads of 64, 128 and 256, 512 to 16,384 keys, causal and full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cluster.device import DeviceSpec

HALF_HEAD = 32.0
"""The width at which a head loses half of the rate, where it is narrower than any that was measured."""


@dataclass(frozen=True)
class FlashKernel:
    """How one kernel's rate goes with shapes. by_head: (width, rate over that of forward with heads of 128), none: as `HALF_HEAD`
    says; half_seq: keys at which half of the rate is reached; tile: keys that are skipped at once where a causal mask hides
    them all."""

    by_head: tuple[tuple[float, float], ...]
    half_seq: float
    tile: float = 0.0

    def of_head(self, head: float) -> float:
        """The rate with heads of a width; between measured widths it goes with the logarithm."""
        if not self.by_head:
            return 1 / (1 + HALF_HEAD / head)
        (narrowest, rate), *wider = self.by_head
        if head < narrowest:
            return rate * (1 + HALF_HEAD / narrowest) / (1 + HALF_HEAD / head)
        for width, next_rate in wider:
            if head <= width:
                return rate + (next_rate - rate) * math.log(head / narrowest) / math.log(width / narrowest)
            narrowest, rate = width, next_rate
        return rate


FLASH_2 = (
    FlashKernel(((64, 0.894), (128, 1.0), (256, 0.931)), 70.0, 365.0),
    FlashKernel(((64, 0.816), (128, 0.874), (256, 0.756)), 399.0, 525.0),
)
FLASH_3 = (
    FlashKernel(((64, 0.737), (128, 1.0), (256, 1.028)), 135.0, 384.0),
    FlashKernel(((64, 0.722), (128, 0.883), (256, 0.651)), 496.0, 626.0),
)
"""Forward and backward of the kernels that torch calls, and of those written for Hopper (measured: cuDNN's)."""
PLAIN = (FlashKernel((), 256.0), FlashKernel((), 256.0))
"""Processors that are no GPUs."""


def flash_kernel(device: DeviceSpec, *, eager: bool, backward: bool) -> FlashKernel:
    """The kernel of a device one way. eager: of the generation before the device's own, as torch calls it."""
    if device.kind != "gpu":
        return PLAIN[backward]
    return (FLASH_2 if eager or not _is_hopper(device) else FLASH_3)[backward]


def _is_hopper(device: DeviceSpec) -> bool:
    """Whether a device is of the generation that FLASH_3 was written for, or a later one."""
    name = device.architecture or ""
    return name.startswith("sm") and int(name[2:]) >= 90


def attention_share(
    device: DeviceSpec, seq: float, head: float, *, dtype: str = "", eager: bool = False, backward: bool = False
) -> float:
    """Share of the peak that flash attention reaches over so many keys.

    dtype: of its products; in 8 bits they reach of their peak what plain products reach beside those in 16 (no such kernel was
    measured). eager: by kernels of the generation before the device's own; backward: the gradients of queries, keys and values.
    """
    curve = device.curve.attention_eager if eager else device.curve.attention
    if dtype == "float8":
        curve *= device.curve.matmul8 / device.curve.matmul
    kernel = flash_kernel(device, eager=eager, backward=backward)
    return curve * kernel.of_head(head) / (1 + kernel.half_seq / seq)


def causal_tile(device: DeviceSpec, seq: float, *, eager: bool = False, backward: bool = False) -> float:
    """Keys of so many that attention on a device skips at once where a causal mask hides them all: as measured there, else as its
    kernels do. It is given as a part of what `attention_share` leaves of the rate without a mask."""
    if device.kernels is not None:
        return device.kernels.causal_tile
    kernel = flash_kernel(device, eager=eager, backward=backward)
    return kernel.tile / (1 + kernel.half_seq / seq)
