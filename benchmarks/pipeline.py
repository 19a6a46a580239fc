"""Pipelines: emitted 1F1B against torch.distributed.pipelining, and the prediction against the clock, one JSON object.

    python benchmarks/pipeline.py [--steps 40] [--microbatches 8]      two Gloo processes

The same GPT, cut at the same block into two stages, with the same microbatches and optimizer. Both programs take turns
(see harness.py), and their losses must agree. `predicted` is the compiler's, from a profile calibrated on this machine just
before; `simulated_from_actions` simulates the schedule with the seconds that each action took here.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness import as_worker, command_line, make_batch, print_json, run_saved, take_turns  # noqa: E402
from benchmarks.models import next_token_loss, seeded_gpt  # noqa: E402
from benchmarks.reference_steps import pipelined_step  # noqa: E402

OPTIMIZER = functools.partial(torch.optim.SGD, lr=1e-2)
RECORDED_STEPS = 8
batch_of = functools.partial(make_batch, batch=32, seq=128)


def measure(directory: Path, steps: int, warmup: int, microbatches: int) -> dict[str, Any]:
    """One rank: both programs in turn, then the emitted one's actions."""
    import autopar

    ours = autopar.load(directory / "pipeline")
    programs = {
        "autopar": lambda batch: float(ours(batch)),
        "torch": pipelined_step(seeded_gpt(), OPTIMIZER, microbatches),
    }
    turns = take_turns(programs, batch_of, steps, warmup)
    return {
        "benchmark": "pipeline",
        "ranks": dist.get_world_size(),
        "microbatches": microbatches,
        **turns.summary(),
        **turns.ratios("autopar", "torch"),
        "autopar_s": turns.median_s("autopar"),
        "actions": recorded_actions(ours.session, warmup + steps),
    }


def recorded_actions(session: Any, first: int) -> list[tuple[str, float]]:
    """Seconds of every action of a few recorded steps, of all ranks."""
    from autopar.runtime.comm.recorder import Recorder

    session.recorder = recorder = Recorder(session.comm.device)
    for index in range(RECORDED_STEPS):
        dist.barrier()
        session.train_step(list(batch_of(first + index)))
    session.recorder = None
    own = [(s.name, s.end_s - s.start_s) for step in recorder.steps for s in step.spans if "." in s.name]
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    return [action for actions in by_rank for action in actions]


def simulated_s(account: Any, actions: Sequence[tuple[str, float]]) -> float:
    """Seconds of the schedule when every (stage, kind) takes the median of what was recorded."""
    from autopar.costmodel.simulate import makespan_s

    seconds: dict[tuple[int, str], list[float]] = {}
    for name, taken in actions:
        seconds.setdefault((int(name.rpartition(".")[2]), name[0]), []).append(taken)
    durations = {key: statistics.median(values) for key, values in seconds.items()}
    once_a_step_s = max(stage.step_s for stage in account.stages)
    return makespan_s(account.table, account.graph, durations, account.hand_over) + once_a_step_s


def main() -> None:
    parser = command_line(__doc__, steps=40, warmup=5, worker=True)
    parser.add_argument("--microbatches", type=int, default=8)
    args = parser.parse_args()
    if args.worker:
        return as_worker(functools.partial(measure, args.worker, args.steps, args.warmup, args.microbatches))

    import autopar
    from autopar.costmodel.calibrate import calibrate

    torch.set_num_threads(1)
    model = seeded_gpt()
    program = autopar.compile(
        model,
        autopar.ClusterSpec.local(2).with_profile(calibrate(quick=True, ranks=2, say=lambda text: None)),
        batch_of(0),
        loss_fn=next_token_loss,
        optimizer=OPTIMIZER,
        options=autopar.Options(
            pp=2, microbatches=args.microbatches, schedule="1f1b", stage_boundaries=[f"blocks.{len(model.blocks) // 2}"]
        ),
    )
    arguments = ["--steps", args.steps, "--warmup", args.warmup, "--microbatches", args.microbatches]
    result = run_saved(__file__, 2, {"pipeline": program}, arguments)
    measured_s, simulated = result.pop("autopar_s"), simulated_s(program.account, result.pop("actions"))
    predicted_s = program.predicted.step_time_s
    result |= {
        "predicted_ms": round(1e3 * predicted_s, 2),
        "prediction_error": round(predicted_s / measured_s - 1, 3),
        "simulated_from_actions_ms": round(1e3 * simulated, 2),
        "simulation_error": round(simulated / measured_s - 1, 3),
    }
    print_json(result)


if __name__ == "__main__":
    main()
