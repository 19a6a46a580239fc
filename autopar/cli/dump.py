"""`autopar-dump OUT`: what a saved program is, from its plan.json and program.json.

autopar-dump OUT                         everything: plan, mesh, calls, sharded graph, schedule, collectives, parameters
autopar-dump OUT --section collectives   one part
autopar-dump OUT --section schedule      the pipeline as a Gantt chart
autopar-dump OUT --section memory        bytes by kind, and what keeping less for backward would cost
autopar-dump OUT --rank 3                the code of rank 3
autopar-dump OUT --format dot | dot -Tsvg > graph.svg
autopar-dump OUT --format svg > schedule.svg
autopar-dump OUT --section memory --format svg > memory.svg
autopar-dump OUT --format chrome-trace > trace.json      for Perfetto
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from autopar.codegen.curve import curve_svg
from autopar.codegen.gantt import svg, text_gantt
from autopar.costmodel.simulate import Timeline, simulate
from autopar.errors import AutoparError, InputError
from autopar.ir.actions import StageGraph, parse_row
from autopar.ir.mesh import Mesh
from autopar.ir.text import size_text, time_text

Facts = dict[str, Any]
VERSION = 2


def read(directory: Path) -> tuple[Facts, Facts]:
    """(program.json, plan.json). Raises InputError when the directory is none that autopar wrote."""
    if not directory.is_dir():
        raise InputError(f"{directory} is no directory; give one that program.save(…) wrote")
    found = []
    for name in ("program.json", "plan.json"):
        try:
            found.append(json.loads((directory / name).read_text()))
        except FileNotFoundError:
            raise InputError(
                f"{directory} is not an autopar directory: it has no {name}; write one with program.save({str(directory)!r})"
            ) from None
        except ValueError as error:
            raise InputError(f"{directory / name} is damaged ({error}); save the program again") from None
    program, plan = found
    if not isinstance(program, dict) or program.get("autopar_program") != VERSION or "stages" not in plan:
        raise InputError(f"{directory} was written by another version of autopar; save the program again")
    return program, plan


# --- text -------------------------------------------------------------------------------------------------------------


def plan_lines(program: Facts, plan: Facts) -> Iterator[str]:
    """Who decided, what is expected, the mesh, and every op's strategy."""
    solver, predicted = program["solver"], program["predicted"]
    kind = "training" if program["training"] else "inference"
    pieces = f", {program['microbatches']} microbatches" if program["microbatches"] > 1 else ""
    yield f"{program['model']}, {kind} on {program['ranks']} ranks of {program['cluster']}{pieces}"
    yield f"chosen by {program['origin']} ({solver['method']}, gap {solver['gap']:.2%})"
    yield (
        f"predicted: step {time_text(predicted['step_time_s'])}, communication {time_text(predicted['comm_time_s'])}, "
        f"peak {size_text(predicted['peak_bytes'])} per rank"
    )
    for other in program["alternatives"]:
        yield f"instead of {other['name']}: step {time_text(other['step_time_s'])}, {size_text(other['peak_bytes'])} held"
    for stage in plan["stages"]:
        mesh = Mesh(tuple(stage["mesh"].items()), stage["first_rank"])
        yield f"mesh {mesh}"
        for axis, size in mesh.axes:
            groups = sorted({mesh.group((axis,), rank) for rank in range(mesh.offset, mesh.offset + mesh.size)})
            shown = " | ".join(" ".join(map(str, ranks)) for ranks in groups[:8]) + (" | …" if len(groups) > 8 else "")
            yield f"  {axis}={size}: ranks {shown}"
        for name, template in stage["templates"].items():
            chosen = {op: strategy for op, strategy in template["strategies"].items() if strategy}
            yield f"strategies of {name} (axis=index of the op; {len(template['strategies']) - len(chosen)} ops run whole)"
            width = max(map(len, chosen), default=0)
            yield from (f"  {op:{width}}  {strategy}" for op, strategy in chosen.items())


