"""Emitted programs against DDP and FSDP2: the same GPT, batch and optimizer on two Gloo processes, one JSON object.

    python benchmarks/step_time.py [--steps 40] [--ranks 2]

All four programs live in the same processes and take turns, step by step (A B C D A B C D ...), so that whatever else
the machine does hits them alike. A step is timed from barrier to barrier. `ratio_of_medians` is autopar's median over
PyTorch's; `ratio_of_pairs` the median of step-by-step ratios. The losses of all four must agree.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.models import Gpt, next_token_loss  # noqa: E402

BATCH, SEQ, VOCAB = 8, 128, 512
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-3)
PAIRS = {"dp": "ddp", "zero3": "fsdp2"}

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], float]


def make_model() -> Gpt:
    torch.manual_seed(0)
    return Gpt(vocab=VOCAB, seq=SEQ)


def make_batch(step: int) -> Batch:
    """The global batch, the same on every rank. Labels are predictable from ids, so that the loss can fall."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
    return ids, (ids * 7 + 3) % VOCAB


def torch_step(strategy: str) -> Step:
    """A training step of PyTorch's own wrapper, on this rank's rows of the global batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gpt = make_model()
    model: torch.nn.Module = gpt
    if strategy == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(gpt, gradient_as_bucket_view=True)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (ranks,))
        for block in gpt.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(gpt, mesh=mesh)
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


def autopar_step(directory: Path) -> Step:
    import autopar

    program = autopar.load(directory)
    return lambda batch: float(program(batch))


def worker(directory: Path, steps: int, warmup: int) -> None:
    """One rank: all four programs in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    programs: dict[str, Step] = {}
    for ours, theirs in PAIRS.items():
        programs[ours] = autopar_step(directory / ours)
        programs[theirs] = torch_step(theirs)
    times: dict[str, list[float]] = {name: [] for name in programs}
    losses: dict[str, float] = {}
    for index in range(warmup + steps):
        batch = make_batch(index)
        order = list(programs) if index % 2 == 0 else list(programs)[::-1]
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            losses[name] = programs[name](batch)
            dist.barrier()
            if index >= warmup:
                times[name].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(json.dumps(summary(times, losses), indent=2))
    dist.destroy_process_group()


def summary(times: dict[str, list[float]], losses: dict[str, float]) -> dict[str, object]:
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "benchmark": "step_time",
        "ranks": dist.get_world_size(),
        "steps": len(next(iter(times.values()))),
        "median_ms": {name: round(1e3 * value, 2) for name, value in medians.items()},
        "ratio_of_medians": {
            f"{ours}/{theirs}": round(medians[ours] / medians[theirs], 3) for ours, theirs in PAIRS.items()
        },
        "ratio_of_pairs": {
            f"{ours}/{theirs}": round(
                statistics.median(a / b for a, b in zip(times[ours], times[theirs], strict=True)), 3
            )
            for ours, theirs in PAIRS.items()
        },
        "last_loss": losses,
        "losses_agree": max(losses.values()) - min(losses.values()) < 1e-3,
    }


def compile_programs(directory: Path, ranks: int) -> None:
    import autopar

    for strategy in PAIRS:
        program = autopar.compile(
            make_model(),
            autopar.ClusterSpec.local(ranks),
            make_batch(0),
            loss_fn=next_token_loss,
            optimizer=OPTIMIZER,
            options=autopar.Options(mesh={"dp": ranks}, strategy=strategy),
        )
        program.save(directory / strategy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker, args.steps, args.warmup)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        compile_programs(Path(directory), args.ranks)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        command += [__file__, "--worker", directory, "--steps", str(args.steps), "--warmup", str(args.warmup)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False)
    sys.exit(ran.returncode)


if __name__ == "__main__":
    main()
