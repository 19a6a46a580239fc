"""The parts of the report, in their order: what comes later may read what came before (`Machine.record`)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.gpu_report.machine import Machine

Found = Iterator[tuple[str, Any]]
"""Names and what was found under them, one after the other, so that what was found is kept if the rest fails."""


class PartModule(Protocol):
    """A module of this folder that is a part."""

    def measure(self, machine: Machine) -> Found: ...

    def lines(self, record: dict[str, Any]) -> Sequence[str]: ...


@dataclass(frozen=True)
class Part:
    """A row: the module of this folder, what it does in words, seconds that it may take, devices that it needs."""

    name: str
    title: str
    limit_s: float
    devices: int = 1

    @property
    def module(self) -> PartModule:
        found: Any = importlib.import_module(f"benchmarks.gpu_report.{self.name}")
        return found


PARTS = (
    Part("facts", "what this machine is", 60),
    Part("suite", "the tests that need a GPU", 1800),
    Part("equality", "numbers against eager PyTorch", 900),
    Part("kernels", "single kernels by shape", 300),
    Part("calibration", "device and links, as the planner is told them", 900),
    Part("steps", "a step on one GPU: seconds and bytes", 1800),
    Part("ranks", "a step on several GPUs, against DDP and FSDP2", 1800, devices=2),
    Part("memory", "bytes outside of tensors", 300),
    Part("races", "a step under CUDA's sanitizer", 600),
    Part("hang", "a rank that stops is named", 300, devices=2),
)
BY_NAME = {part.name: part for part in PARTS}