def call_lines(program: Facts, plan: Facts) -> Iterator[str]:
    """Calls of templates in order, runs of one template in one line."""
    del plan
    for stage in program["stages"]:
        for name, spec in stage["inputs"].items():
            yield f"input {name}: {spec}"
    calls = program["calls"]
    start = 0
    for i in range(1, len(calls) + 1):
        if i == len(calls) or calls[i]["template"] != calls[start]["template"]:
            paths = [c["path"] for c in calls[start:i] if c["path"]]
            where = f"  {paths[0]}" + (f" … {paths[-1]}" if len(paths) > 1 else "") if paths else ""
            numbers = str(start) if i == start + 1 else f"{start}–{i - 1}"
            yield f"{numbers:>7}  {calls[start]['template']}{where}"
            start = i
    for stage in program["stages"]:
        for name, spec in stage["outputs"].items():
            yield f"output {name}: {spec}"


def graph_lines(program: Facts, plan: Facts) -> Iterator[str]:
    """Every template's functions, a line per value."""
    del plan
    counts: dict[str, int] = {}
    for call in program["calls"]:
        counts[call["template"]] = counts.get(call["template"], 0) + 1
    seen: dict[str, str] = {}
    for number, stage in enumerate(program["stages"]):
        head = f"stage {number}: " if len(program["stages"]) > 1 else ""
        for name, template in stage["templates"].items():
            text = json.dumps(template)
            if seen.get(name) == text:
                yield f"{head}{name} as before"
                continue
            seen[name] = text
            for kind, function in template["functions"].items():
                times = f", {counts.get(name, 0)} calls" if kind == "forward" else ""
                yield f"{head}{name} {kind}{times}"
                yield from _function(function["arguments"], function["lines"], function["results"])
        for kind, function in stage["functions"].items():
            yield f"{head}{kind}"
            yield from _function(function["arguments"], function["lines"], function["results"])


def _function(arguments: dict[str, str], lines: list[Facts], results: list[str]) -> Iterator[str]:
    yield from (f"  {name}: {spec}" for name, spec in arguments.items())
    source = ""
    for line in lines:
        if line["source"] and line["source"] != source:
            source = line["source"]
            yield f"  # {' '.join(source.split())}"
        made = ", ".join(line["out"])
        axis = f", {line['axis']}" if line["axis"] else ""
        specs = ", ".join(s for s in line["specs"] if s)
        text = f"{_short(line['op'])}({', '.join(line['reads'])}{axis})"
        yield f"  {made} = {text}" + (f"  {specs}" if specs else "") if made else f"  {text}"
    yield f"  return {', '.join(results)}"


def _short(op: str) -> str:
    return op.removeprefix("aten.").removeprefix("autopar.").removesuffix(".default")


def collective_lines(program: Facts, plan: Facts) -> Iterator[str]:
    """A row per collective: how often a step runs it, over which axis, bytes of the full array, seconds in all."""
    del plan
    rows = sorted(
        (c for stage in program["stages"] for c in stage["collectives"]), key=lambda c: -c["times"] * c["nbytes"]
    )
    if not rows:
        yield "none"
        return
    total = sum(c["times"] * c["nbytes"] for c in rows)
    yield (
        f"{sum(c['times'] for c in rows)} per step, {size_text(total)}, predicted {time_text(sum(c['time_s'] for c in rows))}"
    )
    table = [("times", "kind", "axis", "bytes each", "seconds", "what")]
    table += [
        (
            str(c["times"]),
            c["kind"],
            c["axis"],
            size_text(c["nbytes"]),
            time_text(c["time_s"]),
            " ".join(c["what"].split()),
        )
        for c in rows
    ]
    yield from _columns(table)


def parameter_lines(program: Facts, plan: Facts) -> Iterator[str]:
    """A row per parameter: how it is stored, how gradient and optimizer state are."""
    del plan
    rows: dict[str, Facts] = {}
    for number, stage in enumerate(program["stages"]):
        held = sum(row["local_bytes"] for row in stage["parameters"].values())
        head = f"stage {number}: " if len(program["stages"]) > 1 else ""
        yield f"{head}{len(stage['parameters'])} parameters, {size_text(held)} stored per rank"
        rows |= {name: row for name, row in stage["parameters"].items() if name not in rows}
    table = [("parameter", "stored", "gradient and optimizer state", "bytes per rank")]
    for name, row in rows.items():
        state = row["gradient_and_optimizer"] if row["trained"] else "(not trained)"
        table.append((name, row["stored"], state, size_text(row["local_bytes"])))
    yield from _columns(table)


