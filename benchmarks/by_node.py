"""Collectives of two nodes of two ranks, flat and by node, alone and in steps: measured and predicted, one JSON object.

    python -m benchmarks.by_node DIR [--shaped MBIT] [--by COMMAND]

Each node is a network namespace, with a link of so many Mbit/s (`shaped.py`). The machine is calibrated, then both ways take
turns in the same processes; seconds are medians, of the slowest rank. DIR keeps the profile, the programs and what was measured,
and what it has of these is not made again. --by: what is timed is started by this command.
"""

from __future__ import annotations

import functools
import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import autopar
from autopar.costmodel import by_node
from autopar.runtime.comm.hierarchical import KINDS
from autopar.runtime.comm.nodes import ByNode, use_nodes
from autopar.runtime.comm.process import TorchComm
from benchmarks.calibrated_models import gpt, wide
from benchmarks.calibrated_plans import Case, Loaded, calibrate, compiled, priced_s, timed, turn_s
from benchmarks.harness import as_worker, command_line, print_json, printed_object
from benchmarks.shaped import ranks_on

MODULE = "benchmarks.by_node"
NODES, PLACES = 2, 2
RANKS = NODES * PLACES
MESH = {"dp": RANKS}
PROFILE, MEASURED, FLAT = "profile.json", "measured.json", "_flat"
SIZES = tuple(2**i for i in (10, 14, 16, 18, 19, 20, 21, 22, 24, 25))
TURNS, STEPS_A_TURN = 5, 2
CASES = (Case(gpt, "dp", {"mesh": MESH, "strategy": "dp"}), Case(wide, "zero1", {"mesh": MESH, "strategy": "zero1"}))


def cluster_of(profile: Path) -> autopar.ClusterSpec:
    """The two nodes as they were calibrated."""
    described = autopar.ClusterSpec.homogeneous(devices=RANKS, device="cpu", devices_per_node=PLACES)
    return described.with_profile(json.loads(profile.read_text()))


