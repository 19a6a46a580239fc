"""The cost of an op that computes rows in groups (`autopar.ops.registry.Grouped`) under a software, beside its products."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.costmodel.software import CAST_BYTES, Software
from autopar.ir.visits import visits
from autopar.ops.registry import Grouped
from autopar.runtime.comm.devices import CPU, Device

LEG_PASSES = 6
"""Passes over rows that go to nodes: gathered as they set out, and as they come back read, cast and added."""


def work_share(grouped: Grouped | None, software: Software) -> float:
    """Share of an op's work that is done: a software that keeps rows for backward makes nothing again."""
    return 1.0 - grouped.again if grouped is not None and software.keeps_rows else 1.0


def moved_bytes(grouped: Grouped | None, software: Software, along: Sequence[int] = (), device: Device = CPU) -> float:
    """Bytes that an op reads and writes beside its products. along: ranks of the axes that its rows travel along; of several the
    first leads to nodes, each of which a row visits once; device: that it runs on."""
    if grouped is None:
        return 0.0
    c = software.constants
    passes = software.routed_passes if software.keeps_rows else grouped.passes
    if len(along) > 1 and not software.keeps_rows:
        passes += LEG_PASSES * visits(along[0], grouped.choices) / grouped.choices
    inner_bytes = c.fused_passes * grouped.inner_bytes
    if software.kernels != "fused":
        inner_bytes = (c.eager_share if software.kernels == "eager" else 1.0) * grouped.apart_bytes
    cast_bytes = CAST_BYTES * software.cast_passes * grouped.cast
    padding = 1.0 if device == CPU or software.keeps_rows else grouped.padding
    return cast_bytes + padding * (passes * grouped.row_bytes + inner_bytes)
