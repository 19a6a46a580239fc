"""Whether the search keeps its laws: no forced plan beats its choice, more never costs time, order never matters.

    python -m benchmarks.properties LINES.jsonl [--only PATTERN] [--count N] [--kind KIND] [--seconds S] [--drawn SEED]

A case is a model, a place and a question (`properties_cases.py`), and gives one line of the file; cases that the file has are
not run again. Models are on the meta device, and all is predicted, by the account that prices every plan. The last lines say:

    crashed   the cases that ended in an error that is none of the compiler's own
    regret    seconds of a step of the choice over those of the best plan under options that leave the search less, by family
    laws      of every law how far it is broken: `ratio` is the seconds of what should be no slower over those of the other

More devices are of a family that has the smaller number among them. With less memory, or slower devices or links, a step is no
faster. Nor is it under more options.
Another order of devices, number of processes or name of axes changes nothing. A search without time ("ended early")
gives a plan that fits, and the bound that it names is not above the best step known.

--only: part of a case's name; --kind: questions of a kind; --count: at most so many new cases, spread over all; --seconds: of
this process, after which no case begins; --drawn: cases of other models and places with options drawn at random
(`properties_drawn.py`), for which a file of its own is best. The exit status is 1 where a law is broken by more than the claim
allows, or a compile ends in an error that is none of the compiler's own.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

import autopar
from autopar.api import compile_request
from autopar.request import Request
from benchmarks import properties_drawn
from benchmarks.harness import command_line
from benchmarks.no_worse import limit_bytes
from benchmarks.properties_cases import CHOICE, WORKLOADS, Place, Question, Workload, cluster_at, questions

Line = dict[str, Any]
Compile = Callable[[Request], autopar.ParallelProgram]

MOST_REGRET, USUAL_REGRET, USUAL_SHARE = 1.02, 1.005, 0.95
"""No regret is to be above the first, and this share of them not above the second."""
MOST_BROKEN = 1.01
"""By how much a law may be broken, as a ratio."""


class Case(NamedTuple):
    """A question about a workload in a place."""

    workload: Workload
    place: Place
    question: Question

    @property
    def where(self) -> str:
        return f"{self.workload.name} on {self.place}"

    @property
    def name(self) -> str:
        return f"{self.where}: {self.question.name}"


def all_cases(seed: int | None = None) -> list[Case]:
    """Every case, of every place the choice first: of the list, or those that a seed draws."""
    of = questions if seed is None else partial(properties_drawn.questions, seed=seed)
    workloads = WORKLOADS if seed is None else properties_drawn.WORKLOADS
    return [
        Case(workload, place, question)
        for workload in workloads.values()
        for place in workload.places
        for question in of(workload, place)
    ]


def wanted(cases: Iterable[Case], done: set[str], only: str, kind: str, count: int | None) -> list[Case]:
    """The cases that are to be run, with the choice of every place that one of them needs. count: how many at most, spread over
    all in an order that is always the same."""
    cases = list(cases)
    chosen = [c for c in cases if only in c.name and c.question.kind.startswith(kind) and c.name not in done]
    spread = sorted(chosen, key=lambda c: zlib.crc32(c.name.encode()))[:count]
    places = {(c.workload.name, c.place): c for c in spread}.values()
    needed = {c.name: c for c in spread} | {
        first.name: first for c in places if (first := c._replace(question=CHOICE)).name not in done
    }
    order = {name: i for i, name in enumerate(dict.fromkeys(c.workload.name for c in cases))}
    return sorted(
        needed.values(), key=lambda c: (order[c.workload.name], c.place, c.question != CHOICE, c.question.name)
    )


# --- one case


def request_of(workload: Workload) -> Request:
    """The request of a workload, whatever the cluster."""
    with torch.device("meta"):
        model, batch, given = workload.make()
    given = {"loss_fn": None, "scheduler": None, "clip_grad_norm": None, "clip_grad_value": None} | given
    options = autopar.Options(solver_time_limit_s=600.0, explain_s=0.0)
    others = dict.fromkeys(("plan", "buckets", "pad_values"))
    return autopar.api.request_of(
        model, cluster_at(workload.places[0]), batch, loss_scaling=False, options=options, **given, **others
    )


def asked(request: Request, case: Case, peak_bytes: float | None) -> Request:
    """The request of a case. peak_bytes: of the choice in its place."""
    question = case.question
    options = replace(request.options, **question.options)
    if question.memory is not None:
        assert peak_bytes is not None
        options = replace(options, memory_bytes=question.memory * peak_bytes)
    return replace(request, cluster=question.cluster(cluster_at(case.place)), options=options)


def described(program: autopar.ParallelProgram) -> Line:
    """A program as the line of a case has it; seconds have all their digits."""
    return {
        "step_s": program.predicted.step_time_s,
        "peak_bytes": program.predicted.peak_bytes,
        "fits": program.predicted.peak_bytes <= limit_bytes(program) or not program.cluster.homogeneous_devices,
        "bound_s": program.predicted.step_time_s * (1 - program.solver.gap),
        "left_out": list(program.solver.left_out),
        "plan": f"{program.plan.origin} {program.plan.show_meshes()} M={program.plan.microbatches}",
        "schedule": program.plan.schedule,
        "ranks": program.plan.ranks,
        "pieces": max((t.pieces for s in program.plan.stages for t in s.templates.values()), default=1),
    }


def answered(case: Case, request: Request, compiled: Compile) -> tuple[Line, Compile]:
    """The line of a case, and how the next one is compiled. compiled: from what is known of the workload so far."""
    line: Line = {"case": case.name, "where": case.where, "family": case.workload.family, "place": list(case.place)}
    line |= {"workload": case.workload.name, "kind": case.question.kind, "question": case.question.name}
    line["options"] = dict(case.question.options)
    before = time.process_time()
    try:
        program = compiled(request)
        line |= described(program)
        compiled = program.compile_again
    except autopar.AutoparError as error:
        line["refused"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    except Exception as error:  # the line says so, no law holds with it, and the other cases are asked
        line["crashed"] = line["refused"] = f"{type(error).__name__}: {error}"[:300]
    return line | {"cpu_s": round(time.process_time() - before, 2)}, compiled


@mock.patch("time.monotonic", new=float)  # no deadline of a solver passes, however busy the machine is
def run_workload(names: Sequence[str], out: Path, until_s: float, seed: int | None = None) -> None:
    """Run cases of one workload, which share a capture, and append their lines. until_s: seconds since the epoch; seed: as of
    `all_cases`."""
    torch.set_num_threads(1)
    by_name = {case.name: case for case in all_cases(seed)}
    lines = {line["case"]: line for line in read(out)}
    request: Request | None = None
    compiled: Compile = compile_request
    for name in names:
        if time.time() > until_s:
            return
        case = by_name[name]
        choice = lines.get(case._replace(question=CHOICE).name, {})
        if case.question.memory is not None and "peak_bytes" not in choice:
            continue
        request = request or request_of(case.workload)
        lines[name], compiled = answered(case, asked(request, case, choice.get("peak_bytes")), compiled)
        with out.open("a") as file:
            file.write(json.dumps(lines[name], ensure_ascii=False) + "\n")
        said = lines[name].get("step_s") or lines[name]["refused"]
        print(f"{lines[name]['cpu_s']:6.1f} s  {name}  {said}", file=sys.stderr, flush=True)


def read(path: Path) -> list[Line]:
    """The lines of a file; none where there is no file."""
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


# --- the laws


def regrets(lines: Iterable[Line]) -> list[Line]:
    """The forced plans, each with the seconds of the choice over its own."""
    lines = list(lines)
    choices = {line["where"]: line.get("step_s", math.inf) for line in lines if line["kind"] == "choice"}
    return [
        {**line, "ratio": choices[line["where"]] / line["step_s"], "choice": choices[line["where"]]}
        for line in lines
        if line["kind"] == "forced" and line.get("fits") and line["where"] in choices
    ]


def broken_laws(lines: Iterable[Line]) -> list[Line]:
    """The pairs that a law orders: its law, cases, and the seconds of what should be no slower over those of the other."""
    planned = {line["case"]: line for line in lines if "step_s" in line}
    choices = {line["where"]: line for line in planned.values() if line["kind"] == "choice"}
    of_choices = (*_of_changes(planned, choices), *_of_devices(choices.values()))
    return [*of_choices, *_of_options(planned), *_ended_early(planned, choices)]


def _pair(law: str, better: Line, other: Line, ratio: float | None = None) -> Line:
    ratio = better["step_s"] / other["step_s"] if ratio is None else ratio
    return {"law": law, "case": other["case"], "beside": better["case"], "ratio": ratio, "family": other["family"]}


def _of_changes(planned: Mapping[str, Line], choices: Mapping[str, Line]) -> Iterator[Line]:
    for line in planned.values():
        law, choice = line["kind"], choices.get(line["where"])
        if law.startswith("same as "):
            choice, law = planned.get(f"{line['where']}: {law.removeprefix('same as ')}"), "same"
        if choice is None:
            continue
        if law in ("slower", "less memory"):
            yield _pair(law, choice, line)
        elif law == "same":
            slower, faster = sorted((choice, line), key=lambda one: -one["step_s"])
            yield _pair(law, slower, line, slower["step_s"] / faster["step_s"])


def _of_options(planned: Mapping[str, Line]) -> Iterator[Line]:
    """Options that say more than others, such as a pipeline's meshes beside its stages, leave the search less."""
    forced = [line for line in planned.values() if line["kind"] == "forced" and line["fits"]]
    for less in forced:
        for more in forced:
            asked, all_asked = less["options"].items(), more["options"].items()
            if less["where"] == more["where"] and len(asked) < len(all_asked) and asked <= all_asked:
                yield _pair("more options", less, more)


