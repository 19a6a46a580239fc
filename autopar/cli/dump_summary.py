"""A screenful about a saved program: the answer, its mesh and stages, what is where, the largest messages, and where more is."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby

from autopar.cli.saved import Saved
from autopar.ir.text import calls_text, size_text, time_text
from autopar.passes.account.collectives import Collective
from autopar.report.answer import spent_text, work_text
from autopar.report.program_facts import ParameterFacts
from autopar.report.table import Block, Heading, Table
from autopar.runtime.comm.mesh import Shares

STAGES, KINDS, MESSAGES, OTHERS = 4, 6, 5, 2
"""Rows of the stages, of the kinds of storage, of the messages and of other plans."""


def summary(saved: Saved) -> Iterator[Block]:
    """At most 40 lines."""
    yield from _answer(saved)
    yield from _stages(saved)
    yield from _storage(saved)
    yield from _messages(saved)
    yield ""
    yield (
        "more: --section plan, calls, graph, schedule, collectives, parameters or memory; --all; --rank R, the code of a rank;\n"
        "      --section graph --format svg, a picture; --format html, a page; --help"
    )


def _answer(saved: Saved) -> Iterator[Block]:
    program = saved.program
    solver, predicted, room = program.solver, program.predicted, program.room
    kind = "training" if program.training else "inference"
    gap = "unknown" if solver.gap is None else f"{solver.gap:.2%}"
    yield Heading(f"{program.model}, {kind} on {program.ranks} ranks of {program.cluster}")
    yield f"  plan        {saved.plan.show_meshes()}, chosen by {program.origin} ({solver.method}, gap {gap})"
    yield f"  step        {time_text(predicted.step_time_s)}: {spent_text(program.spent)}"
    yield f"  rate        {work_text(program.work)}"
    short = "" if room.free_bytes >= 0 else f", {size_text(-room.free_bytes)} too many"
    yield (
        f"  memory      peak {size_text(predicted.peak_bytes)} per rank; {size_text(room.needed_bytes)} of "
        f"{size_text(room.device_bytes)} of {room.device}{short}"
    )
    runs = [(name, len([*calls])) for name, calls in groupby(call.template for call in program.calls)]
    shown = ", ".join(name if times == 1 else f"{name} ×{times}" for name, times in runs[:8])
    yield f"  calls       {len(program.calls)}: {shown}{', …' if len(runs) > 8 else ''}"
    for name, forms in [*program.entries.items()][:OTHERS]:
        yield f"  entry       {name}: {', '.join(form.plan for form in forms[:3])}"
    for other in program.alternatives[:OTHERS]:
        yield f"  instead of  {other.name}: step {time_text(other.step_time_s)}, {size_text(other.peak_bytes)} held"


def _stages(saved: Saved) -> Iterator[Block]:
    """The groups of ranks: which stages and calls each has, on which mesh. Axes are told with the ranks of their first groups."""
    program, schedule = saved.program, saved.program.schedule
    yield ""
    pieces = f", {schedule.name} of {program.microbatches} microbatches" if len(saved.stages) > 1 else ""
    yield Heading(f"mesh{pieces}" if len(saved.stages) == 1 else f"stages{pieces}")
    rows = []
    for stages, peak in zip(schedule.graph.groups, schedule.peaks, strict=True):
        mesh = saved.stages[stages[0]].mesh
        calls = ", ".join(calls_text(*saved.plan.stages[s].calls) for s in stages)
        ranks = f"{mesh.offset}–{mesh.offset + mesh.size - 1}" if mesh.size > 1 else f"{mesh.offset}"
        rows.append((ranks, str(mesh), ", ".join(map(str, stages)), calls, size_text(peak)))
    yield Table(("ranks", "mesh", "stages", "calls", "peak per rank"), rows[:STAGES], (4,), indent=2)
    if len(rows) > STAGES:
        yield f"  … and {len(rows) - STAGES} more groups of ranks"
    mesh = saved.stages[0].mesh
    for axis, size in mesh.axes:
        if size > 1:
            group = mesh.group((axis,), mesh.offset)
            members = " ".join(map(str, group[:8])) + (" …" if len(group) > 8 else "")
            unequal = ", in unequal shares" if isinstance(size, Shares) else ""
            if size < mesh.size or unequal:
                yield f"  {axis}={size}: ranks {members}{unequal}, and so on"


def _storage(saved: Saved) -> Iterator[Block]:
    """Parameters that rest alike, by the bytes of their shards on a rank of the stage that has most of them."""
    kinds: dict[tuple[str, str], dict[str, ParameterFacts]] = defaultdict(dict)
    held: dict[tuple[str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for number, stage in enumerate(saved.stages):
        for name, row in stage.parameters.items():
            state = _sharding(row.gradient_and_optimizer) if row.trained else "(not trained)"
            kinds[_sharding(row.stored), state][name] = row
            held[_sharding(row.stored), state][number] += row.local_bytes
    yield ""
    yield Heading("what is where")
    if not kinds:
        yield "  no parameters"
        return
    ranked = sorted(kinds.items(), key=lambda kind: -max(held[kind[0]].values()))
    rows = []
    for (stored, state), members in ranked[:KINDS]:
        first = next(iter(members))
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        rows.append((stored, state, size_text(max(held[stored, state].values())), first + more))
    yield Table(("stored", "gradient and optimizer", "per rank", "parameters"), rows, (2,), indent=2)
    if len(ranked) > KINDS:
        yield f"  … and {len(ranked) - KINDS} more kinds of storage"


def _sharding(spec: str) -> str:
    """A spec without its dtype and its sizes: `f32[64@dp.tp, 16]` as `[@dp.tp, .]`."""
    _, bracket, rest = spec.partition("[")
    if not bracket:
        return spec
    dims, _, after = rest.partition("]")
    shown = (f"@{dim.partition('@')[2]}" if "@" in dim else "." for dim in dims.split(", ") if dim)
    return f"[{', '.join(shown)}]{after}"


def _messages(saved: Saved) -> Iterator[Block]:
    totals: dict[tuple[str, str], list[Collective]] = defaultdict(list)
    for stage in saved.stages:
        for one in stage.collectives:
            totals[one.kind, one.axis].append(one)
    between = Counter(transfer.kind for transfer in saved.program.transfers)
    yield ""
    yield Heading(f"messages of a step, {time_text(saved.program.predicted.comm_time_s)} predicted")
    if not totals and not between:
        yield "  none"
    ranked = sorted(totals.items(), key=lambda kind: -sum(one.time_s for one in kind[1]))
    rows = []
    for (kind, axis), ones in ranked[:MESSAGES]:
        largest = max(ones, key=lambda one: one.times * one.nbytes)
        what = " ".join(largest.what.split())
        nbytes, seconds = sum(one.times * one.nbytes for one in ones), sum(one.time_s for one in ones)
        times = str(sum(one.times for one in ones))
        rows.append(
            (kind, axis, times, size_text(nbytes), time_text(seconds), what if len(what) <= 60 else what[:59] + "…")
        )
    if rows:
        yield Table(("kind", "axis", "times", "bytes", "seconds", "most of it"), rows, (2, 3, 4), indent=2)
    if len(ranked) > MESSAGES:
        yield f"  … and {len(ranked) - MESSAGES} more kinds"
    if between:
        sent = sum(transfer.nbytes for transfer in saved.program.transfers)
        yield f"  between stages: {between.total()} transfers, {size_text(sent)} per microbatch"
