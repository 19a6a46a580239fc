"""Memory and the time it is bought with: emitted programs against PyTorch's own ways of saving it, one JSON object each.

    python benchmarks/memory.py --zero3 [--ranks 2 4]     emitted ZeRO-3 against FSDP2, on Gloo processes
    python benchmarks/memory.py --recompute               emitted recompute against checkpointing at equal peak, one process
    python benchmarks/memory.py --limit                   a third of the memory on four Gloo processes, against the plans

Bytes are those alive in tensors, counted from the op that makes a storage until it is freed, over a whole step with
optimizer state there: parameters, gradients, optimizer state, activations, gathered parameters and buffers of both. Time
is taken without the counter, programs taking turns (see harness.py). The recompute cases are in memory_recompute.py.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness import Batch, Step, as_worker, command_line, make_batch, print_json, run_saved, take_turns  # noqa: E402
from benchmarks.models import next_token_loss, seeded_gpt  # noqa: E402
from benchmarks.reference_steps import autopar_step, fsdp2_step  # noqa: E402

WIDTH, SEQ = 384, 128
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-3)
RANKS = 4
PLANNED_SHARE = 0.95
"""The share of the limit that the planner gets: what is under way in Gloo's messages is not predicted, but counted here."""


def counted_peak(
    make: Callable[[], Step], batch_of: Callable[[int], Batch], limit_bytes: float | None = None
) -> tuple[Step, int, int]:
    """(the step function, bytes at the peak of its third step, bytes between steps), everything made under a counter.

    The bytes are the most over all ranks.
    """
    from autopar.counter import ByteCounter

    gc.collect()
    gc.disable()
    try:
        counter = ByteCounter(limit_bytes, "the step")
        with counter:
            step = make()
            for index in range(3):
                counter.restart()
                step(batch_of(index))
        bytes_ = torch.tensor([counter.peak, counter.alive], dtype=torch.float64)
    finally:
        gc.enable()
    dist.all_reduce(bytes_, op=dist.ReduceOp.MAX)
    peak, alive = bytes_.tolist()
    return step, int(peak), int(alive)


def zero3_worker(args: argparse.Namespace) -> dict[str, Any]:
    """Both programs under a counter, then in turn."""
    batch_of = functools.partial(make_batch, batch=args.rows * dist.get_world_size(), seq=SEQ)
    makers: dict[str, Callable[[], Step]] = {
        "autopar": functools.partial(autopar_step, args.worker / "zero3"),
        "fsdp2": lambda: fsdp2_step(seeded_gpt(SEQ, WIDTH), OPTIMIZER),
    }
    programs: dict[str, Step] = {}
    peaks: dict[str, int] = {}
    resting: dict[str, int] = {}
    for name, make in makers.items():
        programs[name], peaks[name], resting[name] = counted_peak(make, batch_of)
    turns = take_turns(programs, batch_of, args.steps, args.warmup)
    return {
        "benchmark": "memory: zero3",
        "ranks": dist.get_world_size(),
        "peak_bytes": peaks,
        "bytes_between_steps": resting,
        "peak_ratio": round(peaks["autopar"] / peaks["fsdp2"], 4),
        **turns.summary(),
        **turns.ratios("autopar", "fsdp2"),
    }


def zero3(args: argparse.Namespace, ranks: int) -> None:
    """Emitted ZeRO-3 against FSDP2."""
    import autopar

    program = autopar.compile(
        seeded_gpt(SEQ, WIDTH),
        autopar.ClusterSpec.local(ranks),
        make_batch(0, args.rows * ranks, SEQ),
        loss_fn=next_token_loss,
        optimizer=OPTIMIZER,
        options=autopar.Options(mesh={"dp": ranks}, strategy="zero3", pp=1, recompute="none", microbatches=1),
    )
    measured = on_ranks(args, "zero3", ranks, {"zero3": program})
    print_json({**measured, "predicted_peak_bytes": int(program.predicted.peak_bytes)})


