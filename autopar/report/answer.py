"""The answer of a compilation, before any detail: how fast, whether it fits, what time goes to, and why not another plan."""

from __future__ import annotations

from dataclasses import fields

from autopar.cluster.device import DeviceSpec
from autopar.cluster.process import fragmentation, taken_bytes
from autopar.codegen.pipeline import batch_shapes
from autopar.compiled import Alternative, Compiled
from autopar.ir.program import Program
from autopar.ir.text import energy_text, size_text, time_text
from autopar.options import Options
from autopar.passes.account.spent import Spent, spent
from autopar.report.machines import machine_facts
from autopar.report.program_facts import RoomFacts, WorkFacts
from autopar.runtime.run.metrics import tokens_of_shape

CAUSES = {
    "computed_s": "computing",
    "messages_s": "messages in layers",
    "tiers_s": "memory tiers",
    "idle_s": "idle in the schedule",
    "gradients_s": "messages of parameters",
    "update_s": "optimizer",
    "rest_s": "once a step",
    "overhead_s": "overhead",
}
"""Names of the parts of `Spent`, in their order."""
SHOWN = 0.05
"""Causes of less than this share of a difference are not named."""
TIED = 1e-6
"""Share of a step up to which two plans are as fast as each other."""


def batch_of(ir: Program, microbatches: int) -> tuple[int | None, int | None]:
    """Samples and tokens of a step of so many microbatches, of which the program is one; None where there are none."""
    shapes = batch_shapes(ir, microbatches)
    samples = [shape[dim] for shape, dim in zip(shapes, ir.batch_dims, strict=True) if dim is not None]
    counts = [
        tokens_of_shape(shape, str(type_.dtype).removeprefix("torch."))
        for shape, (_, type_) in zip(shapes, ir.inputs, strict=True)
    ]
    return max(samples, default=None), max(counts, default=0) or None


def work_facts(program: Compiled) -> WorkFacts:
    """The work of a step, and its rate."""
    step_s, peak_s = program.decision.predicted.step_time_s, machine_facts(program).peak_s
    samples, tokens = batch_of(program.ir, program.plan.microbatches)
    return WorkFacts(
        program.plan.ranks,
        samples,
        tokens,
        tokens / step_s if tokens and step_s > 0 else None,
        peak_s / step_s if peak_s is not None and step_s > 0 and program.training else None,
    )


def room_facts(program: Compiled, given: Options | None = None) -> RoomFacts:
    """The memory of the device that is fullest, by share, as the search held plans against it. given: the options that say how
    much there is, where the program was compiled whether it fits or not; else its own."""
    counted, cluster = program.account, program.cluster
    rooms: list[RoomFacts] = []
    for group, peak, on_kinds in zip(program.lowered.graph.groups, counted.peaks, counted.peaks_on_kinds, strict=True):
        mesh = program.plan.stages[group[0]].mesh
        kinds = [(cluster.device(rank), nbytes) for rank, nbytes in on_kinds.items()]
        for device, nbytes in kinds or [(cluster.pace(mesh.offset, mesh.size), peak)]:
            rooms.append(_room(program, given or program.options, device, dict(mesh.axes), nbytes))
    return max(rooms, key=lambda one: one.needed_bytes / one.device_bytes)


def over_bytes(program: Compiled, given: Options | None = None) -> float:
    """Bytes that the fullest device of a program lacks; negative where it has room. given: as of `room_facts`."""
    room = room_facts(program, given)
    return room.needed_bytes - room.device_bytes


def _room(program: Compiled, options: Options, device: DeviceSpec, axes: dict[str, int], nbytes: float) -> RoomFacts:
    """The memory of a device on which tensors take so many bytes."""
    if options.memory_bytes is not None:
        return RoomFacts(f"{device.name}, as Options.memory_bytes says", {}, nbytes, float(options.memory_bytes))
    memory_bytes = device.memory_bytes * options.memory_fraction
    name = device.name if options.memory_fraction == 1 else f"{device.name}, as Options.memory_fraction says"
    causes = taken_bytes(program.cluster, axes, device, memory_bytes)
    if lost := fragmentation(device) * nbytes:
        causes["gaps of the allocator"] = lost
    return RoomFacts(name, causes, nbytes + sum(causes.values()), memory_bytes)


def parts(times: Spent) -> list[tuple[str, float]]:
    """The parts of a step by their names, in seconds."""
    return [(CAUSES[part.name], getattr(times, part.name)) for part in fields(times)]


