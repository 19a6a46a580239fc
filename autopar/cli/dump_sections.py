"""The sections of `autopar dump`: for each, what it prints for people and its part of the JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.cli.saved import Saved
from autopar.ir.mesh import Mesh
from autopar.ir.text import calls_text, short_op, size_text, time_text
from autopar.plan import show_strategy
from autopar.report.gantt import text_gantt
from autopar.report.program_facts import FunctionFacts, ParameterFacts, TemplateFacts
from autopar.report.table import Block, Heading, Table
from autopar.runtime.data.fields import to_data

Facts = dict[str, Any]


def plan_lines(saved: Saved) -> Iterator[str]:
    """Who decided, what is expected, the mesh, and every op's strategy."""
    program, plan = saved.program, saved.plan
    solver, predicted = program.solver, program.predicted
    kind = "training" if program.training else "inference"
    pieces = f", {program.microbatches} microbatches" if program.microbatches > 1 else ""
    yield f"{program.model}, {kind} on {program.ranks} ranks of {program.cluster}{pieces}"
    gap = "unknown" if solver.gap is None else f"{solver.gap:.2%}"
    yield f"chosen by {program.origin} ({solver.method}, gap {gap})"
    yield (
        f"predicted: step {time_text(predicted.step_time_s)}, communication {time_text(predicted.comm_time_s)}, "
        f"peak {size_text(predicted.peak_bytes)} per rank"
    )
    for other in program.alternatives:
        yield f"instead of {other.name}: step {time_text(other.step_time_s)}, {size_text(other.peak_bytes)} held"
    for name, forms in program.entries.items():
        for form in forms:
            yield f"entry {name}, {form.inputs}: {form.plan}; step {time_text(form.step_time_s)}"
    if plan.order:
        yield f"causal sequences in zigzag order of {2 * plan.order} chunks"
    for stage in plan.stages:
        mesh = stage.mesh
        yield f"mesh {mesh}"
        for axis, size in mesh.axes:
            groups = _first_groups(mesh, axis, 8)
            more = " | …" if len(groups) * size < mesh.size else ""
            yield f"  {axis}={size}: ranks {' | '.join(' '.join(map(str, ranks)) for ranks in groups)}{more}"
        for name, template in stage.templates.items():
            chosen = {
                op: show_strategy(strategy, mesh) for op, strategy in template.strategies.items() if any(strategy)
            }
            yield f"strategies of {name} (axis=index of the op; {len(template.strategies) - len(chosen)} ops run whole)"
            width = max(map(len, chosen), default=0)
            yield from (f"  {op:{width}}  {strategy}" for op, strategy in chosen.items())


def _first_groups(mesh: Mesh, axis: str, most: int) -> list[tuple[int, ...]]:
    """The first groups of ranks along an axis, in the order of their ranks."""
    groups: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for rank in range(mesh.offset, mesh.offset + mesh.size):
        if len(groups) == most:
            break
        if rank not in seen:
            groups.append(mesh.group((axis,), rank))
            seen.update(groups[-1])
    return groups


def call_lines(saved: Saved) -> Iterator[str]:
    """Calls of templates in order, runs of one template in one line."""
    program = saved.program
    for stage in saved.stages:
        for name, spec in stage.inputs.items():
            yield f"input {name}: {spec}"
    calls = program.calls
    start = 0
    for i in range(1, len(calls) + 1):
        if i == len(calls) or calls[i].template != calls[start].template:
            paths = [c.path for c in calls[start:i] if c.path]
            where = f"  {paths[0]}" + (f" … {paths[-1]}" if len(paths) > 1 else "") if paths else ""
            numbers = str(start) if i == start + 1 else f"{start}–{i - 1}"
            yield f"{numbers:>7}  {calls[start].template}{where}"
            start = i
    for stage in saved.stages:
        for name, spec in stage.outputs.items():
            yield f"output {name}: {spec}"


