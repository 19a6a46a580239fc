"""Devices: what one accelerator (or CPU share) can do, and how well it does it.

A `DeviceSpec` holds the vendor's figures (peak FLOP/s per dtype, memory and its bandwidth) and the name of its
efficiency curves, which say what share of the peak an operation of a given shape reaches. The figures live in
`data/devices.json`, the curves in `data/efficiency.json`, both with their sources; a calibration profile replaces them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from autopar.cluster.checks import RATE, SECONDS, check_fields, checked, name_text
from autopar.cluster.kernels import KernelTimes, kernels_from_dict
from autopar.cluster.tiers import Tier, fastest_first, tiers_from_dict
from autopar.errors import ClusterError
from autopar.runtime.comm.devices import LEAST_CUDA, Device
from autopar.runtime.data.schema import (
    Schema,
    anything,
    either,
    listed,
    number,
    parsed,
    positive,
    record,
    shown,
    table,
    text,
    where,
)

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

    matmul (16 and 32 bits), matmul8, matmul4, attention, conv: the asymptotic share for large shapes; attention_eager:
    with kernels written for the generation before; memory: the share of the memory bandwidth; half_dim: a matrix dim
    of this length reaches half of the asymptote.
    """

    matmul: float = 0.7
    matmul8: float = 0.6
    matmul4: float = 0.5
    attention: float = 0.45
    attention_eager: float = 0.4
    conv: float = 0.5
    memory: float = 0.85
    half_dim: float = 64.0

    def __post_init__(self) -> None:
        check_fields(_CURVE, self, "efficiency curve")

    def to_dict(self) -> dict[str, float]:
        """Plain numbers for JSON."""
        return dict(self.__dict__)


_CURVE: dict[str, Schema[float]] = {
    **{name: positive(100) for name in EfficiencyCurve.__dataclass_fields__},
    "half_dim": number(0, 1e9),
}
NO_TIERS = "describe tiers in the cluster file (`tiers: usual`, or their figures), or use cluster.with_tiers()"


