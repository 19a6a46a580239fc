"""Levers: what could be changed of a request, and which limits each of them could move.

A lever is a guess until it is planned (`advice.py`). Options that leave a choice to the search are none, as the search has chosen
already; those that force it are, and so is what no search may change by itself: the batch, and how numbers are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.compiled import Compiled
from autopar.report.advice.scaling import FREE, samples

ROUNDING = "numbers are rounded otherwise"
BATCH = "the global batch is another one"
RANDOM = "random numbers, and statistics of a batch, are those of other microbatches"
MOST_TIMES = 4
"""Times as large as it is that a global batch is tried at most."""


@dataclass(frozen=True)
class Lever:
    """A change of a request. limits: that it could move; options: of the request that are others; times: as large as the global
    batch is the new one; alters: how what is computed changes, where it does."""

    text: str
    limits: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    times: int = 1
    alters: str = ""


def levers(program: Compiled) -> Iterator[Lever]:
    """The levers of a program's request, those that change nothing of what is computed first."""
    for lever in (*_forced(program), *_microbatches(program), *_larger(program), *_rounding(program)):
        if lever.times > 1 or any(getattr(program.options, name) != value for name, value in lever.options.items()):
            yield lever


def _alters(program: Compiled) -> str:
    """How other microbatches change what is computed."""
    return RANDOM if program.options.coupled != "refuse" or program.ir.random else ""


def _forced(program: Compiled) -> Iterator[Lever]:
    """Options that force what the search would choose."""
    o = program.options
    alters = _alters(program)
    stages = {name: FREE[name] for name in ("pp", "schedule", "chunks", "stage_boundaries")}
    if program.request.plan is not None:
        text = "no plan=: the plan that is searched for"
        yield Lever(
            text, ("compute", "memory", "message", "bubble", "tiers", "host"), {"microbatches": None}, alters=alters
        )
    if o.recompute != "auto":
        yield Lever('recompute="auto"', ("compute", "memory", "message"), {"recompute": "auto"})
    if o.offload not in ("auto", "none"):
        yield Lever('offload="none"', ("tiers",), {"offload": "none"})
        yield Lever('offload="auto"', ("tiers",), {"offload": "auto"})
    if o.schedule != "auto" or o.chunks is not None:
        chunks = o.chunks if o.stage_boundaries is not None else None
        yield Lever('schedule="auto"', ("bubble",), {"schedule": "auto", "chunks": chunks})
    if not o.overlap:
        yield Lever("overlap=True", ("message",), {"overlap": True})
    if o.order is not None:
        yield Lever("order=None", ("compute", "message"), {"order": None})
    if not o.idle_ranks:
        yield Lever("idle_ranks=True", ("message", "bubble", "host"), {"idle_ranks": True})
    if o.pp is not None or o.stage_boundaries is not None:
        yield Lever("pp=None", ("message", "bubble", "host"), stages)
    if o.mesh is not None or o.strategy != "auto":
        own = {"mesh": None, "strategy": "auto"}
        yield Lever('strategy="auto", without mesh', ("compute", "memory", "message"), own)
    if len([name for name, value in FREE.items() if getattr(o, name) != value]) > 1:
        yield Lever("mesh, strategy and stages left to the search", ("memory", "message", "bubble", "host"), FREE)


def _microbatches(program: Compiled) -> Iterator[Lever]:
    """Other numbers of microbatches of the same batch, where their number is forced."""
    forced = program.options.microbatches
    if forced is None:
        return
    limits, alters = ("message", "bubble", "memory", "host", "tiers"), _alters(program)
    yield Lever("microbatches=None", limits, {"microbatches": None}, alters=alters)
    for other in (1, forced // 2, 2 * forced, 4 * forced):
        if other and samples(program) % other == 0:
            yield Lever(f"accumulate {other}", limits, {"microbatches": other}, alters=alters)


def _larger(program: Compiled) -> Iterator[Lever]:
    """Larger global batches, in as many more microbatches where their number is forced."""
    forced, batch, times = program.options.microbatches, samples(program), 2
    if all(dim is None for dim in program.ir.batch_dims):
        return
    while times <= MOST_TIMES:
        options = {} if forced is None else {"microbatches": forced * times}
        text = f"global batch {batch * times}" if forced is None else f"accumulate {forced * times}"
        yield Lever(text, ("message", "bubble", "memory", "host", "tiers", "overhead"), options, times, BATCH)
        times *= 2


def _rounding(program: Compiled) -> Iterator[Lever]:
    """Fewer bits of messages and products."""
    o, devices = program.options, [device for _, device in program.request.cluster.devices]
    if program.training and o.gradient_compression is None and program.plan.ranks > 1:
        yield Lever('gradient_compression="bf16"', ("message",), {"gradient_compression": "bf16"}, alters=ROUNDING)
    wide = any(p.type.dtype.itemsize == 4 for p in program.ir.parameters.values())
    if o.precision is None and wide and all(device.kind == "gpu" and device.supports("bf16") for device in devices):
        yield Lever('precision="bf16"', ("compute", "memory", "message"), {"precision": "bf16"}, alters=ROUNDING)
