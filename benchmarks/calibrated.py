"""Predicted steps against measured ones on two Gloo processes of this machine, calibrated meanwhile, one JSON object.

    python -m benchmarks.calibrated DIR [--limit N] [--compressed] [--shaped MBIT] [--by COMMAND]

Plans of several models are compiled for two ranks of a machine that was calibrated. Then the machine is calibrated again, all
plans take turns in the same two processes, a few steps each turn, and it is calibrated a third time. A step's time is that of a
turn over its steps, its median over those turns in which nobody slowed the cores (`quiet_turns`: their share); what is
predicted is the mean of what the profiles just before and just after say of the same program, as a machine that others use too
changes: `drift` says by how much, as the median of after over before. With --shaped a link of so many Mbit/s joins the ranks
(`shaped.py`). With --compressed the plans are data parallel, with gradients as they are and compressed. --by: what is timed is
started by this command. DIR keeps profiles, programs and what was measured, and what it has of these is not made again.
"""

from __future__ import annotations

import collections
import functools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.calibrated_models import bags, conv, gpt, llama, mlp, tied, wide
from benchmarks.calibrated_plans import (
    Case,
    Loaded,
    QuietTurns,
    calibrate,
    cluster_of,
    compiled,
    priced_s,
    timed,
    turn_s,
)
from benchmarks.harness import as_worker, command_line, print_json, printed_object
from benchmarks.shaped import ranks_on

MODULE = "benchmarks.calibrated"
STEPS_A_TURN, TURNS, MOST_TURNS = 3, 6, 24
PROFILE, BEFORE, AFTER, MEASURED = "profile.json", "before.json", "after.json", "measured.json"
DATA, TENSOR = {"mesh": {"dp": 2}}, {"mesh": {"tp": 2}}
PIPELINE = {"pp": 2, "microbatches": 4, "schedule": "1f1b"}
CASES = (
    Case(gpt, "dp", {**DATA, "strategy": "dp"}),
    Case(llama, "zero3", {**DATA, "strategy": "zero3"}),
    Case(mlp, "zero1", {**DATA, "strategy": "zero1"}),
    Case(conv, "dp", {**DATA, "strategy": "dp"}),
    Case(gpt, "1f1b", {**PIPELINE, "stage_boundaries": ["blocks.3"]}),
    Case(llama, "megatron", {**TENSOR, "strategy": "megatron"}),
    Case(mlp, "dp", {**DATA, "strategy": "dp"}),
    Case(gpt, "recompute", {**DATA, "strategy": "dp", "recompute": "full"}),
    Case(tied, "megatron", {**TENSOR, "strategy": "megatron"}),
    Case(bags, "dp", {**DATA, "strategy": "dp"}),
    Case(llama, "dp", {**DATA, "strategy": "dp"}),
    Case(conv, "zero1", {**DATA, "strategy": "zero1"}),
    Case(gpt, "zero1", {**DATA, "strategy": "zero1"}),
    Case(wide, "dp", {**DATA, "strategy": "dp"}),
    Case(llama, "1f1b", {**PIPELINE, "stage_boundaries": ["blocks.2"]}),
    Case(gpt, "megatron", {**TENSOR, "strategy": "megatron"}),
    Case(llama, "recompute", {**DATA, "strategy": "zero3", "recompute": "full"}),
    Case(tied, "dp", {**DATA, "strategy": "dp"}),
    Case(mlp, "zero3", {**DATA, "strategy": "zero3"}),
    Case(gpt, "zero3", {**DATA, "strategy": "zero3"}),
    Case(bags, "tensor", TENSOR),
    Case(wide, "tensor", TENSOR),
    Case(tied, "zb-h1", {**PIPELINE, "schedule": "zb-h1", "stage_boundaries": ["blocks.2"]}),
)
COMPRESSED = tuple(
    Case(gpt, f"{strategy}_{name or 'plain'}", {**DATA, "strategy": strategy, "gradient_compression": name})
    for strategy in ("dp", "zero1")
    for name in (None, "bf16", "int8")
)


