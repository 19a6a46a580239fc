"""A `Layout` as the options of a compilation: what leaves that layout alone, for its price."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.errors import InputError
from autopar.exchange.layout import Layout
from autopar.options import Options

ANY_MEMORY_BYTES = 1e15
"""A limit that no plan meets: a layout is priced whether it fits or not."""
UNREAD = "recomputation without products whose results backward does not read"
CUT = "stages of the pipeline cut where it is fastest"


def options_of(layout: Layout, options: Options | None = None, **others: Any) -> Options:
    """The options under which `autopar.compile` makes the layout's plan.

    options: whose other fields are kept; others: fields that go before all. Raises InputError for a layout whose dp is not known
    (`Layout.on`), or that has a recomputation which no policy is.
    """
    if layout.dp is None:
        raise InputError("a layout is compiled for a number of ranks; give one with Layout.on(ranks)")
    if layout.dp % layout.ep:
        raise InputError(
            f"experts apart over ep={layout.ep} of dp={layout.dp}: rows travel along one axis, which is a part of dp"
        )
    zero = f"zero{layout.zero}" if layout.zero else ""
    axes = {"dp": layout.dp // layout.ep, "ep": layout.ep, "cp": layout.cp, "tp": layout.tp}
    said: dict[str, Any] = {
        "mesh": {axis: size for axis, size in axes.items() if axis == "dp" or size > 1},
        "axes": None,
        "strategy": "-".join(filter(None, ("megatron", zero))) if layout.tp > 1 else zero or "dp",
        "pp": layout.pp,
        "chunks": layout.virtual_stages if layout.pp > 1 else None,
        "schedule": layout.schedule or "auto" if layout.pp > 1 else "auto",
        "microbatches": layout.microbatches,
        "recompute": layout.recompute,
        "offload": layout.offload,
        "precision": layout.precision or None,
        "memory_bytes": ANY_MEMORY_BYTES,
        "explain_s": 0.0,
        "constraints": {},
        "stage_boundaries": None,
    }
    return replace(options or Options(), **(said | others))


def differences(layout: Layout) -> tuple[str, ...]:
    """The points in which the plan that these options give is only near the layout."""
    near = {
        "tensor parallelism with the sequence cut between products": layout.tp > 1 and not layout.sequence_parallel,
        UNREAD: layout.recompute == "full",
        "ZeRO over all ranks of dp, and not over groups of them": layout.zero > 0 and layout.replicas > 1,
        CUT: layout.pp > 1,
        "every layer recomputed": layout.recompute_layers is not None,
    }
    return tuple(point for point, holds in near.items() if holds)
