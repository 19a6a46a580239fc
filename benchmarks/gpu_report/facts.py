"""The part `facts`: devices, driver, libraries, settings and links, as torch and nvidia-smi say them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from autopar.runtime.data.fields import to_data
from benchmarks.gpu_report.machine import Machine, attempt
from benchmarks.gpu_report.parts import Found
from benchmarks.gpu_report.separate import ROOT

SETTINGS = ("NCCL_", "CUDA_", "PYTORCH_", "TORCH_", "TRITON_")
"""Variables of the environment that change what is measured."""
QUERY = (
    "name,driver_version,vbios_version,memory.total,pci.bus_id,pcie.link.gen.max,pcie.link.width.max,power.limit,"
    "clocks.max.sm,clocks.max.mem,mig.mode.current,persistence_mode,compute_mode"
)


def measure(machine: Machine) -> Found:
    yield "software", software()
    yield (
        "host",
        {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "settings": {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)},
        },
    )
    yield "devices", [attempt(device, machine, index) for index in range(machine.backend.count())]
    yield "described", {"device": machine.described_device, "size": to_data(machine.size)}
    yield "peers", attempt(peers, machine)
    for name, command in {
        "driver": ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"],
        "topology": ["nvidia-smi", "topo", "-m"],
        "nvlink": ["nvidia-smi", "nvlink", "--status"],
    }.items():
        yield name, said(command)


def software() -> dict[str, str]:
    """Versions of all that computes."""
    found = {"python": sys.version.split()[0], "torch": torch.__version__, "commit": said(["git", "rev-parse", "HEAD"])}
    found["CUDA"] = str(torch.version.cuda or torch.version.hip)
    found["cuDNN"] = str(attempt(torch.backends.cudnn.version))
    found["NCCL"] = str(attempt(lambda: torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    for package in ("triton", "numpy", "ortools"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def device(machine: Machine, index: int) -> dict[str, Any]:
    """A device by torch's properties."""
    if machine.backend.is_host:
        return {"name": "the processor, which stands for a GPU"}
    facts = torch.cuda.get_device_properties(index)
    return {
        "name": facts.name,
        "capability": [facts.major, facts.minor],
        "memory_bytes": facts.total_memory,
        "multiprocessors": facts.multi_processor_count,
        "bus": machine.backend.bus(torch.device("cuda", index)),
    }


def peers(machine: Machine) -> list[list[bool]]:
    """Whether a device (row) can read the memory of another (column)."""
    count = 0 if machine.backend.is_host else machine.backend.count()
    return [
        [one != other and torch.cuda.can_device_access_peer(one, other) for other in range(count)]
        for one in range(count)
    ]


def said(command: list[str]) -> str:
    """The output of a program, or why there is none."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"none: {error}"
    return done.stdout.strip() if not done.returncode else f"none: {(done.stderr or done.stdout).strip()[:500]}"


def lines(record: dict[str, Any]) -> list[str]:
    told = [f"{len(record['devices'])} × {record['devices'][0].get('name')}" if record.get("devices") else "no device"]
    told += [", ".join(f"{name} {value}" for name, value in record["software"].items() if name != "commit")]
    return told + [record[name] for name in ("driver", "topology") if name in record]