def _of_devices(choices: Iterable[Line]) -> Iterator[Line]:
    sizes: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for choice in choices:
        sizes[choice["workload"], choice["place"][0]].append(choice)
    for lines in sizes.values():
        lines.sort(key=lambda line: line["place"][1])
        for more, fewer in zip(lines[1:], lines, strict=False):
            yield _pair("more devices", more, fewer)


def _ended_early(planned: Mapping[str, Line], choices: Mapping[str, Line]) -> Iterator[Line]:
    best_s: dict[str, float] = {}
    for line in planned.values():
        if line["kind"] in ("choice", "forced") and line["fits"]:
            best_s[line["where"]] = min(best_s.get(line["where"], math.inf), line["step_s"])
    for line in planned.values():
        if line["kind"] == "ended early" and (choice := choices.get(line["where"])):
            ratio = line["bound_s"] / best_s[line["where"]] if line["left_out"] else 1.0
            yield _pair("ended early", choice, line, ratio if line["fits"] else math.inf)


def spread(ratios: Sequence[float]) -> dict[str, Any]:
    """How many ratios there are, and of them the median, the 95th percentile and the worst."""
    ordered = sorted(ratios)
    return {
        "cases": len(ordered),
        "median": round(statistics.median(ordered), 4),
        "p95": round(ordered[math.ceil(0.95 * len(ordered)) - 1], 4),
        "worst": round(ordered[-1], 4),
    }


