"""Devices: what one accelerator (or CPU share) can do, and how well it does it.

A `DeviceSpec` holds the vendor's figures (peak FLOP/s per dtype, memory and its bandwidth) and the name of its
efficiency curves, which say what share of the peak an operation of a given shape reaches. The figures live in
`data/devices.json`, the curves in `data/efficiency.json`, both with their sources; a calibration profile replaces them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import resources
from typing import Annotated, Any

from autopar.cluster.checks import Rate, Seconds, check_fields, checked
from autopar.cluster.kernels import KernelTimes
from autopar.cluster.tiers import Tier, fastest_first, tiers_data, tiers_from_dict
from autopar.errors import ClusterError
from autopar.runtime.comm.devices import LEAST_CUDA, Device
from autopar.runtime.data.fields import Form, from_data, given, kept, to_data
from autopar.runtime.data.schema import SchemaError, integer, must_be, number, parsed, positive, shown, text, where

Attained = Annotated[float, positive(100)]
DTYPE_BYTES: dict[str, float] = {
    "float64": 8,
    "float32": 4,
    "tfloat32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8": 1,
    "float4": 0.5,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

_DTYPE_ALIASES = {
    "fp64": "float64",
    "double": "float64",
    "fp32": "float32",
    "float": "float32",
    "tf32": "tfloat32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8",
    "fp8_cs": "float8",
    "fp8_mx": "float8",
    "mxfp8": "float8",
    "float8_e4m3fn": "float8",
    "float8_e5m2": "float8",
    "fp4": "float4",
    "nvfp4": "float4",
}


@cache
def dtype_name(dtype: str) -> str:
    """The canonical name: `bf16`, `torch.bfloat16` and `bfloat16` are one."""
    name = str(dtype).removeprefix("torch.").lower()
    return _DTYPE_ALIASES.get(name, name)


def dtype_bytes(dtype: str) -> float:
    """Bytes of one element."""
    name = dtype_name(dtype)
    if name not in DTYPE_BYTES:
        raise ClusterError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


def _known_dtype(name: str) -> str:
    """The canonical name of a dtype that is known. Raises ClusterError."""
    dtype_bytes(name)
    return dtype_name(name)


@dataclass(frozen=True)
class EfficiencyCurve:
    """Share of the peak that an operation reaches.

    matmul (16 and 32 bits), matmul8, matmul4, conv: the asymptotic share for large shapes; attention: that of forward with heads
    of 128, attention_eager: with kernels written for the generation before; memory: the share of the memory bandwidth; half_dim:
    a matrix dim of this length reaches half of the asymptote in 16 bits; grouped_half: so do so many rows each where a kernel
    makes the products of several groups of rows (0: as many as of another dim); even, odd: the share
    of that rate that a product in 16 bits keeps where rows of an operand or of its result are no multiple of 16 bytes, as their
    number of elements is even or odd.
    """

    matmul: Attained = 0.7
    matmul8: Attained = 0.6
    matmul4: Attained = 0.5
    attention: Attained = 0.45
    attention_eager: Attained = 0.4
    conv: Attained = 0.5
    memory: Attained = 0.85
    half_dim: Annotated[float, number(0, 1e9)] = 64.0
    grouped_half: Annotated[float, number(0, 1e9)] = 0.0
    even: Attained = 1.0
    odd: Attained = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "efficiency curve")


def _curve(value: object, path: str) -> EfficiencyCurve:
    """Raises SchemaError, and ClusterError for the name of an unknown curve."""
    if isinstance(value, str):
        return curve_named(value)
    if not isinstance(value, Mapping | EfficiencyCurve):
        raise must_be(path, "the name of a curve, or a mapping of figures", value)
    return from_data(EfficiencyCurve, value, path)


def _tiers(value: object, path: str) -> tuple[Tier, ...]:
    """Raises SchemaError, ClusterError."""
    if isinstance(value, Mapping):
        return tiers_from_dict(value)
    if not isinstance(value, tuple) or not all(isinstance(tier, Tier) for tier in value):
        raise must_be(path, "a mapping such as {ddr: {capacity_GB: 2000, …}}", value)
    if len({tier.name for tier in value}) < len(value):
        raise SchemaError("a memory tier is given twice")
    return fastest_first(value)


Dtype = Annotated[str, parsed(lambda name: _known_dtype(name))]
Curve = Annotated[EfficiencyCurve, Form(_curve, to_data)]
Tiers = Annotated[tuple[Tier, ...], Form(_tiers, tiers_data)]
Architecture = Annotated[
    str,
    where(
        lambda name: isinstance(name, str) and re.fullmatch("(sm[0-9]{2,3}|gfx[0-9a-f]{3,5})?", name) is not None,
        'an architecture such as "sm90" or "gfx942"',
    ),
]
Threads = Annotated[int, integer(1, 1 << 24)]
SPARSE = kept(sparse=True)
NO_TIERS = "describe tiers in the cluster file (`tiers: usual`, or their figures), or use cluster.with_tiers()"


@dataclass(frozen=True)
class DeviceSpec:
    """One device. FLOP/s, bytes, bytes/s, seconds. host_bandwidth_Bps: to the host's memory, one direction. tiers: memory
    beyond its own that a rank on it may use, fastest first (none: everything rests on the device). kernels: seconds of ops as
    they were measured on it, where they were. architecture: as compilers name it ("sm90"), by which kernels are chosen.
    resident_threads: of a GPU, those that run on it at once (None: not known). busy_watts: what it draws while it computes;
    idle_watts: while it waits, where that was published (None: not known)."""

    name: str
    peak_flops: Mapping[Dtype, Rate]
    memory_bytes: Rate
    memory_bandwidth_Bps: Rate
    launch_overhead_s: Seconds = 4e-6
    host_bandwidth_Bps: Rate = 25e9
    curve: Curve = field(default_factory=EfficiencyCurve)
    kind: str = "gpu"
    tiers: Tiers = field(default=(), metadata=SPARSE)
    kernels: KernelTimes | None = field(default=None, metadata=SPARSE)
    architecture: Architecture = field(default="", metadata=SPARSE)
    resident_threads: Threads | None = field(default=None, metadata=SPARSE)
    busy_watts: Rate | None = field(default=None, metadata=SPARSE)
    idle_watts: Rate | None = field(default=None, metadata=SPARSE)

    def __post_init__(self) -> None:
        check_fields(self, "device")
        if not self.peak_flops:
            raise ClusterError(f"device {self.name}: peak_flops is empty; give at least {{float32: FLOP/s}}")
        key = (
            self.name,
            tuple(sorted(self.peak_flops.items())),
            self.memory_bytes,
            self.memory_bandwidth_Bps,
            self.tiers,
        )
        object.__setattr__(
            self, "_hash", hash((key, self.launch_overhead_s, self.host_bandwidth_Bps, self.curve, self.kernels))
        )

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    @cached_property
    def runs_as(self) -> Device:
        """The device by which its kernels are chosen; a GPU of which nothing is said is one of CUDA's."""
        if self.architecture or self.kind != "gpu":
            return replace(Device.of_architecture(self.architecture), resident_threads=self.resident_threads)
        return replace(LEAST_CUDA, resident_threads=self.resident_threads)

    def supports(self, dtype: str) -> bool:
        """Whether the device has arithmetic for this dtype."""
        return dtype_name(dtype) in self.peak_flops

    def peak(self, dtype: str) -> float:
        """Dense peak FLOP/s. Raises ClusterError when the device lacks the dtype."""
        name = dtype_name(dtype)
        if name not in self.peak_flops:
            raise ClusterError(
                f"{self.name} has no {name} arithmetic; it has {', '.join(self.peak_flops)}. "
                "Choose one of these or another device"
            )
        return self.peak_flops[name]

    def tier(self, name: str) -> Tier:
        """A memory tier by name. Raises ClusterError where the device has none of that name."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        had = ", ".join(t.name for t in self.tiers) or "none"
        raise ClusterError(f"{self.name} has no memory tier {name!r} (it has {had}); {NO_TIERS}")

    def some_tiers(self) -> tuple[Tier, ...]:
        """The memory tiers, fastest first. Raises ClusterError where there are none."""
        if not self.tiers:
            raise ClusterError(f"{self.name} has no memory tiers; {NO_TIERS}")
        return self.tiers

    @staticmethod
    def slowest_of(devices: Iterable[DeviceSpec]) -> DeviceSpec:
        """A device that does nothing faster than any of these, for ranks that do the same on several kinds: the one with the
        least arithmetic, with the least of what the others have. It does not matter in which order they are given."""
        kinds = sorted(
            set(devices), key=lambda d: (max(d.peak_flops.values()), d.peak_flops.get("float32", 0.0), d.name)
        )
        slowest, *others = kinds
        if not others:
            return slowest
        shared = [dtype for dtype in slowest.peak_flops if all(d.supports(dtype) for d in others)]
        tiers = [tier for tier in slowest.tiers if all(tier.name in {t.name for t in d.tiers} for d in others)]
        return replace(
            slowest,
            name=" and ".join(sorted(d.name for d in kinds)),
            peak_flops={dtype: min(d.peak_flops[dtype] for d in kinds) for dtype in shared},
            memory_bytes=min(d.memory_bytes for d in kinds),
            memory_bandwidth_Bps=min(d.memory_bandwidth_Bps for d in kinds),
            launch_overhead_s=max(d.launch_overhead_s for d in kinds),
            host_bandwidth_Bps=min(d.host_bandwidth_Bps for d in kinds),
            tiers=tuple(
                min((d.tier(t.name) for d in kinds), key=lambda one: (one.capacity_bytes, one.bandwidth_Bps))
                for t in tiers
            ),
        )

    def with_share(self, share: float) -> DeviceSpec:
        """A device that computes a whole in the time in which this one computes such a share of it, launches aside."""
        return replace(self.slower(share), launch_overhead_s=self.launch_overhead_s)

    def slower(self, factor: float) -> DeviceSpec:
        """A device that takes `factor` times as long for whatever it computes."""
        return replace(
            self,
            peak_flops={dtype: rate / factor for dtype, rate in self.peak_flops.items()},
            memory_bandwidth_Bps=self.memory_bandwidth_Bps / factor,
            launch_overhead_s=self.launch_overhead_s * factor,
            kernels=None if self.kernels is None else self.kernels.slower(factor),
        )


@cache
def load_data(name: str, room: str = "autopar.cluster") -> dict[str, Any]:
    """One of the constant files in the `data` folder of a room."""
    text = resources.files(room).joinpath("data", name).read_text()
    data: dict[str, Any] = json.loads(text)
    return data


def curve_named(name: str) -> EfficiencyCurve:
    """The fitted efficiency curves of a device family. Raises ClusterError for an unknown one."""
    curves = load_data("efficiency.json")["curves"]
    if name not in curves:
        raise ClusterError(f"unknown efficiency curve {shown(name)}; known: {', '.join(curves)}, or give its figures")
    return EfficiencyCurve(**curves[name])


_GPU_ALIASES = {
    "v100-sxm2-16gb": "v100-16",
    "v100-sxm3-32gb": "v100",
    "v100-32": "v100",
    "a100-80": "a100",
    "a100-80gb": "a100",
    "a100-40gb": "a100-40",
    "a100-sxm4-80gb": "a100",
    "a100-sxm4-40gb": "a100-40",
    "a100-pcie-40gb": "a100-40",
    "h100-sxm5-80gb": "h100",
    "h100-80gb": "h100",
    "h100-sxm-96gb-hbm2e-500w": "h100-500w",
    "h200-sxm-141gb": "h200",
    "b200-sxm": "b200",
    "b300-sxm": "b300",
}


def device_names() -> list[str]:
    """Every preset."""
    return sorted(load_data("devices.json")["devices"])


def preset_key(name: str) -> str | None:
    """The preset that a product name means, or None."""
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    for maker in ("nvidia-", "amd-", "tesla-"):
        key = key.removeprefix(maker)
    presets = load_data("devices.json")["devices"]
    if key in presets:
        return key
    if key in _GPU_ALIASES:
        return _GPU_ALIASES[key]
    matches = [k for k in sorted(presets, key=len, reverse=True) if key.startswith(f"{k}-")]
    return matches[0] if matches else None


@cache
def device_preset(name: str) -> DeviceSpec:
    """A known device by preset or product name. Raises ClusterError for an unknown one."""
    key = preset_key(name)
    if key is None:
        raise ClusterError(f"unknown device {shown(name)}; known: {', '.join(device_names())}, or describe it in full")
    return DeviceSpec(key, kind="cpu" if key == "cpu" else "gpu", **load_data("devices.json")["devices"][key])


def read_device(data: object, path: str = "device") -> DeviceSpec:
    """A schema: a preset's name, or `{preset: h100, memory_bytes: ...}` with overrides, or all fields. Raises SchemaError,
    ClusterError."""
    if isinstance(data, DeviceSpec):
        return data
    if isinstance(data, str):
        return device_preset(text()(data, path))
    if not isinstance(data, Mapping):
        raise must_be(path, "a preset such as h100, or a mapping of its figures", data)
    fields = given(DeviceSpec, data, path, also={"preset": text()})
    if "preset" in fields:
        return replace(device_preset(fields.pop("preset")), **fields)
    missing = [k for k in ("name", "peak_flops", "memory_bytes", "memory_bandwidth_Bps") if k not in fields]
    if missing:
        raise ClusterError(
            f"device: {missing[0]} is missing; give it, or start from `preset: <one of {device_names()}>`"
        )
    return DeviceSpec(**fields)


def device_from_dict(data: str | Mapping[str, Any]) -> DeviceSpec:
    """The device that `read_device` reads. Raises ClusterError."""
    return checked(read_device, data, "", "device")


def usual_tiers(device: DeviceSpec) -> tuple[Tier, ...]:
    """The tiers that machines with this device usually have, a rank's share (data/tiers.json)."""
    table = load_data("tiers.json")
    families: dict[str, dict[str, Any]] = table["families"]
    key = next((k for k in sorted(families, key=len, reverse=True) if device.name.startswith(k)), "default")
    share = 1.0 / families[key]["devices"]
    return fastest_first(
        Tier(
            name,
            figures["bytes"] * share,
            figures["Bps"] * share if "Bps" in figures else device.host_bandwidth_Bps,
            table["latency_s"][name],
        )
        for name, figures in families[key]["tiers"].items()
    )
