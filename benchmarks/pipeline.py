"""Pipelines: emitted 1F1B against torch.distributed.pipelining, the prediction against the clock, and compile growth.

    python benchmarks/pipeline.py [--steps 40] [--microbatches 8]      two Gloo processes, one JSON object
    python benchmarks/pipeline.py --growth                             compile times over layers and GPUs, a JSON line each
    python benchmarks/pipeline.py --case 126 16384                     one of them

The same GPT, cut at the same block into two stages, with the same microbatches and optimizer. Both programs live in the
same two processes and take turns, step by step, so that whatever else the machine does hits them alike; a step is timed
from barrier to barrier, and the losses must agree. `predicted` is the compiler's, from a profile calibrated on this
machine just before; `simulated_from_actions` simulates the schedule with the seconds that each action took here.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.models import Gpt, next_token_loss  # noqa: E402

BATCH, SEQ, VOCAB, LAYERS = 32, 128, 512, 6
OPTIMIZER = functools.partial(torch.optim.SGD, lr=1e-2)
GROWTH = ((32, 1024), (126, 1024), (126, 4096), (126, 16384), (500, 16384), (1000, 16384), (1000, 98304))

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], float]


def make_model() -> Gpt:
    torch.manual_seed(0)
    return Gpt(vocab=VOCAB, seq=SEQ, layers=LAYERS)


def make_batch(step: int) -> Batch:
    """The global batch, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
    return ids, (ids * 7 + 3) % VOCAB


