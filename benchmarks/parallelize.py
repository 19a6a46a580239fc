"""Starts and calls of `autopar.parallelize`: a GPT on two ranks of this machine, once compiled and once from its cache. One JSON
object.

    python -m benchmarks.parallelize [--starts 3] [--steps 40]

Every start is a fresh torchrun. Seconds of a start are those of rank 0, each as wall time and as CPU time of its process: to
import torch with an optimizer of it, autopar on top of that, to make the model, and from there to the step (`parallelize`) and to
the end of the first one. What a call costs around the program's own step is the CPU time of a call whose session does nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH, SEQUENCE = 8, 128
CALLS = 2000


class Clock:
    """Seconds since the last reading, by name: of the wall and of this process."""

    def __init__(self) -> None:
        self.read: dict[str, dict[str, float]] = {}
        self._last = time.perf_counter(), time.process_time()

    def lap(self, name: str) -> None:
        """Note what passed since the last lap."""
        now = time.perf_counter(), time.process_time()
        self.read[name] = {"wall_s": now[0] - self._last[0], "cpu_s": now[1] - self._last[1]}
        self._last = now


def worker(steps: int) -> None:
    """One rank of one start; rank 0 prints what it measured."""
    clock = Clock()
    import torch

    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # whose first one imports much of torch, in any script
    clock.lap("torch and its optimizers")
    import autopar

    clock.lap("import autopar")
    from benchmarks.models import Gpt, next_token_loss

    torch.manual_seed(0)
    model = Gpt()
    ids = torch.randint(0, 64, (BATCH, SEQUENCE))
    clock.lap("model")
    step = autopar.parallelize(
        model, "here", (ids, ids), loss_fn=next_token_loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3)
    )
    clock.lap("parallelize")
    step(ids, ids)
    clock.lap("first step")
    for _ in range(steps):
        step(ids, ids)
    clock.lap("steps")
    measured: dict[str, Any] = {**clock.read, "step_s": clock.read["steps"]["wall_s"] / max(steps, 1)}
    measured["wrapper_s"] = wrapper_s(step, ids)
    if os.environ["RANK"] == "0":
        print(json.dumps(measured), flush=True)


def wrapper_s(step: Any, ids: Any) -> float:
    """Seconds of CPU of a call beside the session's own step, the call of the loaded program included."""
    session, loss = step._session, ids.sum()
    kept, session.train_step = session.train_step, lambda *_, **__: loss
    try:
        before = time.process_time()
        for _ in range(CALLS):
            step(ids, ids)
        return (time.process_time() - before) / CALLS
    finally:
        session.train_step = kept


def start(cache: str, steps: int) -> dict[str, Any]:
    """The measurements of rank 0 of a fresh launch of two ranks."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, "--worker"]
    root = Path(__file__).parents[1]
    environment = os.environ | {"AUTOPAR_CACHE": cache, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, *command, "--steps", str(steps)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=root,
        timeout=1200,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    measured: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return measured


def median(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of what several starts measured, by name."""
    laps = [name for name, value in starts[0].items() if isinstance(value, dict)]
    found: dict[str, Any] = {
        name: {kind: round(statistics.median(one[name][kind] for one in starts), 3) for kind in ("wall_s", "cpu_s")}
        for name in laps
        if name != "steps"
    }
    found |= {name: statistics.median(one[name] for one in starts) for name in ("step_s", "wrapper_s")}
    return found


def main() -> None:
    """The command line."""
    commands = argparse.ArgumentParser(description=__doc__)
    commands.add_argument("--starts", type=int, default=3)
    commands.add_argument("--steps", type=int, default=40)
    commands.add_argument("--worker", action="store_true")
    arguments = commands.parse_args()
    if arguments.worker:
        worker(arguments.steps)
        return
    with tempfile.TemporaryDirectory() as cache:
        compiled = start(cache, 2)
        again = median([start(cache, arguments.steps) for _ in range(arguments.starts)])
    wrapper = again["wrapper_s"]
    told = {"compiled": median([compiled]), "from the cache": again, "wrapper's share of 100 ms": wrapper / 0.1}
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
