"""Memory and the time it is bought with: emitted programs against PyTorch's own ways of saving it, one JSON object each.

    python benchmarks/memory.py --zero3 [--ranks 2 4]     emitted ZeRO-3 against FSDP2, on Gloo processes
    python benchmarks/memory.py --recompute               emitted recompute against checkpointing at equal peak, one process
    python benchmarks/memory.py --limit                   a third of the memory on four Gloo processes, against the plans

Bytes are those alive in tensors, counted from the op that makes a storage until it is freed, over a whole step with
optimizer state there: parameters, gradients, optimizer state, activations, gathered parameters and buffers of both. Time
is taken without the counter; programs live in the same processes and take turns, step by step, so that whatever else the
machine does hits them alike. The recompute cases are in memory_recompute.py.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.models import Gpt, next_token_loss  # noqa: E402

BATCH, SEQ, VOCAB = 8, 128, 512
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-3)
RANKS = 4
GIVEN = 0.95
"""Of the limit, to the planner: what is under way in Gloo's messages is not predicted, but counted here."""

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], float]
Times = Mapping[str, Sequence[float]]


def make_model() -> Gpt:
    torch.manual_seed(0)
    return Gpt(vocab=VOCAB, seq=SEQ, dim=384)


def make_batch(step: int, batch: int = BATCH, seq: int = SEQ) -> Batch:
    """The global batch, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (batch, seq), generator=generator)
    return ids, (ids * 7 + 3) % VOCAB


# --- measuring


def counted_peak(make: Callable[[], Step], batch: Callable[[int], Batch], limit_bytes: float | None = None) -> Any:
    """(the step function, bytes at the peak of its third step, bytes between steps), everything made under a counter."""
    from autopar.counter import ByteCounter

    gc.collect()
    gc.disable()
    try:
        counter = ByteCounter(limit_bytes, "the step")
        with counter:
            step = make()
            for index in range(3):
                counter.restart()
                step(batch(index))
        return step, counter.peak, counter.alive
    finally:
        gc.enable()


def take_turns(
    programs: Mapping[str, Step], batch: Callable[[int], Batch], steps: int, warmup: int, barrier: Callable[[], Any]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of every step of every program, and their last losses."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    losses: dict[str, float] = {}
    for index in range(warmup + steps):
        given = batch(index)
        for name in programs if index % 2 == 0 else list(programs)[::-1]:
            barrier()
            start = time.perf_counter()
            losses[name] = programs[name](given)
            barrier()
            if index >= warmup:
                times[name].append(time.perf_counter() - start)
    return times, losses


def medians_ms(times: Times) -> dict[str, float]:
    return {name: round(1e3 * statistics.median(values), 2) for name, values in times.items()}


def ratios(times: Times, ours: str, theirs: str) -> dict[str, float]:
    """Of the medians, and the median of step-by-step ratios."""
    pairs = [a / b for a, b in zip(times[ours], times[theirs], strict=True)]
    return {
        "ratio_of_medians": round(statistics.median(times[ours]) / statistics.median(times[theirs]), 3),
        "ratio_of_pairs": round(statistics.median(pairs), 3),
    }


def autopar_step(directory: Path) -> Step:
    import autopar

    program = autopar.load(directory)
    return lambda batch: float(program(batch))


# --- ZeRO-3


def fsdp2_step() -> Step:
    """FSDP2 per block, on this rank's rows of the global batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = make_model()
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    optimizer = OPTIMIZER(model.parameters())

    def step(batch: Batch) -> float:
        ids, labels = (t.chunk(ranks)[rank] for t in batch)
        loss = next_token_loss(model(ids), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / ranks

    return step


def zero3_worker(args: argparse.Namespace) -> dict[str, Any]:
    ranks = dist.get_world_size()
    batch = functools.partial(make_batch, batch=args.rows * ranks)
    makers: dict[str, Callable[[], Step]] = {
        "autopar": functools.partial(autopar_step, args.worker / "zero3"),
        "fsdp2": fsdp2_step,
    }
    programs: dict[str, Step] = {}
    peaks: dict[str, int] = {}
    resting: dict[str, int] = {}
    for name, make in makers.items():
        programs[name], peak, alive = counted_peak(make, batch)
        peaks[name], resting[name] = int(highest(peak)), int(highest(alive))
    times, losses = take_turns(programs, batch, args.steps, args.warmup, dist.barrier)
    return {
        "benchmark": "memory: zero3",
        "ranks": ranks,
        "steps": args.steps,
        "peak_bytes": peaks,
        "bytes_between_steps": resting,
        "peak_ratio": round(peaks["autopar"] / peaks["fsdp2"], 4),
        "median_ms": medians_ms(times),
        **ratios(times, "autopar", "fsdp2"),
        "last_loss": losses,
        "losses_agree": max(losses.values()) - min(losses.values()) < 1e-3,
    }


def zero3(args: argparse.Namespace, ranks: int) -> int:
    import autopar

    program = autopar.compile(
        make_model(),
        autopar.ClusterSpec.local(ranks),
        make_batch(0, args.rows * ranks),
        loss_fn=next_token_loss,
        optimizer=OPTIMIZER,
        options=autopar.Options(mesh={"dp": ranks}, strategy="zero3", pp=1, recompute="none", microbatches=1),
    )
    return spread(args, "zero3", ranks, {"zero3": program}, {"predicted_peak_bytes": int(program.predicted.peak_bytes)})


# --- a third of the memory


def limit(args: argparse.Namespace) -> int:
    """The step with a third of what one rank would need, against the step without a limit; both as predicted."""
    import autopar
    from autopar.costmodel.calibrate import calibrate

    cluster = autopar.ClusterSpec.local(RANKS).with_profile(calibrate(quick=True, ranks=RANKS, say=lambda text: None))
    batch = make_batch(0, args.rows * RANKS)
    make = functools.partial(autopar.compile, example_inputs=batch, loss_fn=next_token_loss, optimizer=OPTIMIZER)
    once = autopar.Options(recompute="none", microbatches=1)
    alone = make(make_model(), autopar.ClusterSpec.local(1), options=once)
    needed = alone.predicted.peak_bytes
    programs = {
        "limited": make(make_model(), cluster, options=autopar.Options(memory_bytes=GIVEN * needed / args.times)),
        "unlimited": make(make_model(), cluster, options=autopar.Options()),
    }
    predicted = {name: program.predicted.step_time_s for name, program in programs.items()}
    more = {
        "limit_bytes": int(needed / args.times),
        "predicted_ms": {name: round(1e3 * s, 2) for name, s in predicted.items()},
        "predicted_ratio": round(predicted["limited"] / predicted["unlimited"], 3),
        "plans": {name: program.plan.show_meshes() for name, program in programs.items()},
        "microbatches": {name: program.plan.microbatches for name, program in programs.items()},
    }
    args.limit_bytes = needed / args.times
    return spread(args, "limit", RANKS, programs, more)


def limit_worker(args: argparse.Namespace) -> dict[str, Any]:
    """The limited program runs its counted steps held to the limit; more ends the benchmark."""
    batch = functools.partial(make_batch, batch=args.rows * RANKS)
    programs: dict[str, Step] = {}
    peaks: dict[str, int] = {}
    for name, most in (("limited", args.limit_bytes), ("unlimited", None)):
        programs[name], peak, _ = counted_peak(functools.partial(autopar_step, args.worker / name), batch, most)
        peaks[name] = int(highest(peak))
    times, losses = take_turns(programs, batch, args.steps, args.warmup, dist.barrier)
    return {
        "benchmark": "memory: limit",
        "ranks": RANKS,
        "steps": args.steps,
        "peak_bytes": peaks,
        "median_ms": medians_ms(times),
        **ratios(times, "limited", "unlimited"),
        "last_loss": losses,
        "losses_agree": max(losses.values()) - min(losses.values()) < 1e-3,
    }


# --- processes


def highest(value: float) -> float:
    """The most over all ranks."""
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def spread(
    args: argparse.Namespace, case: str, ranks: int, programs: Mapping[str, Any], more: Mapping[str, Any]
) -> int:
    """Run a case's worker on every process; print what it found and `more`."""
    with tempfile.TemporaryDirectory() as directory:
        for name, program in programs.items():
            program.save(Path(directory) / name)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
        command += [f"--{case}", "--worker", directory, "--steps", str(args.steps), "--warmup", str(args.warmup)]
        command += ["--rows", str(args.rows), "--limit-bytes", str(args.limit_bytes)]
        ran = subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=args.timeout,
        )
    if ran.returncode:
        return ran.returncode
    found = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith('{"benchmark"')))
    shown = {**found, **more}
    if "predicted_ratio" in more:
        shown["error_of_the_ratio"] = round(more["predicted_ratio"] / found["ratio_of_medians"] - 1, 3)
    print(json.dumps(shown, indent=2), flush=True)
    return 0


def worker(args: argparse.Namespace, case: Callable[[argparse.Namespace], dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = case(args)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero3", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--limit", action="store_true")
    parser.add_argument("--against", nargs="+", default=[], help="some of the recompute cases, such as 'budget 0.5'")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", type=int, default=4, help="sequences per rank")
    parser.add_argument("--times", type=float, default=3.0, help="how much too large the model is for the limit")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one case's processes")
    parser.add_argument("--limit-bytes", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args, limit_worker if args.limit else zero3_worker)
        return 0
    torch.set_num_threads(1)
    every = not (args.zero3 or args.recompute or args.limit)
    done = 0
    if every or args.zero3:
        done |= max(zero3(args, ranks) for ranks in args.ranks)
    if every or args.recompute:
        from benchmarks.memory_recompute import recompute

        recompute(args.steps, args.warmup, args.against)
    if every or args.limit:
        done |= limit(args)
    return done


if __name__ == "__main__":
    sys.exit(main())
