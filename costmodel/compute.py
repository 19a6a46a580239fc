"""Seconds for one operation on one device: a roofline with an efficiency that depends on the operation's shape.

    T = launch + max(flops / (peak * share), nbytes / (memory bandwidth * share_memory))

The share of a matrix product m x n x k is `e / ((1 + d/m) (1 + d/n) (1 + d/k))`: e for large products, and small,
narrow or thin ones lose it smoothly (d is the length at which one dim halves it). What attention reaches by length and
width of head stands in `costmodel/flash.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from autopar.cluster.device import DeviceSpec, dtype_bytes, dtype_name
from autopar.cluster.kernels import COPY, FILL
from autopar.costmodel.flash import attention_share
from autopar.errors import ClusterError

ATTENTION = ("attention", "attention_grad")
OP_KINDS = ("matmul", *ATTENTION, "conv", "pointwise")


def matmul_share(
    device: DeviceSpec, m: float, n: float, k: float, dtype: str = "bfloat16", grouped: bool = False
) -> float:
    """Share of the peak that an (m, n, k) product reaches. grouped: it is one of several in a kernel, which have m rows each."""
    curve = device.curve
    d = half_dim(device, dtype)
    peak_share = curve.matmul8 if dtype in ("float8", "mxfp8") else curve.matmul4 if dtype == "float4" else curve.matmul
    of_rows = curve.grouped_half * d / curve.half_dim if grouped and curve.grouped_half else d
    return peak_share / ((1 + of_rows / m) * (1 + d / n) * (1 + d / k))


def half_dim(device: DeviceSpec, dtype: str) -> float:
    """The length of a product's dim that reaches half of the rate: on a GPU it goes with the peak, as what a kernel begins and
    ends with takes as long in any precision."""
    name = "float8" if dtype == "mxfp8" else dtype
    known = device.kind == "gpu" and device.supports("float16") and device.supports(name)
    return device.curve.half_dim * (device.peak(name) / device.peak("float16") if known else 1.0)


def aligned_share(device: DeviceSpec, dtype: str, rows: Iterable[int]) -> float:
    """Share of its rate that a product keeps whose operands and result have rows of so many elements: those in 16 bits reach the
    fast kernels of a device where all of them are multiples of 16 bytes."""
    if dtype == "mxfp8" or dtype_bytes(dtype) != 2:
        return 1.0
    common = math.gcd(8, *rows)
    return 1.0 if common == 8 else device.curve.odd if common == 1 else device.curve.even


def matmul_time_s(
    device: DeviceSpec, m: float, n: float, k: float, dtype: str, launch: bool = False, grouped: bool = False
) -> float:
    """Seconds of one product of (m, k) by (k, n); `launch` adds the launch overhead; grouped: it is one of several in a kernel.
    mxfp8 runs at float8's peak."""
    m, n, k = max(1.0, m), max(1.0, n), max(1.0, k)
    name = "float8" if dtype == "mxfp8" else dtype
    width = dtype_bytes(name)
    compute = 2 * m * n * k / (device.peak(name) * matmul_share(device, m, n, k, dtype, grouped))
    memory = (width * (m * k + k * n) + max(2.0, width) * m * n) / (device.memory_bandwidth_Bps * device.curve.memory)
    return max(compute, memory) + (device.launch_overhead_s if launch else 0.0)


class KernelSeconds(NamedTuple):
    """Seconds of one kernel, and the side of the roofline that it is on. launch_s: of these to launch it; moved_s: of passes over
    memory before and after it; memory_bound: whether the others are those in which bytes are read and written, rather than those
    of its arithmetic."""

    seconds: float
    launch_s: float
    moved_s: float
    memory_bound: bool


def op_time_s(device: DeviceSpec, **work: Any) -> float:
    """Seconds of one kernel: those of `kernel_seconds`, which takes the same and raises the same."""
    return kernel_seconds(device, **work).seconds


