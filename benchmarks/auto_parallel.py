"""AutoParallel's search beside this one, on AutoParallel's own lists: CPU seconds, costs and proven gaps, as JSON.

    python -m benchmarks.auto_parallel                                     # 2, 8 and 32 layers on 8x8 and 4x4x4 ranks
    python -m benchmarks.auto_parallel --layers 8 --mesh 8x8 --limit 600   # one of them, the slow solvers given more time

The step of a Llama with the 8B model's widths is listed as AutoParallel lists it (`auto_parallel_lists.py`), once with
repeated layers clustered, as it does by default, and once with every layer apart. Both sides get the same arrays, and
take turns; seconds of the processor, medians over the turns. `ours` goes to the optimum, `ours_rough` ends within 0.5 %
of its bound; AutoParallel's are message passing with a polish (no bound of its own), and CBC on its integer program and
CLP on its relaxation where these are small enough.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from autopar.passes.shard.factors.graph import FactorGraph
from autopar.passes.shard.solve import Solution, solve
from benchmarks.auto_parallel_lists import FORBIDDEN_US, list_step
from benchmarks.auto_parallel_solvers import Found, by_messages, by_program
from benchmarks.auto_parallel_step import traced_step
from benchmarks.harness import command_line, print_json
from benchmarks.models import Llama, LlamaShape

CLOSE = 5e-3
"""The gap that is asked for."""
_PROGRAM = 2_000_000
"""Binaries from which CBC and CLP are not asked: the text of the program alone would take minutes."""


def graph_of(layers: int, mesh: tuple[int, ...], clustered: bool, seq: int = 4096) -> FactorGraph:
    """The lists of a Llama of so many layers, two rows of the batch for every rank of the first axis."""
    with torch.device("meta"):
        model = Llama(LlamaShape(layers, 4096, 14336, 32, 8, 128256), seq).to(torch.bfloat16)
        ids = torch.zeros(2 * mesh[0], seq, dtype=torch.long)
    return list_step(traced_step(model, ids), mesh, clustered)


def ours(graph: FactorGraph, limit_s: float, close: float) -> Found:
    """This search, within a relative distance of its bound."""
    rough = 10 * close or 1e-4  # an estimate without a budget ends at a tenth of what is asked for
    solution = solve(graph, None, limit_s, close=rough)
    assert isinstance(solution, Solution)
    return Found(solution.choice, solution.cost, solution.bound)


def timed(run: Callable[[], Found]) -> tuple[Found, float]:
    """The answer of a solver, and its CPU seconds."""
    begin = time.process_time()
    return run(), time.process_time() - begin


def measure(graph: FactorGraph, turns: int, limit_s: float) -> dict[str, Any]:
    """All solvers on one graph. limit_s: wall seconds of ours and of the programs; AutoParallel's own limit is kept."""
    reached: list[float] = []
    found: dict[str, Found] = {}
    took: dict[str, list[float]] = {}
    for _ in range(turns):
        for name, run in (
            ("ours_rough", lambda: ours(graph, limit_s, CLOSE)),
            ("ours", lambda: ours(graph, limit_s, 0.0)),
            ("messages", lambda: by_messages(graph)),
        ):
            found[name], seconds = timed(run)
            took.setdefault(name, []).append(seconds)
    bound = max(found["ours"].bound or -math.inf, found["ours_rough"].bound or -math.inf)
    begin = time.process_time()

    def near(cost: float) -> bool:
        close = cost <= bound / (1 - CLOSE)
        if close and not reached:
            reached.append(time.process_time() - begin)
        return close

    by_messages(graph, seen=near)
    entries = graph.size["variables"]
    if entries <= _PROGRAM:
        for name, whole in (("cbc", True), ("clp", False)):
            answer, seconds = by_program(graph, whole, limit_s, FORBIDDEN_US)
            took[name] = [seconds]
            if answer is not None:
                found[name] = answer
    return {
        "variables": len(graph.keys),
        "states": sum(map(len, graph.states)),
        "pair_states": entries - sum(map(len, graph.states)),
        "bound_us": round(bound, 1),
        "messages_within_close_s": round(reached[0], 2) if reached else None,
        "solvers": {
            name: {
                "cpu_s": round(statistics.median(seconds), 3),
                "cost_us": round(found[name].cost, 1) if name in found else None,
                "gap_to_best_bound": round((found[name].cost - bound) / found[name].cost, 5) if name in found else None,
                "proven_gap": _proven(found[name]) if name in found else None,
            }
            for name, seconds in took.items()
        },
    }


def _proven(found: Found) -> float | None:
    """The gap that a solver proves by itself."""
    return None if found.bound is None else round(max(0.0, (found.cost - found.bound) / found.cost), 6)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--layers", nargs="+", type=int, default=[2, 8, 32])
    parser.add_argument(
        "--mesh", nargs="+", default=["8x8", "4x4x4"], help="sizes of the axes, the last inside the node"
    )
    parser.add_argument("--lists", nargs="+", choices=["clustered", "apart"], default=["clustered", "apart"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of ours, and of CBC and CLP")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for mesh in args.mesh:
        for layers in args.layers:
            for lists in args.lists:
                graph = graph_of(layers, tuple(map(int, mesh.split("x"))), lists == "clustered")
                case = {"layers": layers, "mesh": mesh, "lists": lists}
                results.append(case | measure(graph, args.turns, args.limit))
                print(results[-1], file=sys.stderr, flush=True)
    print_json({"benchmark": "auto_parallel", "results": results})


if __name__ == "__main__":
    main()