def schedule_lines(program: Facts, plan: Facts) -> Iterator[str]:
    """The step as a Gantt chart, and what travels between the stages."""
    schedule = program["schedule"]
    yield f"{schedule['name']}, {program['microbatches']} microbatches, {len(program['stages'])} stages"
    yield from text_gantt(timeline_of(program)).splitlines()
    for group, (stages, peak) in enumerate(zip(schedule["groups"], schedule["peaks"], strict=True)):
        first = program["stages"][stages[0]]
        mesh = Mesh(tuple(first["mesh"].items()), first["first_rank"])
        calls = ", ".join(f"{plan['stages'][s]['calls'][0]}–{plan['stages'][s]['calls'][1] - 1}" for s in stages)
        yield (
            f"group {group}: stages {', '.join(map(str, stages))} (calls {calls}) on ranks {mesh.offset} to "
            f"{mesh.offset + mesh.size - 1}, {mesh}; peak {size_text(peak)} per rank"
        )
    for t in program["transfers"]:
        ends = f"stage {t['source']} {t['from']} -> stage {t['target']} {t['to']}"
        yield f"{t['kind']} {t['name']}: {ends}, {size_text(t['bytes'])}"
    for name, stages in program["shared"].items():
        yield f"{name} lives in stages {', '.join(map(str, stages))}, owned by {stages[0]}"


def memory_lines(program: Facts, plan: Facts) -> Iterator[str]:
    """Bytes per rank by kind, and what keeping less for backward would cost."""
    yield f"peak {size_text(program['peak_bytes'])} per rank"
    curves = program.get("recompute") or [None] * len(program["stages"])
    for number, (stage, curve) in enumerate(zip(program["stages"], curves, strict=True)):
        kinds = ", ".join(f"{kind} {size_text(n)}" for kind, n in stage["resting"].items() if n)
        yield f"stage {number}: {kinds}; a microbatch keeps {size_text(stage['held_bytes'])}"
        if curve is not None:
            places = {**curve["policies"], "the plan": curve["chosen"]}
            yield from _columns(
                [
                    ("recompute", "kept", "made again"),
                    *((name, size_text(b), time_text(s)) for name, (b, s) in places.items()),
                ]
            )


def timeline_of(program: Facts) -> Timeline:
    """The predicted timeline of a saved program, simulated again."""
    schedule = program["schedule"]
    gradients = schedule["gradients"]
    graph = StageGraph(
        tuple(map(tuple, schedule["groups"])),
        tuple(map(tuple, schedule["edges"])),
        None if gradients is None else tuple(map(tuple, gradients)),
    )
    seconds = {(stage, kind): s for stage, kind, s in schedule["seconds"]}
    between = {(u, v): s for u, v, s in schedule["hand_over"]}
    return simulate(tuple(map(parse_row, schedule["table"])), graph, seconds, between)


