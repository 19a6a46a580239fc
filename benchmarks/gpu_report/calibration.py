"""The part `calibration`: what `autopar-calibrate` measures of the device, and of NCCL where there are several."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_report.machine import Machine
from benchmarks.gpu_report.parts import Found


def measure(machine: Machine) -> Found:
    from autopar.costmodel.calibrate import calibrate

    yield "profile", calibrate(quick=machine.rehearsal, ranks=machine.ranks, say=lambda text: None)


def lines(record: dict[str, Any]) -> list[str]:
    profile = record["profile"]
    told = [f"base {profile['base']}, launch {1e6 * profile['device']['launch_overhead_s']:.1f} us"]
    told += [f"curve: {name} {value:.3g}" for name, value in profile["device"]["curve"].items()]
    for level, link in profile["links"].items():
        told.append(f"links ({level}): {link['bandwidth_Bps'] / 1e9:.1f} GB/s, {1e6 * link['base_s']:.0f} us")
    return told + [f"residual of {name}: {100 * value:.0f} %" for name, value in profile["residuals"].items()]
