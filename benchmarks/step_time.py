"""Emitted programs against DDP and FSDP2: the same GPT, batch and optimizer on two Gloo processes, one JSON object.

    python benchmarks/step_time.py [--steps 40] [--ranks 2]

All four programs take turns; see turns.py for how a step is timed. The losses of all four must agree.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.models import next_token_loss, seeded_gpt  # noqa: E402
from benchmarks.reference_steps import autopar_step, ddp_step, fsdp2_step  # noqa: E402
from benchmarks.turns import Step, as_worker, make_batch, print_json, run_workers, take_turns  # noqa: E402

OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-3)
REFERENCES = {"dp": ("ddp", ddp_step), "zero3": ("fsdp2", fsdp2_step)}
batch_of = functools.partial(make_batch, batch=8, seq=128)


def measure(directory: Path, steps: int, warmup: int) -> dict[str, Any]:
    """One rank: all four programs in turn."""
    programs: dict[str, Step] = {}
    for strategy, (reference, make_step) in REFERENCES.items():
        programs[strategy] = autopar_step(directory / strategy)
        programs[reference] = make_step(seeded_gpt(), OPTIMIZER)
    turns = take_turns(programs, batch_of, steps, warmup)
    ratios = {f"{ours}/{theirs}": turns.ratios(ours, theirs) for ours, (theirs, _) in REFERENCES.items()}
    return {
        "benchmark": "step_time",
        "ranks": dist.get_world_size(),
        **turns.summary(),
        **{
            kind: {pair: both[kind] for pair, both in ratios.items()} for kind in ("ratio_of_medians", "ratio_of_pairs")
        },
    }


def compile_programs(directory: Path, ranks: int) -> None:
    """Writes one program per strategy."""
    import autopar

    for strategy in REFERENCES:
        program = autopar.compile(
            seeded_gpt(),
            autopar.ClusterSpec.local(ranks),
            batch_of(0),
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
        return as_worker(functools.partial(measure, args.worker, args.steps, args.warmup))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        compile_programs(Path(directory), args.ranks)
        arguments = ("--worker", directory, "--steps", args.steps, "--warmup", args.warmup)
        print_json(run_workers(__file__, args.ranks, arguments))


if __name__ == "__main__":
    main()