class Half(nn.Module):
    """The first or the last half of a Gpt."""

    def __init__(self, gpt: Gpt, last: bool) -> None:
        super().__init__()
        self.last = last
        half = len(gpt.blocks) // 2
        self.blocks = nn.ModuleList(list(gpt.blocks)[half:] if last else list(gpt.blocks)[:half])
        if last:
            self.norm, self.head = gpt.norm, gpt.head
        else:
            self.tokens, self.positions = gpt.tokens, gpt.positions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.last:
            x = self.tokens(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def torch_step(microbatches: int) -> Step:
    """A training step of torch's own 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    model = Half(make_model(), last=rank == 1)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=next_token_loss)
    optimizer = OPTIMIZER(model.parameters())

    def step(batch: Batch) -> float:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch[0])
        else:
            schedule.step(target=batch[1], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean().detach() if rank else torch.zeros(())
        dist.broadcast(mean, 1)
        return mean.item()

    return step


def worker(directory: Path, steps: int, warmup: int, microbatches: int) -> None:
    """One rank: both programs in turn."""
    import autopar

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ours = autopar.load(directory)
    programs: dict[str, Step] = {"autopar": lambda batch: float(ours(batch)), "torch": torch_step(microbatches)}
    times: dict[str, list[float]] = {name: [] for name in programs}
    losses: dict[str, float] = {}
    for index in range(warmup + steps):
        batch = make_batch(index)
        for name in programs if index % 2 == 0 else list(programs)[::-1]:
            dist.barrier()
            start = time.perf_counter()
            losses[name] = programs[name](batch)
            dist.barrier()
            if index >= warmup:
                times[name].append(time.perf_counter() - start)
    actions = recorded(ours.session, warmup + steps)
    if dist.get_rank() == 0:
        print(json.dumps({"times": times, "losses": losses, "actions": actions}))
    dist.destroy_process_group()


def recorded(session: Any, first: int) -> list[tuple[str, float]]:
    """Seconds of every action of a few recorded steps, of all ranks."""
    session.record = True
    mine: list[tuple[str, float]] = []
    for index in range(8):
        dist.barrier()
        session.train_step(list(make_batch(first + index)))
        mine += [(name, end - start) for name, start, end in session.timeline]
    session.record = False
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return [row for rows in every for row in rows]


def compare(args: argparse.Namespace) -> int:
    import autopar
    from autopar.costmodel.calibrate import calibrate
    from autopar.costmodel.simulate import makespan_s

    torch.set_num_threads(1)
    cluster = autopar.ClusterSpec.local(2).with_profile(calibrate(quick=True, ranks=2))
    options = autopar.Options(
        pp=2, microbatches=args.microbatches, schedule="1f1b", stage_boundaries=[f"blocks.{LAYERS // 2}"]
    )
    program = autopar.compile(
        make_model(), cluster, make_batch(0), loss_fn=next_token_loss, optimizer=OPTIMIZER, options=options
    )
    with tempfile.TemporaryDirectory() as directory:
        program.save(directory)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [__file__, "--worker", directory, "--steps", str(args.steps), "--warmup", str(args.warmup)]
        command += ["--microbatches", str(args.microbatches)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False
        )
    if ran.returncode:
        return ran.returncode
    got = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith('{"times"')))
    times = got["times"]
    medians = {name: statistics.median(values) for name, values in times.items()}
    seconds: dict[tuple[int, str], list[float]] = {}
    for name, taken in got["actions"]:
        seconds.setdefault((int(name.rpartition(".")[2]), name[0]), []).append(taken)
    durations = {key: statistics.median(values) for key, values in seconds.items()}
    counted = program.account
    from_actions = makespan_s(counted.table, counted.graph, durations, counted.hand_over) + max(
        s.step_s for s in counted.stages
    )
    pairs = [a / b for a, b in zip(times["autopar"], times["torch"], strict=True)]
    predicted = program.predicted.step_time_s
    print(
        json.dumps(
            {
                "benchmark": "pipeline",
                "ranks": 2,
                "microbatches": args.microbatches,
                "steps": args.steps,
                "median_ms": {name: round(1e3 * value, 2) for name, value in medians.items()},
                "ratio_of_medians": round(medians["autopar"] / medians["torch"], 3),
                "ratio_of_pairs": round(statistics.median(pairs), 3),
                "predicted_ms": round(1e3 * predicted, 2),
                "prediction_error": round(predicted / medians["autopar"] - 1, 3),
                "simulated_from_actions_ms": round(1e3 * from_actions, 2),
                "simulation_error": round(from_actions / medians["autopar"] - 1, 3),
                "last_loss": got["losses"],
                "losses_agree": abs(got["losses"]["autopar"] - got["losses"]["torch"]) < 1e-3,
            },
            indent=2,
        )
    )
    return 0


def growth_case(layers: int, devices: int) -> dict[str, Any]:
    """Compile a Llama as wide as the 405B one on so many H100s, everything searched."""
    import dataclasses

    import autopar
    from benchmarks.models import LLAMA_405B, Llama

    torch.set_num_threads(1)
    with torch.device("meta"):
        model = Llama(dataclasses.replace(LLAMA_405B, layers=layers), 8192).to(torch.bfloat16)
        ids = torch.zeros(max(2048, devices // 8), 8192, dtype=torch.long)
    started = time.perf_counter()
    program = autopar.compile(
        model,
        autopar.ClusterSpec.preset("dgx-h100", nodes=devices // 8),
        (ids, ids),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-4),
    )
    whole = time.perf_counter() - started
    timings = program.timings
    return {
        "layers": layers,
        "devices": devices,
        "compile_s": round(whole, 2),
        **{key: round(value, 2) for key, value in timings.items()},
        "after_capture_s": round(whole - timings["capture_s"], 2),
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "plan": program.plan.show_meshes(),
        "predicted_step_s": round(program.predicted.step_time_s, 3),
        "predicted_peak_gb": round(program.predicted.peak_bytes / 1e9, 1),
    }


def growth() -> int:
    """Every case in a process of its own."""
    for layers, devices in GROWTH:
        ran = subprocess.run(
            [sys.executable, __file__, "--case", str(layers), str(devices)],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        said = ran.stderr.strip().splitlines()
        row = (
            ran.stdout.splitlines()[-1]
            if not ran.returncode
            else json.dumps({"layers": layers, "devices": devices, "error": said[-1] if said else "killed"})
        )
        print(row, flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--case", nargs=2, type=int, metavar=("LAYERS", "DEVICES"))
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.steps, args.warmup, args.microbatches)
        return 0
    if args.case:
        print(json.dumps(growth_case(*args.case)))
        return 0
    return growth() if args.growth else compare(args)


if __name__ == "__main__":
    sys.exit(main())