def graph_lines(saved: Saved) -> Iterator[str]:
    """Every template's functions, a line per value."""
    program = saved.program
    counts = Counter(call.template for call in program.calls)
    seen: dict[str, TemplateFacts] = {}
    for number, stage in enumerate(saved.stages):
        head = f"stage {number}: " if len(saved.stages) > 1 else ""
        for name, template in stage.templates.items():
            if seen.get(name) == template:
                yield f"{head}{name} as before"
                continue
            seen[name] = template
            for kind, function in template.functions.items():
                times = f", {counts[name]} calls" if kind == "forward" else ""
                yield f"{head}{name} {kind}{times}"
                yield from _function(function)
        for kind, function in stage.functions.items():
            yield f"{head}{kind}"
            yield from _function(function)


def _function(function: FunctionFacts) -> Iterator[str]:
    yield from (f"  {name}: {spec}" for name, spec in function.arguments.items())
    source = ""
    for line in function.lines:
        if line.source and line.source != source:
            source = line.source
            yield f"  # {' '.join(source.split())}"
        made = ", ".join(line.out)
        axis = f", {line.axis}" if line.axis else ""
        specs = ", ".join(s for s in line.specs if s)
        text = f"{short_op(line.op)}({', '.join(line.reads)}{axis})"
        yield f"  {made} = {text}" + (f"  {specs}" if specs else "") if made else f"  {text}"
        for sent in line.sent:
            behind = f", each behind {sent.behind:.0%} of the op's own work" if sent.behind else ""
            yield f"    sends {sent.times} × {sent.kind} of {size_text(sent.nbytes)} over {sent.axis}{behind}"
    yield f"  return {', '.join(function.results)}"


def collective_lines(saved: Saved) -> Iterator[Block]:
    """A row per collective: how often a step runs it, over which axis, bytes of the full array, seconds in all."""
    rows = sorted((c for stage in saved.stages for c in stage.collectives), key=lambda c: -c.times * c.nbytes)
    if not rows:
        yield "none"
        return
    total = sum(c.times * c.nbytes for c in rows)
    yield (
        f"{sum(c.times for c in rows)} per step, {size_text(total)}, predicted {time_text(sum(c.time_s for c in rows))}"
    )
    table = [("times", "kind", "axis", "bytes each", "seconds", "what")]
    table += [
        (str(c.times), c.kind, c.axis, size_text(c.nbytes), time_text(c.time_s), " ".join(c.what.split())) for c in rows
    ]
    yield _table(table, 0, 3, 4)
    for one in saved.program.by_node:
        yield f"inside nodes, then between them: {one.show()}"


def parameter_lines(saved: Saved) -> Iterator[Block]:
    """A row per parameter: how it is stored, how gradient and optimizer state are."""
    rows: dict[str, ParameterFacts] = {}
    for number, stage in enumerate(saved.stages):
        held = sum(row.local_bytes for row in stage.parameters.values())
        head = f"stage {number}: " if len(saved.stages) > 1 else ""
        yield f"{head}{len(stage.parameters)} parameters, {size_text(held)} stored per rank"
        rows |= {name: row for name, row in stage.parameters.items() if name not in rows}
    table = [("parameter", "stored", "gradient and optimizer state", "bytes per rank")]
    for name, row in rows.items():
        state = row.gradient_and_optimizer if row.trained else "(not trained)"
        table.append((name, row.stored, state, size_text(row.local_bytes)))
    yield _table(table, 3)


