"""The machine that a report is about, as every part sees it: its devices, the sizes to measure at, and how to measure."""

from __future__ import annotations

import functools
import json
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.counter import ByteCounter
from autopar.runtime.comm.backends import HOST, Backend, present_backend
from benchmarks.models import LlamaShape

STATE_BYTES = 16
"""Bytes of a float32 parameter with its gradient and the two states of Adam."""
PROGRAMS = 4
"""Programs that take turns, each with a state of its own."""
STATE_SHARE = 0.4
"""The share of a device's memory that their states may take together; activations take the rest."""


@dataclass(frozen=True)
class Size:
    """A Llama's shape, and the rows of a batch that each rank gets. seq: tokens of a row."""

    shape: LlamaShape
    seq: int
    rows: int

    @property
    def parameters(self) -> int:
        """The number of parameters, norms left out."""
        s = self.shape
        head = s.dim // s.heads
        block = s.dim * (2 * s.dim + 2 * s.kv_heads * head + 3 * s.ffn)
        return s.layers * block + 2 * s.vocab * s.dim


REHEARSED = Size(LlamaShape(layers=1, dim=32, ffn=64, heads=4, kv_heads=2, vocab=64), seq=16, rows=2)
SIZES = (
    Size(LlamaShape.of_width(6, 2048), seq=2048, rows=2),
    Size(LlamaShape.of_width(4, 1024), seq=1024, rows=2),
    Size(LlamaShape.of_width(2, 512), seq=512, rows=2),
)
"""The largest that fits is measured."""


@dataclass(frozen=True)
class Machine:
    """The devices of this machine. folder: of the records of the parts before; rehearsal: the processor stands for two GPUs."""

    folder: Path
    rehearsal: bool = False

    @functools.cached_property
    def backend(self) -> Backend:
        """The kind of the devices."""
        return HOST if self.rehearsal else present_backend()

    @property
    def device(self) -> torch.device:
        """The first device."""
        return self.backend.device(0)

    @property
    def ranks(self) -> int:
        """Devices that can be ranks at once."""
        return 2 if self.rehearsal else self.backend.count()

    @property
    def steps(self) -> int:
        """Steps that are timed, behind `warmup` of them."""
        return 2 if self.rehearsal else 30

    @property
    def warmup(self) -> int:
        return 1 if self.rehearsal else 6

    @property
    def memory_bytes(self) -> int:
        """Bytes of the first device; of a rehearsal none, as nothing is sized by it."""
        return 0 if self.backend.is_host else int(torch.cuda.get_device_properties(self.device).total_memory)

    @property
    def size(self) -> Size:
        """The largest model whose programs fit side by side."""
        if self.rehearsal:
            return REHEARSED
        room = STATE_SHARE * self.memory_bytes / (PROGRAMS * STATE_BYTES)
        return next((one for one in SIZES if one.parameters <= room), SIZES[-1])

    # ---- the cluster that programs are planned for

    def described(self, ranks: int) -> autopar.ClusterSpec:
        """So many of its devices, by their vendor's figures."""
        if self.rehearsal:
            return autopar.ClusterSpec.local(ranks)
        return autopar.ClusterSpec.homogeneous(devices=ranks, device=self.described_device, devices_per_node=ranks)

    @functools.cached_property
    def described_device(self) -> dict[str, Any]:
        """The preset nearest to a device, with its own memory."""
        from autopar.cluster.here import base_device

        base = base_device(self.device)
        return {"preset": base.name, "memory_bytes": float(self.memory_bytes or base.memory_bytes)}

    def calibrated(self, ranks: int) -> autopar.ClusterSpec | None:
        """The same as the part `calibration` measured it; None where it gave nothing."""
        profile = self.record("calibration").get("profile")
        return None if profile is None else self.described(ranks).with_profile(profile)

    def record(self, part: str) -> dict[str, Any]:
        """The record of a part, as far as it came."""
        path = self.folder / f"{part}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    # ---- measuring

    def synchronize(self) -> None:
        """Wait until the device has done what it was told."""
        self.backend.module.synchronize(self.device)

    def allocated_bytes(self) -> int:
        """Bytes of tensors on the device now; of the processor's nothing is known."""
        return 0 if self.backend.is_host else torch.cuda.memory_allocated(self.device)

    def outside_bytes(self) -> int:
        """Bytes of the device that the caching allocator does not have: contexts, libraries and communicators, those of other
        processes too. A rehearsal takes the most that its process had in memory."""
        if self.backend.is_host:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.synchronize()
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)

    def counting(self) -> AbstractContextManager[ByteCounter | None]:
        """A context inside which bytes of tensors are counted, where no allocator does: what `peak` needs."""
        return ByteCounter() if self.backend.is_host else nullcontext()

    def peak(self, run: Callable[[], Any], counter: ByteCounter | None = None) -> dict[str, int]:
        """The most bytes of tensors while `run` runs, and with what the caching allocator had beside them. counter: what
        `counting` gave, whose context this is called in."""
        if counter is not None:
            counter.restart()
            run()
            return {"allocated": counter.peak, "reserved": counter.peak}
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        self.synchronize()
        return {
            "allocated": torch.cuda.max_memory_allocated(self.device),
            "reserved": torch.cuda.max_memory_reserved(self.device),
        }

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """torch.compile of a function; in a rehearsal without code for the processor, which takes a compiler minutes."""
        return torch.compile(function, backend="aot_eager" if self.rehearsal else "inductor", dynamic=False)


def attempt(run: Callable[..., Any], *arguments: Any) -> Any:
    """The result, or {"error": …} of what it raised, so that one case does not end a part."""
    try:
        return run(*arguments)
    except (Exception, SystemExit) as error:  # whatever a library raises on a machine that was never seen
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
