"""Whether the search chooses the fastest plan: its choice beside every plan of a stated space, measured, a JSON line a setting.

    python -m benchmarks.regret DIR [--only TEXT] [--seconds S] [--by COMMAND]

A setting is a model, the rate of the links between its ranks (`shaped.py`) and their number. Its space (`space`) is what options
force: data parallel, ZeRO-1 and -3, Megatron, the solver's plan on every mesh, pipelines with several schedules and numbers of
microbatches. The choice is that of `autopar.compile` without options, for the ranks as they were calibrated; the plans that
`program.save(candidates=3)` writes beside it are what `autopar-tune` would measure. Plans take turns in the same processes; those
that are clearly slower than the fastest soon leave.

    regret        median step of the choice over that of the fastest plan
    tuned_regret  the same of the fastest in every other turn among the choice and its candidates

DIR keeps a profile for each kind of ranks and `regret.jsonl`; settings that it has are not measured again. The last line says
all together. --by: what is timed is started by this command.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import autopar
from benchmarks.calibrated_models import Model, bags, conv, small_llama, tied, wide
from benchmarks.calibrated_plans import Case, Loaded, calibrate, cluster_of, compiled, timed, turn_s
from benchmarks.harness import as_worker, command_line, printed_object
from benchmarks.shaped import ranks_on

MODULE = "benchmarks.regret"
RESULTS, CHOSEN, CANDIDATES = "regret.jsonl", "chosen", 3
LEAVE = ((3, 1.3), (8, 1.12))
"""The turns after which a plan leaves whose median is so many times that of the fastest."""
WARM_UP = 4
"""Steps of every program that are not counted."""
SMALL_STEP_S = 0.25
"""Programs whose steps are shorter do two of them in a turn."""


class Setting(NamedTuple):
    """mbit: of the links between the ranks; None: as processes of one machine."""

    model: Model
    mbit: int | None
    ranks: int

    @property
    def where(self) -> str:
        return f"{self.ranks} ranks {'of one machine' if self.mbit is None else f'at {self.mbit} Mbit/s'}"

    @property
    def name(self) -> str:
        return f"{self.model.__name__} on {self.where}"


SETTINGS = (
    *(Setting(model, None, 2) for model in (wide, small_llama, conv, tied, bags)),
    *(Setting(model, 1000, 2) for model in (wide, small_llama, tied, bags)),
    *(Setting(model, 200, 2) for model in (small_llama, bags)),
    Setting(small_llama, None, 4),
    Setting(wide, 1000, 4),
)


def space(ranks: int) -> dict[str, dict[str, Any]]:
    """The plans that are measured for so many ranks: name, and the options that ask for one."""
    data, tensor = {"mesh": {"dp": ranks}}, {"mesh": {"tp": ranks}}
    plans: dict[str, dict[str, Any]] = {name: {**data, "strategy": name} for name in ("dp", "zero1", "zero3")}
    plans |= {"solver dp": data, "solver tp": tensor, "megatron": {**tensor, "strategy": "megatron"}}
    if ranks > 2:
        both = {"mesh": {"dp": ranks // 2, "tp": 2}}
        plans |= {"solver dp tp": both, "megatron dp tp": {**both, "strategy": "megatron"}}
    for schedule, pp, microbatches in (("1f1b", 2, 2), ("1f1b", 2, 4), ("gpipe", 2, 4), ("zb-h1", ranks, 4)):
        options = {"pp": pp, "microbatches": microbatches, "schedule": schedule}
        plans[f"{schedule} pp={pp} microbatches={microbatches}"] = options
    return plans


# --- one rank


def measure(directory: Path, names: Sequence[str], model: Model, seconds: float) -> dict[str, list[float]]:
    """Seconds of a step of every program in every turn that it was in, for about so many seconds."""
    batch, weights = model()[1], directory / CHOSEN / "weights"
    loaded = {name: Loaded(autopar.load(directory / name, weights=weights), batch) for name in names}
    for _ in range(WARM_UP):
        first = turn_s(loaded, 1)
    steps = 2 if statistics.median(first.values()) < SMALL_STEP_S else 1
    end = time.perf_counter() + seconds
    turns: dict[str, list[float]] = {name: [] for name in names}
    staying = list(names)
    while staying:
        for name, step_s in turn_s({name: loaded[name] for name in staying}, steps).items():
            turns[name].append(step_s)
        told = [staying_after(turns, staying) if time.perf_counter() < end else []]
        dist.broadcast_object_list(told)
        staying = told[0]
    return turns


def staying_after(turns: Mapping[str, Sequence[float]], staying: Sequence[str]) -> list[str]:
    """Who takes the next turn, in the other order: the choice, and who is not clearly slower than the fastest."""
    medians = {name: statistics.median(turns[name]) for name in staying}
    done = max(map(len, turns.values()))
    most = min((times for least, times in LEAVE if done >= least), default=float("inf")) * min(medians.values())
    return [name for name in reversed(staying) if medians[name] <= most or name == CHOSEN]


# --- a setting


def programs_of(setting: Setting, cluster: autopar.ClusterSpec, directory: Path) -> tuple[dict[str, float], list[str]]:
    """Writes the choice, its candidates and the space; predicted seconds by folder, and the plans that the model has not. Of
    plans with the same text one counts."""
    chosen = compiled(Case(setting.model, CHOSEN, {}), cluster)
    chosen.save(directory / CHOSEN, candidates=CANDIDATES)
    predicted_s = {CHOSEN: float(chosen.predicted.step_time_s)}
    for folder in sorted((directory / CHOSEN / "candidates").glob("*/")):
        facts = json.loads((folder / "program.json").read_text())
        predicted_s[str(folder.relative_to(directory))] = facts["predicted"]["step_time_s"]
    texts, refused = {text_of(directory / folder) for folder in predicted_s}, []
    for name, options in space(setting.ranks).items():
        try:
            program = compiled(Case(setting.model, name, options), cluster)
        except autopar.AutoparError as error:
            refused.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        program.save(directory / name)
        if text_of(directory / name) not in texts:
            texts.add(text_of(directory / name))
            predicted_s[name] = float(program.predicted.step_time_s)
    return predicted_s, refused


def text_of(folder: Path) -> str:
    """The text that a written program's ranks run."""
    return "".join(path.read_text() for path in (folder / "pipeline.py", *sorted((folder / "stages").glob("*.py"))))