def limit_worker(args: argparse.Namespace) -> dict[str, Any]:
    """The limited program runs its counted steps held to the limit; more ends the benchmark."""
    batch_of = functools.partial(make_batch, batch=args.rows * RANKS, seq=SEQ)
    programs: dict[str, Step] = {}
    peaks: dict[str, int] = {}
    for name, most in (("limited", args.limit_bytes), ("unlimited", None)):
        make = functools.partial(autopar_step, args.worker / name)
        programs[name], peaks[name], _ = counted_peak(make, batch_of, most)
    turns = take_turns(programs, batch_of, args.steps, args.warmup)
    return {
        "benchmark": "memory: limit",
        "ranks": RANKS,
        "peak_bytes": peaks,
        **turns.summary(),
        **turns.ratios("limited", "unlimited"),
    }


def limit(args: argparse.Namespace) -> None:
    """The step with a third of what one rank would need, against the step without a limit; both as predicted."""
    import autopar
    from autopar.costmodel.calibrate import calibrate

    cluster = autopar.ClusterSpec.local(RANKS).with_profile(calibrate(quick=True, ranks=RANKS, say=lambda text: None))
    compile_on = functools.partial(
        autopar.compile,
        seeded_gpt(SEQ, WIDTH),
        example_inputs=make_batch(0, args.rows * RANKS, SEQ),
        loss_fn=next_token_loss,
        optimizer=OPTIMIZER,
    )
    alone = compile_on(autopar.ClusterSpec.local(1), options=autopar.Options(recompute="none", microbatches=1))
    args.limit_bytes = alone.predicted.peak_bytes / args.times
    programs = {
        "limited": compile_on(cluster, options=autopar.Options(memory_bytes=PLANNED_SHARE * args.limit_bytes)),
        "unlimited": compile_on(cluster, options=autopar.Options()),
    }
    predicted_s = {name: program.predicted.step_time_s for name, program in programs.items()}
    measured = on_ranks(args, "limit", RANKS, programs)
    ratio = round(predicted_s["limited"] / predicted_s["unlimited"], 3)
    print_json(
        {
            **measured,
            "limit_bytes": int(args.limit_bytes),
            "predicted_ms": {name: round(1e3 * s, 2) for name, s in predicted_s.items()},
            "predicted_ratio": ratio,
            "error_of_the_ratio": round(ratio / measured["ratio_of_medians"] - 1, 3),
            "plans": {name: program.plan.show_meshes() for name, program in programs.items()},
            "microbatches": {name: program.plan.microbatches for name, program in programs.items()},
        }
    )


def on_ranks(args: argparse.Namespace, case: str, ranks: int, programs: Mapping[str, Any]) -> dict[str, Any]:
    """The measurements of a case's workers on emitted programs."""
    arguments = [f"--{case}", "--steps", args.steps, "--warmup", args.warmup, "--rows", args.rows]
    return run_saved(__file__, ranks, programs, [*arguments, "--limit-bytes", args.limit_bytes], args.timeout)


def main() -> None:
    parser = command_line(__doc__, steps=30, warmup=3, worker=True)
    parser.add_argument("--zero3", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--limit", action="store_true")
    parser.add_argument("--against", nargs="+", default=[], help="some of the recompute cases, such as 'budget 0.5'")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", type=int, default=4, help="sequences per rank")
    parser.add_argument("--times", type=float, default=3.0, help="how much too large the model is for the limit")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one case's processes")
    parser.add_argument("--limit-bytes", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return as_worker(functools.partial(limit_worker if args.limit else zero3_worker, args))
    torch.set_num_threads(1)
    every = not (args.zero3 or args.recompute or args.limit)
    if every or args.zero3:
        for ranks in args.ranks:
            zero3(args, ranks)
    if every or args.recompute:
        from benchmarks.memory_recompute import recompute

        recompute(args.steps, args.warmup, args.against)
    if every or args.limit:
        limit(args)


if __name__ == "__main__":
    main()