def measure(directory: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """One rank: median seconds of a step of every program in its quiet turns, and the share of turns that were."""
    import autopar

    loaded = {case.name: Loaded(autopar.load(directory / case.name), case.model()[1]) for case in cases}
    turn_s(loaded, STEPS_A_TURN)
    machine = QuietTurns()
    turns: dict[str, list[float]] = collections.defaultdict(list)
    for _ in range(MOST_TURNS):
        for name, step_s in machine.turn_s(
            {n: loaded[n] for n in loaded if len(turns[n]) < TURNS}, STEPS_A_TURN
        ).items():
            turns[name].append(step_s)
    return {
        "step_s": {name: statistics.median(taken) for name, taken in turns.items() if taken},
        "quiet": round(machine.quiet / machine.taken, 4),
    }


def time_all(directory: Path, limit: int, compressed: bool, mbit: float | None) -> None:
    """All that is timed: the machine, the programs of a directory, and the machine again."""
    with ranks_on(2, mbit) as ranks:
        calibrate(ranks, directory / BEFORE)
        chosen = ["--limit", str(limit), *(["--compressed"] if compressed else [])]
        measured = printed_object(ranks.run(["-m", MODULE, str(directory), "--worker", *chosen]))
        (directory / MEASURED).write_text(json.dumps(measured))
        calibrate(ranks, directory / AFTER)


def compared(
    before_s: Mapping[str, float], after_s: Mapping[str, float], measured_s: Mapping[str, float]
) -> dict[str, Any]:
    """Rows, and what they say together. before_s, after_s: as the profiles of either time predict."""
    predicted_s = {name: (before_s[name] + after_s[name]) / 2 for name in measured_s}
    errors = {name: predicted_s[name] / measured_s[name] - 1 for name in measured_s}
    rows = [
        {
            "plan": name,
            "predicted_s": round(predicted_s[name], 5),
            "measured_s": round(measured_s[name], 5),
            "error": round(errors[name], 4),
        }
        for name in measured_s
    ]
    return {
        "rows": rows,
        "plans": len(rows),
        "median_error": round(statistics.median(map(abs, errors.values())), 4),
        "worst_error": round(max(map(abs, errors.values())), 4),
        "bias": round(statistics.median(errors.values()), 4),
        "drift": round(statistics.median(after_s[name] / before_s[name] for name in measured_s), 4),
    }


def main() -> None:
    parser = command_line(__doc__, keeps=True)
    parser.add_argument("--limit", type=int, default=len(CASES), help="the first plans alone")
    parser.add_argument("--compressed", action="store_true", help="plans with and without compressed gradients")
    parser.add_argument("--shaped", type=float, help="Mbit/s of the link between the ranks")
    args = parser.parse_args()
    directory, cases = args.directory, (COMPRESSED if args.compressed else CASES)[: args.limit]
    if args.worker:
        return as_worker(functools.partial(measure, directory, cases))
    if args.time:
        return time_all(directory, args.limit, args.compressed, args.shaped)
    torch.set_num_threads(1)
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / PROFILE).exists():
        with ranks_on(2, args.shaped) as ranks:
            calibrate(ranks, directory / PROFILE)
    programs = {case.name: compiled(case, cluster_of(2, directory / PROFILE)) for case in cases}
    if not (directory / AFTER).exists():
        for name, program in programs.items():
            program.save(directory / name)
        asked = [] if args.shaped is None else ["--shaped", args.shaped]
        asked += ["--compressed"] if args.compressed else []
        timed(args.by, MODULE, [directory, "--time", "--limit", args.limit, *asked])
    before_s, after_s = (
        {name: priced_s(program, cluster_of(2, directory / profile)) for name, program in programs.items()}
        for profile in (BEFORE, AFTER)
    )
    measured = json.loads((directory / MEASURED).read_text())
    result = {"quiet_turns": measured["quiet"], **compared(before_s, after_s, measured["step_s"])}
    print_json({"benchmark": "calibrated", "shaped_mbit": args.shaped, **result})


if __name__ == "__main__":
    main()