def schedule_lines(saved: Saved) -> Iterator[str]:
    """The step as a Gantt chart, and what travels between the stages."""
    program, plan = saved.program, saved.plan
    schedule = program.schedule
    yield f"{schedule.name}, {program.microbatches} microbatches, {len(program.stages)} stages"
    yield from text_gantt(saved.timeline()).splitlines()
    for (stage, kind), seconds in schedule.hidden.items():
        yield f"{kind} of stage {stage}: {time_text(seconds)} of messages hidden behind work"
    for group, (stages, peak) in enumerate(zip(schedule.graph.groups, schedule.peaks, strict=True)):
        mesh = saved.stages[stages[0]].mesh
        calls = ", ".join(calls_text(*plan.stages[s].calls) for s in stages)
        yield (
            f"group {group}: stages {', '.join(map(str, stages))} (calls {calls}) on ranks {mesh.offset} to "
            f"{mesh.offset + mesh.size - 1}, {mesh}; peak {size_text(peak)} per rank"
        )
    for t in program.transfers:
        ends = f"stage {t.source} {t.source_type} -> stage {t.target} {t.target_type}"
        yield f"{t.kind} {t.name}: {ends}, {size_text(t.nbytes)}"
    for name, stages in program.shared.items():
        yield f"{name} lives in stages {', '.join(map(str, stages))}, owned by {stages[0]}"


def memory_lines(saved: Saved) -> Iterator[Block]:
    """Bytes per rank by kind, and what keeping less for backward would cost."""
    program = saved.program
    yield f"peak {size_text(program.peak_bytes)} per rank"
    curves = program.recompute or (None,) * len(saved.stages)
    for number, (stage, curve) in enumerate(zip(saved.stages, curves, strict=True)):
        kinds = ", ".join(f"{kind} {size_text(n)}" for kind, n in stage.resting.items() if n)
        yield f"stage {number}: {kinds}; a microbatch keeps {size_text(stage.held_bytes)}"
        if curve is not None:
            places = {**curve.policies, "the plan": curve.chosen}
            rows = ((name, size_text(b), time_text(s)) for name, (b, s) in places.items())
            yield _table([("recompute", "kept", "made again"), *rows], 1, 2)


def _table(rows: Sequence[tuple[str, ...]], *right: int) -> Table:
    """A table under its first row. right: columns of numbers."""
    head, *others = rows
    return Table(head, others, right, indent=4)


@dataclass(frozen=True)
class Section:
    """lines: for people. facts: plain data for JSON, of program.json's with the plan's."""

    lines: Callable[[Saved], Iterator[Block]]
    facts: Callable[[Facts], Any]


def _some(facts: Facts, *keys: str) -> Facts:
    return {key: facts[key] for key in keys}


SECTIONS = {
    "plan": Section(
        plan_lines, lambda program: _some(program, "plan", "solver", "predicted", "alternatives", "timings", "memory")
    ),
    "calls": Section(
        call_lines,
        lambda program: {
            "calls": program["calls"],
            **{k: [stage[k] for stage in program["stages"]] for k in ("inputs", "outputs")},
        },
    ),
    "graph": Section(
        graph_lines, lambda program: [_some(stage, "templates", "functions") for stage in program["stages"]]
    ),
    "schedule": Section(schedule_lines, lambda program: _some(program, "schedule", "transfers", "shared")),
    "collectives": Section(
        collective_lines, lambda program: [c for stage in program["stages"] for c in stage["collectives"]]
    ),
    "parameters": Section(
        parameter_lines,
        lambda program: {name: row for stage in program["stages"] for name, row in stage["parameters"].items()},
    ),
    "memory": Section(
        memory_lines,
        lambda program: {
            **_some(program, "peak_bytes", "recompute"),
            "stages": [_some(stage, "resting", "held_bytes") for stage in program["stages"]],
        },
    ),
}


def blocks(saved: Saved, names: Sequence[str]) -> Iterator[Block]:
    """The chosen sections for people."""
    for n, name in enumerate(names):
        if n:
            yield ""
        yield Heading(name)
        for block in SECTIONS[name].lines(saved):
            yield f"  {block}" if isinstance(block, str) else block


def as_json(saved: Saved, names: Sequence[str]) -> str:
    """The chosen sections as one object."""
    program = {**to_data(saved.program), "plan": saved.plan.to_dict()}
    head = {**_some(program, "model", "training", "ranks", "microbatches", "torch"), "mesh": saved.stages[0].mesh.sizes}
    return json.dumps({**head, **{name: SECTIONS[name].facts(program) for name in names}}, indent=1)
