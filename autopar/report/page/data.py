"""Everything on the page of a program, from its facts and its plan; a saved directory has both, so there is one way.

Amounts are texts, made by the functions that make those of `ParallelProgram.report()`, so that both say the same. Layers,
stages and ranks that are alike are told once, and the page does not grow with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import InfeasibleError
from autopar.ir.text import size_text, time_text
from autopar.plan import Plan
from autopar.report.answer import CAUSES, rate_text, shown_parts
from autopar.report.page.answers import AdviceShown, Refused, WhatIf, advice_of, refused_of, what_if_of
from autopar.report.page.lanes import Schedule, schedule
from autopar.report.page.machines import Placed, placed
from autopar.report.page.shown import Bar, Figure, Table, bar, runs, share_text, span_text
from autopar.report.page.tree import Blocks, blocks
from autopar.report.page.worst import worst_bytes, worst_rows, worst_table
from autopar.report.predicted_vs_measured import Profile, action_rows, message_rows
from autopar.report.program_facts import ProgramFacts

MOST_ROWS = 64


@dataclass(frozen=True)
class PageData:
    """The page. refused: why the plan does not fit (None: it does); measured: a run's tables beside the prediction (none: no
    profile was given)."""

    title: str
    about: str
    refused: Refused | None
    figures: tuple[Figure, ...]
    time: Bar
    hidden: str
    messages: Table
    memory: Bar
    room: Table
    modules: Table
    levers: Table | None
    machines: Placed
    model: Blocks
    schedule: Schedule
    others: Table
    what_if: WhatIf | None
    advice: AdviceShown | None
    measured: tuple[Table, ...]
    found: Table
    steps: Table | None


def page_data(
    program: ProgramFacts,
    plan: Plan,
    profile: Profile | None = None,
    *,
    what_if: Iterable[Mapping[str, Any]] = (),
    advice: Mapping[str, Any] | None = None,
    refused: InfeasibleError | None = None,
) -> PageData:
    """The page of a program. profile: a recorded run; what_if, advice: as of `answers`; refused: why nothing fits, where the plan
    is the smallest one. Raises InputError for answers that lack a field."""
    kind = "training" if program.training else "inference"
    why = refused_of(program.room, refused)
    tree = blocks(program, plan, worst_bytes(program, plan))
    timeline = program.schedule.timeline()
    return PageData(
        f"{program.model}: the plan",
        f"{program.model}, {kind} on {program.ranks:,} ranks of {program.cluster}: {plan.show_meshes()}",
        why,
        tuple(_figures(program, why is not None)),
        bar("What a step is spent on", shown_parts(program.spent), time_text, idle=(CAUSES["idle_s"],)),
        _hidden(program),
        _messages(program),
        bar(
            "Memory of the fullest rank at its worst moment",
            ((k, v) for k, v in program.memory.items() if v >= 0.5),
            size_text,
        ),
        _room(program),
        worst_table(program, worst_rows(program, tree)),
        _levers(program),
        placed(program, plan),
        tree,
        schedule(program, plan, timeline),
        _others(program),
        what_if_of(what_if),
        advice_of(advice),
        () if profile is None else tuple(_measured(program, profile)),
        _found(program, plan),
        _steps(program),
    )


def _figures(program: ProgramFacts, refused: bool) -> Iterator[Figure]:
    """The answer. refused: the plan does not fit, which comes first then."""
    predicted, work, room = program.predicted, program.work, program.room
    share = f"{room.needed_bytes / room.device_bytes:.0%} of {size_text(room.device_bytes)}"
    if refused:
        short = f"no, {size_text(-room.free_bytes)} short" if room.free_bytes < 0 else "no"
        yield Figure("Fits", short, share, True)
        yield Figure("Step", time_text(predicted.step_time_s), "if memory were enough")
    else:
        yield Figure("Step", time_text(predicted.step_time_s), f"communication {time_text(predicted.comm_time_s)}")
    if work.tokens_per_s is not None:
        yield Figure("Throughput", rate_text(work.tokens_per_s), f"{work.tokens:,} tokens a step")
    if work.mfu is not None:
        yield Figure("MFU", share_text(work.mfu), "of the devices' peak")
    yield Figure("Peak memory", size_text(predicted.peak_bytes), "tensors of the fullest rank")
    if not refused:
        yield Figure("Fits", f"yes, {size_text(room.free_bytes)} free", share)
    if work.batch is not None:
        pieces = f"{program.microbatches:,} microbatches" if program.microbatches > 1 else "at once"
        yield Figure("Batch", f"{work.batch:,}", pieces)
    yield Figure("Devices", f"{work.devices:,}", room.device)


def _hidden(program: ProgramFacts) -> str:
    """A sentence about messages that add nothing to the step."""
    shown_s = program.spent.messages_s + program.spent.gradients_s
    by_stage = [sum(one.time_s for one in stage.collectives) for stage in program.stages]
    all_s = max(sum(by_stage[s] for s in group) for group in program.schedule.graph.groups)
    hidden_s = max(all_s - shown_s, 0.0)
    return (
        f"Messages of the ranks that send most take {time_text(all_s)} in a step; {time_text(shown_s)} of "
        f"messages add to the step, and {time_text(hidden_s)} are hidden behind work."
    )


def _messages(program: ProgramFacts) -> Table:
    """Messages by kind and axis, as the report counts them."""
    totals: dict[tuple[str, str], list[float]] = {}
    for one in (c for stage in program.stages for c in stage.collectives):
        row = totals.setdefault((one.kind, one.axis), [0.0, 0.0, 0.0])
        for place, value in enumerate((one.times, one.times * one.nbytes, one.time_s)):
            row[place] += value
    rows = tuple(
        (kind, axis, f"{int(times):,}", size_text(nbytes), time_text(seconds))
        for (kind, axis), (times, nbytes, seconds) in sorted(totals.items(), key=lambda item: -item[1][2])
    )
    return Table("Collectives of a step, of all stages", ("Kind", "Axis", "Times", "Bytes", "Seconds"), rows, 2)


def _room(program: ProgramFacts) -> Table:
    """The device's memory against what is needed of it."""
    room = program.room
    needed = room.needed_bytes - sum(room.causes.values())
    rows = [("tensors", size_text(needed))]
    rows += [(cause, size_text(nbytes)) for cause, nbytes in room.causes.items() if nbytes >= 0.5]
    rows += [("needed", size_text(room.needed_bytes)), (f"memory of {room.device}", size_text(room.device_bytes))]
    rows += [("free" if room.free_bytes >= 0 else "short", size_text(abs(room.free_bytes)))]
    return Table("Room on the fullest device", ("What", "Bytes"), tuple(rows))