@dataclass(frozen=True)
class DeviceSpec:
    """One device. FLOP/s, bytes, bytes/s, seconds. host_bandwidth_Bps: to the host's memory, one direction. tiers: memory
    beyond its own that a rank on it may use, fastest first (none: everything rests on the device). kernels: seconds of ops as
    they were measured on it, where they were. architecture: as compilers name it ("sm90"), by which kernels are chosen."""

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth_Bps: float
    launch_overhead_s: float = 4e-6
    host_bandwidth_Bps: float = 25e9
    curve: EfficiencyCurve = field(default_factory=EfficiencyCurve)
    kind: str = "gpu"
    tiers: tuple[Tier, ...] = ()
    kernels: KernelTimes | None = None
    architecture: str = ""

    def __post_init__(self) -> None:
        what = f"device {name_text(self.name, 'device')}"
        if self.peak_flops == {}:
            raise ClusterError(f"{what}: peak_flops is empty; give at least {{float32: FLOP/s}}")
        check_fields(_FIGURES, self, what)
        if len({tier.name for tier in self.tiers}) < len(self.tiers):
            raise ClusterError(f"device {self.name}: a memory tier is given twice")
        object.__setattr__(self, "tiers", fastest_first(self.tiers))
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

    @property
    def runs_as(self) -> Device:
        """The device by which its kernels are chosen; a GPU of which nothing is said is one of CUDA's."""
        if self.architecture or self.kind != "gpu":
            return Device.of_architecture(self.architecture)
        return LEAST_CUDA

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

    def slower(self, factor: float) -> DeviceSpec:
        """A device that takes `factor` times as long for whatever it computes."""
        return replace(
            self,
            peak_flops={dtype: rate / factor for dtype, rate in self.peak_flops.items()},
            memory_bandwidth_Bps=self.memory_bandwidth_Bps / factor,
            launch_overhead_s=self.launch_overhead_s * factor,
            kernels=None if self.kernels is None else self.kernels.slower(factor),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `device_from_dict` reads it back."""
        tiers = {"tiers": {tier.name: tier.to_dict() for tier in self.tiers}} if self.tiers else {}
        kernels = {"kernels": self.kernels.to_dict()} if self.kernels is not None else {}
        architecture = {"architecture": self.architecture} if self.architecture else {}
        return {
            "name": self.name,
            "kind": self.kind,
            "peak_flops": dict(self.peak_flops),
            "memory_bytes": self.memory_bytes,
            "memory_bandwidth_Bps": self.memory_bandwidth_Bps,
            "launch_overhead_s": self.launch_overhead_s,
            "host_bandwidth_Bps": self.host_bandwidth_Bps,
            "curve": self.curve.to_dict(),
            **tiers,
            **kernels,
            **architecture,
        }


def _is_architecture(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch("(sm[0-9]{2,3}|gfx[0-9a-f]{3,5})?", name) is not None


_FIGURES: dict[str, Schema[Any]] = {
    "peak_flops": table(where(lambda name: name in DTYPE_BYTES, f"a dtype of {', '.join(DTYPE_BYTES)}"), RATE),
    "memory_bytes": RATE,
    "memory_bandwidth_Bps": RATE,
    "launch_overhead_s": SECONDS,
    "host_bandwidth_Bps": RATE,
    "kind": text(),
    "architecture": where(_is_architecture, 'an architecture such as "sm90" or "gfx942"'),
    "curve": where(lambda curve: isinstance(curve, EfficiencyCurve), "an EfficiencyCurve"),
    "tiers": listed(where(lambda tier: isinstance(tier, Tier), "a Tier")),
    "kernels": where(lambda kernels: kernels is None or isinstance(kernels, KernelTimes), "KernelTimes"),
}


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
    key = name.strip().lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-").removeprefix("amd-")
    presets = load_data("devices.json")["devices"]
    if key in presets:
        return key
    if key in _GPU_ALIASES:
        return _GPU_ALIASES[key]
    matches = [k for k in sorted(presets, key=len, reverse=True) if key.startswith(k)]
    return matches[0] if matches else None


@cache
def device_preset(name: str) -> DeviceSpec:
    """A known device by preset or product name. Raises ClusterError for an unknown one."""
    key = preset_key(name)
    if key is None:
        raise ClusterError(f"unknown device {shown(name)}; known: {', '.join(device_names())}, or describe it in full")
    entry = load_data("devices.json")["devices"][key]
    return DeviceSpec(
        name=key,
        peak_flops={k: float(v) for k, v in entry["peak_flops"].items()},
        memory_bytes=float(entry["memory_bytes"]),
        memory_bandwidth_Bps=float(entry["memory_bandwidth_Bps"]),
        launch_overhead_s=float(entry["launch_overhead_s"]),
        host_bandwidth_Bps=float(entry["host_bandwidth_Bps"]),
        curve=curve_named(entry["curve"]),
        kind="cpu" if key == "cpu" else "gpu",
        architecture=entry.get("architecture", ""),
    )


_DEVICE = record(
    {},
    {
        "preset": text(),
        **_FIGURES,
        "name": text(),
        "peak_flops": table(parsed(_known_dtype), RATE),
        "curve": either(
            (str, text()), (Mapping, record({}, _CURVE)), what="the name of a curve, or a mapping of figures"
        ),
        "tiers": where(lambda tiers: isinstance(tiers, Mapping), "a mapping such as {ddr: {capacity_GB: 2000, …}}"),
        "kernels": anything,
    },
)


def device_from_dict(data: str | Mapping[str, Any], path: str = "device") -> DeviceSpec:
    """A preset's name, or `{preset: h100, memory_bytes: ...}` with overrides, or all fields. Raises ClusterError."""
    if isinstance(data, str):
        return device_preset(data)
    fields = checked(_DEVICE, data, "", path)
    base = device_preset(fields.pop("preset")) if "preset" in fields else None
    if isinstance(fields.get("curve"), str):
        fields["curve"] = curve_named(fields["curve"])
    elif "curve" in fields:
        fields["curve"] = EfficiencyCurve(**fields["curve"])
    if "tiers" in fields:
        fields["tiers"] = tiers_from_dict(fields["tiers"])
    if "kernels" in fields:
        fields["kernels"] = kernels_from_dict(fields["kernels"])
    if base is not None:
        return replace(base, **fields)
    missing = [k for k in ("name", "peak_flops", "memory_bytes", "memory_bandwidth_Bps") if k not in fields]
    if missing:
        raise ClusterError(
            f"device: {missing[0]} is missing; give it, or start from `preset: <one of {device_names()}>`"
        )
    return DeviceSpec(**fields)


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
