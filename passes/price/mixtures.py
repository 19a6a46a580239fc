"""What a software makes of an op that computes rows in groups (`autopar.ops.registry.Grouped`), beside its products."""

from __future__ import annotations

from autopar.costmodel.software import Software
from autopar.ops.registry import Grouped


def work_share(grouped: Grouped | None, software: Software) -> float:
    """Share of an op's work that is done: a software that keeps rows for backward makes nothing again."""
    return 1.0 - grouped.again if grouped is not None and software.keeps_rows else 1.0


def moved_bytes(grouped: Grouped | None, software: Software) -> float:
    """Bytes that an op reads and writes beside its products."""
    if grouped is None:
        return 0.0
    c = software.constants
    passes = c.permute_passes if software.keeps_rows else grouped.passes
    inner = c.fused_passes if software.kernels == "fused" else c.eager_passes
    return passes * grouped.row_bytes + inner * grouped.inner_bytes
