"""Emitted programs against DDP and FSDP2: the same GPT, batch and optimizer on two Gloo processes, one JSON object.

    python benchmarks/step_time.py [--steps 40] [--ranks 2]

All four programs take turns; see turns.py for how a step is timed. The losses of all four must agree. The optimizer is torch's
fused AdamW on all sides; FSDP2 keeps the root's parameters gathered between forward and backward, as it does by default.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.models import next_token_loss, seeded_gpt  # noqa: E402
from benchmarks.reference_steps import autopar_step, ddp_step, fsdp2_step  # noqa: E402
from benchmarks.turns import Step, make_batch, measure_saved, take_turns  # noqa: E402

OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)
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
    measure_saved(__doc__, __file__, compile_programs, measure, steps=40, warmup=5)


if __name__ == "__main__":
    main()