def kernel_seconds(
    device: DeviceSpec,
    *,
    flops: float,
    nbytes: float,
    dtype: str,
    kind: str,
    shape: tuple[int, ...] | None = None,
    eager: bool = False,
    op: str = "",
    grouped: bool = False,
    reached: float = 1.0,
    moved_bytes: float = 0.0,
) -> KernelSeconds:
    """Seconds of one kernel. eager: attention by kernels of the generation before the device's own. op: its name, by which a
    calibrated device knows it. grouped: a product of several groups of rows. reached: share of a plain kernel's rate.
    moved_bytes: of passes over memory before and after it.

    kind: matmul (shape (m, n, k), or (batch, m, n, k)), attention or attention_grad (shape (seq, head width)), conv or pointwise.
    Raises ClusterError for an unknown kind, and for a dtype the device has no arithmetic for (pointwise excepted).
    """
    curve = device.curve
    if kind not in OP_KINDS:
        raise ClusterError(f"unknown kind of operation {kind!r}; known: {', '.join(OP_KINDS)}")
    memory_s = nbytes / (device.memory_bandwidth_Bps * curve.memory)
    known = _measured(device, op, kind, flops, nbytes, shape)
    if known is not None:
        return known
    launch_s = device.launch_overhead_s
    if kind == "pointwise":
        return KernelSeconds(launch_s + memory_s, launch_s, 0.0, True)
    name = dtype_name(dtype)
    if kind == "matmul":
        m, n, k = shape[-3:] if shape else (1 << 20, 1 << 20, 1 << 20)
        share = matmul_share(device, max(1, m), max(1, n), max(1, k), name, grouped)
    elif kind in ATTENTION:
        seq, head = shape[-2:] if shape else (1 << 20, 128)
        share = attention_share(device, seq, head, dtype=name, eager=eager, backward=kind != "attention")
    else:
        share = curve.conv
    moved_s = moved_bytes / (device.memory_bandwidth_Bps * curve.memory)
    arithmetic_s = flops / (device.peak(name) * share * reached)
    return KernelSeconds(launch_s + max(arithmetic_s, memory_s) + moved_s, launch_s, moved_s, memory_s > arithmetic_s)


def _measured(
    device: DeviceSpec, op: str, kind: str, flops: float, nbytes: float, shape: tuple[int, ...] | None
) -> KernelSeconds | None:
    """An op as it was measured on the device; None where it was not. A pass launches in what it takes of no bytes."""
    if device.kernels is None:
        return None
    name = op.rpartition(".")[0] if op.count(".") > 1 else op
    if kind == "pointwise":
        seconds, launch_s = (float(device.kernels.pass_s(name, n)) for n in (nbytes, 0.0))
        return KernelSeconds(seconds, min(launch_s, seconds), 0.0, True)
    product = device.kernels.products.get(name, device.kernels.products.get(kind))
    if product is None:
        return None
    return KernelSeconds(product.seconds(flops, () if shape is None else shape[-3:]), product.launch_s, 0.0, False)


def merging_time_s(device: DeviceSpec, op: str, kernels: int, passes: int, moved_bytes: float) -> float:
    """Seconds that an op takes beyond one kernel for all of its work where it is done in so many, and so many passes put together
    what they give. moved_bytes: read and written by all of these."""
    if device.kernels is None:
        pass_s = moved_bytes / (device.memory_bandwidth_Bps * device.curve.memory)
        return (kernels - 1 + passes) * device.launch_overhead_s + pass_s
    product = device.kernels.products.get(op)
    launch_s = device.launch_overhead_s if product is None else product.launch_s
    return (kernels - 1) * launch_s + passes * float(device.kernels.pass_s(COPY, moved_bytes / passes))


def filling_time_s(device: DeviceSpec, result_bytes: float, added_bytes: float) -> tuple[float, float]:
    """The cost of a result that is zeros but where so many bytes are added: seconds to fill what is left of it, and the
    bytes of it that count as the op's own. Where kernels were not measured, all of it is one pass."""
    if device.kernels is None or result_bytes <= added_bytes:
        return 0.0, result_bytes
    return float(device.kernels.pass_s(FILL, result_bytes - added_bytes)), added_bytes


def drawing_time_s(device: DeviceSpec, instructions: float) -> float:
    """Seconds of so many instructions of 32 bits beside the products of a kernel: as many a second as fused multiply-adds in
    float32, which are two FLOPs."""
    return 2 * instructions / device.peak("float32") if device.supports("float32") else 0.0


def update_time_s(device: DeviceSpec, states: float, nbytes: Any) -> Any:
    """Seconds to update a parameter's shard of nbytes (a number or an array) by an optimizer that keeps so many elements of state
    for each of the parameter's: gradient, parameter and state are read, parameter and state written."""
    moved = (3 + 2 * states) * nbytes
    if device.kernels is None:
        return moved * (1.0 / (device.memory_bandwidth_Bps * device.curve.memory))
    return device.kernels.pass_s(f"update {min(round(states), 2)}", moved)
