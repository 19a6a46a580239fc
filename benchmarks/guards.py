"""The cost of guards: the demo's GPT with its guards and without, and the guards of a step alone, as one JSON object.

    python benchmarks/guards.py [--steps 20] [--ranks 2]

Both programs take turns (harness.py), but what a guard costs is far below the noise of a step; so the checks of a step are
timed alone too, and `share_of_step` is the median of these over the median step without guards.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.demo import TEXT, demo_program  # noqa: E402
from benchmarks.harness import Batch, Step, measure_saved, take_turns  # noqa: E402

REPEATS = 200


def measure(directory: Path, steps: int, warmup: int) -> dict[str, Any]:
    """One rank: both programs in turn, then the checks alone."""
    import autopar

    loaded = {name: autopar.load(directory / name) for name in ("guarded", "unguarded")}
    programs = {name: step_of(program) for name, program in loaded.items()}
    turns = take_turns(programs, TEXT.batch, steps, warmup)
    session, batch = loaded["guarded"].session, TEXT.batch(0)
    check_s = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        session.guards.check_batch(batch, session.pipeline.inputs, session.pipeline.ranges)
        session.guards.end_step()
        check_s.append(time.perf_counter() - started)
    median_s = statistics.median(check_s)
    return {
        "benchmark": "guards",
        "ranks": dist.get_world_size(),
        "guards": [guard.source for guard in session.pipeline.ranges],
        **turns.summary(),
        **turns.ratios("guarded", "unguarded"),
        "check_us": round(1e6 * median_s, 1),
        "share_of_step": round(median_s / turns.median_s("unguarded"), 6),
    }


def step_of(program: Callable[[Batch], Any]) -> Step:
    """A training step of an emitted program."""
    return lambda batch: float(program(batch))


def compile_programs(directory: Path, ranks: int) -> None:
    """Writes the demo's program with guards and without."""
    for name in ("guarded", "unguarded"):
        options = {"mesh": {"dp": ranks}, "strategy": "dp", "guards": name == "guarded"}
        demo_program(ranks, **options).save(directory / name)


def main() -> None:
    measure_saved(__doc__, __file__, compile_programs, measure, steps=20, warmup=3)


if __name__ == "__main__":
    main()