def shown_parts(times: Spent) -> list[tuple[str, float]]:
    """The parts that are not next to nothing."""
    return [(what, s) for what, s in parts(times) if s >= 0.0005 * times.step_s]


def spent_text(times: Spent) -> str:
    """`computing 9 ms (90.0%), idle in the schedule 1 ms (10.0%)`."""
    step_s = times.step_s or 1.0
    return ", ".join(f"{what} {time_text(s)} ({s / step_s:.1%})" for what, s in shown_parts(times))


def work_text(work: WorkFacts) -> str:
    """`batch 8, 256 tokens, 23,500 tokens/s, MFU 40.1% on 4 devices`."""
    shown = [f"batch {work.batch:,}"] if work.batch is not None else []
    shown += [f"{work.tokens:,} tokens"] if work.tokens is not None else []
    shown += [rate_text(work.tokens_per_s)] if work.tokens_per_s is not None else []
    shown += [f"MFU {work.mfu:.1%}"] if work.mfu is not None else []
    return f"{', '.join(shown)} on {work.devices:,} devices".strip()


def energy_line(program: Compiled) -> str | None:
    """`energy: at most 1.2 kJ a step, 5.2 µWh a token (700 W a device)`; None where nobody published what a device draws."""
    joules, tokens = program.decision.predicted.energy_J, work_facts(program).tokens
    if joules is None:
        return None
    each = f", {joules / 3600 / tokens * 1e6:.3g} µWh a token" if tokens else ""
    watts = {device.name: device for _, device in program.cluster.devices}
    drawn = ", ".join(
        f"{name} {device.busy_watts:g} W" + (f", waiting {device.idle_watts:g} W" if device.idle_watts else "")
        for name, device in watts.items()
    )
    most = any(device.idle_watts is None for device in watts.values())
    waiting = "; one that waits is counted like one that computes, as no idle watts are known" if most else ""
    return f"energy: {'at most ' if most else ''}{energy_text(joules)} a step{each} ({drawn}{waiting})"


def rate_text(tokens_per_s: float) -> str:
    """`23,500 tokens/s`."""
    return f"{tokens_per_s:,.0f} tokens/s"


def why_not(other: Alternative, program: Compiled) -> str:
    """Why a plan that was looked at was not chosen: by how much it is slower, and what makes it so. A plan that was not lowered
    is as the solver prices it, and messages that overlap with computing, which are found afterwards, could make it faster."""
    own, others = program.decision.predicted, other.predicted
    more_s, held = others.step_time_s - own.step_time_s, size_difference(others.peak_bytes - own.peak_bytes)
    priced = " as it is priced before overlap is looked for" if other.spent is None else ""
    if abs(more_s) <= TIED * own.step_time_s:
        return f"as fast{priced}, and it holds {held}"
    if other.short_bytes > 0:
        return (
            f"does not fit: {size_text(other.short_bytes)} more than a rank has room for ({time_text(-more_s)} faster)"
        )
    if more_s < 0:
        return f"{time_text(-more_s)} below the plan's step{priced}, and it holds {held}"
    if other.spent is None:
        return f"{time_text(more_s)} slower{priced}"
    return f"{time_text(more_s)} slower: {', '.join(cause_texts(spent(program.account), other.spent))}"


def size_difference(more_bytes: float) -> str:
    """`8.1 GB less`, `1 kB more` or `as many bytes`."""
    if abs(more_bytes) < 0.5:
        return "as many bytes"
    return f"{size_text(abs(more_bytes))} {'more' if more_bytes > 0 else 'less'}"


def cause_texts(before: Spent, after: Spent) -> list[str]:
    """The causes of a step that is slower than another, or faster, the largest first: up to two, and the one that does most for
    the other side."""
    more_s, own = after.step_s - before.step_s, dict(parts(before))
    sign = 1.0 if more_s >= 0 else -1.0
    changes = sorted(((sign * (s - own[what]), what) for what, s in parts(after)), reverse=True)
    ahead, behind = ("+", "-") if sign > 0 else ("-", "+")
    least_s = SHOWN * abs(more_s)
    causes = [f"{ahead}{time_text(s)} {what}" for s, what in changes if s > least_s][:2]
    return causes + [f"{behind}{time_text(-s)} {what}" for s, what in changes[::-1] if -s > least_s][:1]