def calls(comm: TorchComm, nbytes: int) -> dict[str, Callable[[], Any]]:
    """A collective of each kind, of so many bytes in all."""
    whole = torch.zeros(nbytes // 4)
    part = whole[: nbytes // 4 // RANKS].clone()
    return {
        "all_reduce": lambda: comm.all_reduce(whole, "dp"),
        "all_gather": lambda: comm.all_gather(part, 0, "dp"),
        "reduce_scatter": lambda: comm.reduce_scatter(whole, 0, "dp"),
    }


def collectives_s() -> Iterator[tuple[str, int, dict[str, float]]]:
    """(kind, bytes, seconds by way) of single collectives; every rank must call it."""
    ways = {"flat": TorchComm(MESH), "by node": TorchComm(MESH)}
    nodes = [tuple(range(node * PLACES, (node + 1) * PLACES)) for node in range(NODES)]
    two = ways["by node"]
    use_nodes(two, [two], [(MESH, 0)], nodes, [ByNode(0, "dp", dict.fromkeys(KINDS, 0))])
    for nbytes in SIZES:
        for kind in KINDS:
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range((TURNS if nbytes > 1 << 20 else 4 * TURNS) + 1):
                for way, comm in ways.items():
                    call = calls(comm, nbytes)[kind]
                    comm.barrier()
                    start = time.perf_counter()
                    call()
                    slowest = torch.tensor(time.perf_counter() - start)
                    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                    if turn:
                        seconds[way].append(float(slowest))
            yield kind, nbytes, {way: statistics.median(of) for way, of in seconds.items()}


def measure(directory: Path) -> dict[str, Any]:
    """One rank: single collectives, and steps of every program."""
    alone = list(collectives_s())
    names = [case.name + way for case in CASES for way in ("", FLAT)]
    batches = {case.name + way: case.model()[1] for case in CASES for way in ("", FLAT)}
    loaded = {name: Loaded(autopar.load(directory / name), batches[name]) for name in names}
    turns = [turn_s(loaded, STEPS_A_TURN) for _ in range(TURNS + 1)][1:]
    return {"alone": alone, "steps": {name: statistics.median(turn[name] for turn in turns) for name in names}}


def save_both(program: autopar.ParallelProgram, directory: Path, name: str) -> None:
    """The program as it is, and with all its collectives flat."""
    program.save(directory / name)
    shutil.copytree(directory / name, directory / (name + FLAT), dirs_exist_ok=True)
    text = program.pipeline.replace("BY_NODE = [", "BY_NODE = []\nNOT_TAKEN = [")
    (directory / (name + FLAT) / "pipeline.py").write_text(text)


def flat_priced_s(program: autopar.ParallelProgram, cluster: autopar.ClusterSpec) -> float:
    """Predicted seconds of a step whose collectives are all flat."""
    with patch.object(by_node, "least_bytes", lambda *_: None):
        return priced_s(program, cluster)


def compared(programs: dict[str, autopar.ParallelProgram], profile: Path, measured: dict[str, Any]) -> dict[str, Any]:
    """Rows of what was predicted beside what was measured, in milliseconds."""
    cluster, ranks = cluster_of(profile), tuple(range(RANKS))
    prices = {"flat": by_node.flat_s, "by node": by_node.by_node_s}

    def row(measured_s: dict[str, float], predicted_s: dict[str, float]) -> dict[str, Any]:
        pairs = {"measured_ms": measured_s, "predicted_ms": predicted_s}
        found = {name: {way: round(1e3 * s, 2) for way, s in of.items()} for name, of in pairs.items()}
        return found | {"measured_ratio": round(measured_s["by node"] / measured_s["flat"], 3)}

    steps = measured["steps"]
    return {
        "alone": [
            {"kind": kind, "bytes": nbytes}
            | row(of, {way: price(cluster.levels, kind, nbytes, ranks) for way, price in prices.items()})
            for kind, nbytes, of in measured["alone"]
        ],
        "least": {kind: by_node.least_bytes(cluster.levels, kind, ranks) for kind in KINDS},
        "steps": {
            name: row(
                {"flat": steps[name + FLAT], "by node": steps[name]},
                {"flat": flat_priced_s(program, cluster), "by node": priced_s(program, cluster)},
            )
            for name, program in programs.items()
        },
    }


def time_all(directory: Path, mbit: float) -> None:
    """Time the machine if it was not timed yet, else both ways."""
    with ranks_on(RANKS, mbit, PLACES) as ranks:
        if not (directory / PROFILE).exists():
            return calibrate(ranks, directory / PROFILE)
        measured = printed_object(ranks.run(["-m", MODULE, str(directory), "--worker"]))
    (directory / MEASURED).write_text(json.dumps(measured))
    return None


def main() -> None:
    parser = command_line(__doc__, keeps=True)
    parser.add_argument("--shaped", type=float, default=1000.0, help="Mbit/s of the link between the nodes")
    args = parser.parse_args()
    directory = args.directory
    if args.worker:
        return as_worker(functools.partial(measure, directory))
    if args.time:
        return time_all(directory, args.shaped)
    torch.set_num_threads(1)
    directory.mkdir(parents=True, exist_ok=True)
    asked = [directory, "--time", "--shaped", args.shaped]
    if not (directory / PROFILE).exists():
        timed(args.by, MODULE, asked)
    programs = {case.name: compiled(case, cluster_of(directory / PROFILE)) for case in CASES}
    if not (directory / MEASURED).exists():
        for name, program in programs.items():
            save_both(program, directory, name)
        timed(args.by, MODULE, asked)
    measured = json.loads((directory / MEASURED).read_text())
    print_json(
        {"benchmark": "by_node", "shaped_mbit": args.shaped, **compared(programs, directory / PROFILE, measured)}
    )
    return None


if __name__ == "__main__":
    main()