def summary(lines: Sequence[Line]) -> dict[str, Any]:
    """Regrets by family and laws, with the cases that break them, the worst first; and whether all hold as claimed."""
    chosen, laws = regrets(lines), broken_laws(lines)
    found: dict[str, Any] = {"regret": {}, "laws": {}}
    for key, entries, table in (("family", chosen, "regret"), ("law", laws, "laws")):
        groups: dict[str, list[float]] = defaultdict(list)
        for entry in entries:
            groups[entry[key]].append(entry["ratio"])
        found[table] = {name: spread(ratios) for name, ratios in groups.items()}
    ratios = [entry["ratio"] for entry in chosen]
    found["all"] = spread(ratios) if ratios else {"cases": 0}
    worst = sorted((e for e in chosen if e["ratio"] > USUAL_REGRET), key=lambda e: -e["ratio"])
    found["regretted"] = {e["case"]: [round(e["ratio"], 4), e["plan"]] for e in worst}
    broken = sorted((e for e in laws if e["ratio"] > MOST_BROKEN), key=lambda e: -e["ratio"])
    found["broken"] = {e["case"]: [round(e["ratio"], 4), e["law"], e["beside"]] for e in broken}
    found["crashed"] = {line["case"]: line["crashed"] for line in lines if "crashed" in line}
    usual = sum(ratio <= USUAL_REGRET for ratio in ratios)
    regretless = max(ratios, default=1.0) <= MOST_REGRET and usual >= USUAL_SHARE * len(ratios)
    found["holds"] = regretless and not broken and not found["crashed"]
    return found


def main() -> None:
    """Run the cases that are left, and say what holds."""
    parser = command_line(__doc__)
    parser.add_argument("lines", type=Path, help="where every case has its line")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--kind", default="", help="questions of this kind: choice, forced, slower, …")
    parser.add_argument("--count", type=int, help="at most so many new cases")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no case begins")
    parser.add_argument(
        "--drawn", type=int, metavar="SEED", help="other models and places, options drawn by this number"
    )
    args = parser.parse_args()
    until_s = time.time() + args.seconds
    todo = wanted(all_cases(args.drawn), {line["case"] for line in read(args.lines)}, args.only, args.kind, args.count)
    names: dict[str, list[str]] = defaultdict(list)
    for case in todo:
        names[case.workload.name].append(case.name)
    for cases in names.values():
        with ProcessPoolExecutor(1, get_context("spawn")) as alone:
            alone.submit(run_workload, cases, args.lines, until_s, args.drawn).result()
    found = summary(read(args.lines))
    print(json.dumps(found, indent=1, ensure_ascii=False))
    sys.exit(not found["holds"])


if __name__ == "__main__":
    main()