def _levers(program: ProgramFacts) -> Table | None:
    """Recomputation: what keeping less for backward would cost."""
    rows = []
    for first, last in runs(program.recompute, repr):
        curve = program.recompute[first]
        for name, (nbytes, seconds) in {**curve.policies, "this plan": curve.chosen}.items():
            rows.append((span_text(first, last), name, size_text(nbytes), time_text(seconds)))
    if not rows:
        return None
    head = ("Stages", "Recompute", "Kept by a microbatch", "Made again, a step")
    return Table("What keeping less for backward would cost", head, tuple(rows[:MOST_ROWS]), 2)


def _others(program: ProgramFacts) -> Table:
    """Plans that were looked at."""
    own = program.predicted
    rows = [("this plan", time_text(own.step_time_s), "", size_text(own.peak_bytes), "chosen")]
    for other in program.alternatives:
        more = f"{other.step_time_s / own.step_time_s - 1:+.1%}" if own.step_time_s else ""
        rows.append((other.name, time_text(other.step_time_s), more, size_text(other.peak_bytes), other.reason))
    head = ("Plan", "Step", "Against this", "Held per rank", "Why it lost")
    return Table("Plans that were looked at", head, tuple(rows))


def _measured(program: ProgramFacts, profile: Profile) -> Iterator[Table]:
    """A recorded run beside its prediction."""

    def ratio(measured_s: float, predicted_s: float) -> str:
        return f"{measured_s / predicted_s:.2f}" if predicted_s > 0 else "–"

    expected_s = program.predicted.step_time_s
    rows = [("step", time_text(expected_s), time_text(profile.step_s), ratio(profile.step_s, expected_s))]
    for one in action_rows(program, profile)[:MOST_ROWS]:
        what = "once a step" if one.kind == "once" else f"{one.kind}, one microbatch"
        times = (time_text(one.predicted_s), time_text(one.measured_s), ratio(one.measured_s, one.predicted_s))
        rows.append((f"stage {one.stage}: {what}", *times))
    caption = f"{profile.steps} steps on {len(profile.ranks)} ranks beside the prediction"
    yield Table(caption, ("What", "Predicted", "Measured", "Ratio"), tuple(rows))
    sent = tuple(
        (
            f"{row.kind} over {row.axis}",
            str(row.predicted or "–"),
            str(row.measured or "–"),
            time_text(row.measured.waited_s) if row.measured else "–",
        )
        for row in message_rows(program, profile)
    )
    yield Table("Messages of a rank in a step", ("Kind", "Predicted", "Measured", "Waited for"), sent)


def _found(program: ProgramFacts, plan: Plan) -> Table:
    """How the plan was found, and what it was made with."""
    solver = program.solver
    gap = "unknown" if solver.gap is None else f"{solver.gap:.2%}"
    rows = [
        ("chosen by", f"{program.origin} ({solver.method})"),
        ("distance from a bound that no plan is below", gap),
        ("variables, before and after reduction", f"{solver.variables_before:,} and {solver.variables_after:,}"),
        ("precision", plan.precision or "as the model is"),
    ]
    rows += [(f"seconds to {name.removesuffix('_s')}", f"{s:.2f} s") for name, s in program.timings.items()]
    if solver.left_out:
        rows.append(("not looked at, as the search was ended", ", ".join(solver.left_out)))
    if program.long_run:
        every, goodput = program.long_run.save_every, program.long_run.goodput
        rows.append(("failures", f"save every {every} steps; {goodput:.1%} of the time is work that stays"))
    rows.append(("made with", f"torch {program.torch}, Python {program.python}"))
    return Table("The search, and what it was made with", ("What", "Answer"), tuple(rows), 2)


def _steps(program: ProgramFacts) -> Table | None:
    """Steps for batches of other shapes, and the other entries."""
    rows = []
    for name, forms in {"buckets": program.buckets, **program.entries}.items():
        for form in forms:
            rows.append((name, form.inputs, form.plan, time_text(form.step_time_s), size_text(form.peak_bytes)))
    if not rows:
        return None
    head = ("Step", "Inputs", "Plan", "Seconds", "Peak")
    return Table("Other steps over the same parameters", head, tuple(rows), 3)