def result(
    setting: Setting, predicted_s: Mapping[str, float], turns: Mapping[str, Sequence[float]], refused: Sequence[str]
) -> dict[str, Any]:
    """The line of a setting."""
    medians = {name: statistics.median(taken) for name, taken in turns.items()}
    fastest = min(medians, key=medians.__getitem__)
    tried = [name for name in turns if name.startswith(CHOSEN) and len(turns[name]) == len(turns[CHOSEN])]
    tuned = min(tried, key=lambda name: statistics.median(turns[name][::2]))
    return {
        "setting": setting.name,
        "plans": len(medians),
        "turns": len(turns[CHOSEN]),
        "fastest": fastest,
        "regret": round(medians[CHOSEN] / medians[fastest], 4),
        "tuned": tuned,
        "tuned_regret": round(medians[tuned] / medians[fastest], 4),
        "measured_s": {name: round(medians[name], 5) for name in sorted(medians, key=medians.__getitem__)},
        "predicted_s": {name: round(predicted_s[name], 5) for name in medians},
        "refused": list(refused),
    }


def summary(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The summary of all settings together."""
    regrets, tuned = ([line[key] for line in lines] for key in ("regret", "tuned_regret"))
    return {
        "settings": len(lines),
        "within_5_percent": sum(regret <= 1.05 for regret in regrets),
        "worst_regret": max(regrets),
        "tuned_within_5_percent": sum(regret <= 1.05 for regret in tuned),
        "worst_tuned_regret": max(tuned),
    }


def measured_settings(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The line of every setting that is asked for and not known."""
    known = {line["setting"] for line in lines_of(args.directory)}
    for number, setting in enumerate(SETTINGS):
        if args.only not in setting.name or setting.name in known:
            continue
        directory = args.directory / setting.name.replace("/", " in ")
        directory.mkdir(parents=True, exist_ok=True)
        profile = args.directory / f"{setting.where.replace('/', ' in ')}.json"
        if not profile.exists():
            timed(args.by, MODULE, [args.directory, "--calibrate", profile, "--number", number])
        predicted_s, refused = programs_of(setting, cluster_of(setting.ranks, profile), directory)
        (directory / "names.json").write_text(json.dumps(list(predicted_s)))
        timed(args.by, MODULE, [directory, "--time", "--number", number, "--seconds", args.seconds])
        yield result(setting, predicted_s, json.loads((directory / "turns.json").read_text()), refused)


def lines_of(directory: Path) -> list[dict[str, Any]]:
    """The lines that are known."""
    path = directory / RESULTS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = command_line(__doc__, keeps=True)
    parser.add_argument("--only", default="", help="settings whose names have this in them")
    parser.add_argument("--seconds", type=float, default=30.0, help="of turns, of one setting")
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--calibrate", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.number is not None:
        return timed_part(SETTINGS[args.number], args)
    torch.set_num_threads(1)
    args.directory.mkdir(parents=True, exist_ok=True)
    for line in measured_settings(args):
        with (args.directory / RESULTS).open("a") as results:
            results.write(json.dumps(line) + "\n")
        print(json.dumps(line), file=sys.stderr, flush=True)
    print(json.dumps(summary(lines_of(args.directory))))


def timed_part(setting: Setting, args: argparse.Namespace) -> None:
    """Calibrate the ranks of a setting, or time its programs in turns."""
    if args.worker:
        names = json.loads((args.directory / "names.json").read_text())
        return as_worker(functools.partial(measure, args.directory, names, setting.model, args.seconds))
    with ranks_on(setting.ranks, setting.mbit) as ranks:
        if args.calibrate:
            return calibrate(ranks, args.calibrate)
        worker = [str(args.directory), "--worker", "--number", str(args.number), "--seconds", str(args.seconds)]
        (args.directory / "turns.json").write_text(json.dumps(printed_object(ranks.run(["-m", MODULE, *worker]))))


if __name__ == "__main__":
    main()