def _columns(table: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        yield "  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


SECTIONS: dict[str, Callable[[Facts, Facts], Iterator[str]]] = {
    "plan": plan_lines,
    "calls": call_lines,
    "graph": graph_lines,
    "schedule": schedule_lines,
    "collectives": collective_lines,
    "parameters": parameter_lines,
    "memory": memory_lines,
}


# --- json and dot -----------------------------------------------------------------------------------------------------


def as_json(program: Facts, plan: Facts, sections: Sequence[str]) -> str:
    """The chosen sections as one object."""
    parts: dict[str, Any] = {
        "plan": {"plan": plan, **{k: program[k] for k in ("solver", "predicted", "alternatives", "timings", "memory")}},
        "calls": {"calls": program["calls"], **{k: [s[k] for s in program["stages"]] for k in ("inputs", "outputs")}},
        "graph": [{k: s[k] for k in ("templates", "functions")} for s in program["stages"]],
        "schedule": {k: program[k] for k in ("schedule", "transfers", "shared")},
        "collectives": [c for s in program["stages"] for c in s["collectives"]],
        "memory": {
            "peak_bytes": program["peak_bytes"],
            "recompute": program.get("recompute", []),
            "stages": [{k: s[k] for k in ("resting", "held_bytes")} for s in program["stages"]],
        },
        "parameters": {n: row for s in program["stages"] for n, row in s["parameters"].items()},
    }
    head = {k: program[k] for k in ("model", "training", "ranks", "microbatches", "torch")}
    head["mesh"] = program["stages"][0]["mesh"]
    return json.dumps({**head, **{name: parts[name] for name in sections}}, indent=1)


def as_dot(program: Facts) -> str:
    """Graphviz: a cluster per function, a node per line (collectives filled), edges labelled with specs."""
    lines = ["digraph program {", "  rankdir=TB; node [shape=box, fontname=monospace, fontsize=10];"]
    seen: set[str] = set()
    for number, stage in enumerate(program["stages"]):
        for name, template in stage["templates"].items():
            if (text := json.dumps([name, template])) in seen:
                continue
            seen.add(text)
            prefix = f"stage_{number}_{name}" if len(program["stages"]) > 1 else name
            for kind, function in template["functions"].items():
                lines += _cluster(f"{prefix}_{kind}", function["arguments"], function["lines"])
    return "\n".join([*lines, "}"])


def _cluster(name: str, arguments: dict[str, str], rows: list[Facts]) -> list[str]:
    lines = [f"  subgraph {_quoted('cluster_' + name)} {{", f"    label={_quoted(name)};"]
    made: dict[str, tuple[str, str]] = {}
    for argument, spec in arguments.items():
        made[argument] = (f"{name}/{argument}", spec)
        lines.append(f"    {_quoted(made[argument][0])} [label={_quoted(argument)}, shape=ellipse];")
    edges = []
    for i, row in enumerate(rows):
        node = f"{name}/{i}"
        filled = ", style=filled, fillcolor=lightsalmon" if row["axis"] else ""
        label = _short(row["op"]) + (f" over {row['axis']}" if row["axis"] else "")
        lines.append(f"    {_quoted(node)} [label={_quoted(label)}{filled}];")
        for read in row["reads"]:
            if read not in made:
                made[read] = (f"{name}/{read}", "saved by forward")
                lines.append(f"    {_quoted(made[read][0])} [label={_quoted(read)}, shape=ellipse, style=dashed];")
            edges.append(
                f"    {_quoted(made[read][0])} -> {_quoted(node)} [label={_quoted(made[read][1])}, fontsize=8];"
            )
        for k, out in enumerate(row["out"]):
            made[out] = (node, row["specs"][k] if k < len(row["specs"]) else "")
    return [*lines, *edges, "  }"]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _memory_svg(program: Facts) -> str:
    if not program.get("recompute"):
        raise InputError("--section memory --format svg shows what recompute costs; this program has no backward")
    return curve_svg(program["recompute"], f"{program['model']}: what keeping less costs in a step", size_text)


# --- one rank ---------------------------------------------------------------------------------------------------------


def rank_code(directory: Path, program: Facts, rank: int) -> str:
    """What rank `rank` runs. Raises InputError when there is no such rank."""
    if not 0 <= rank < program["ranks"]:
        raise InputError(f"--rank {rank}: the program has ranks 0 to {program['ranks'] - 1}")
    own = directory / "ranks" / f"rank_{rank}.py"
    parts = [own] if own.exists() else []
    stages = program["stages"]
    parts += [
        directory / "stages" / f"stage_{i}.py"
        for i, s in enumerate(stages)
        if s["first_rank"] <= rank < s["first_rank"] + math.prod(s["mesh"].values())
    ]
    return "\n".join(f"# --- {p.relative_to(directory)}\n{p.read_text()}" for p in parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 when the directory or an argument is wrong."""
    parser = argparse.ArgumentParser(
        prog="autopar-dump", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="what program.save(…) wrote")
    parser.add_argument("--format", choices=("text", "json", "dot", "svg", "chrome-trace"), default="text")
    parser.add_argument("--section", choices=tuple(SECTIONS), action="append", help="only this; may be given again")
    parser.add_argument("--rank", type=int, help="the code of this rank instead")
    args = parser.parse_args(argv)
    try:
        program, plan = read(args.directory)
        sections = args.section or list(SECTIONS)
        if args.rank is not None:
            text = rank_code(args.directory, program, args.rank)
        elif args.format == "json":
            text = as_json(program, plan, sections)
        elif args.format == "dot":
            text = as_dot(program)
        elif args.format == "svg":
            text = _memory_svg(program) if sections == ["memory"] else svg(timeline_of(program))
        elif args.format == "chrome-trace":
            text = timeline_of(program).chrome_trace()
        else:
            text = "\n\n".join(
                f"{name}\n" + "\n".join(f"  {s}" for s in SECTIONS[name](program, plan)) for name in sections
            )
        print(text)
    except BrokenPipeError:
        sys.stderr.close()
    except AutoparError as error:
        print(f"autopar-dump: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
