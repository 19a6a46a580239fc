"""Emitted programs against PyTorch's own parallelism on the same Gloo processes, one JSON object.

    python benchmarks/peers.py [--ranks 2] [--steps 20] [--only llama_tp …] [--profile FILE]

The same model, batch and fused AdamW; of every kind (data parallel, ZeRO-3, tensor parallel, 1F1B) the emitted program under that
plan, what autopar chooses by itself (on this machine as it was just calibrated), and hand-written programs with DDP, FSDP2,
DTensor and torch.distributed.pipelining, several settings each. All take turns (see harness.py); their losses must agree.
`ratio` compares with the fastest setting: the median of step-by-step ratios. Freed memory stays in the process, for all alike.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from autopar.runtime.memory.heap import keep_freed_memory  # noqa: E402
from benchmarks.harness import Step, as_worker, command_line, make_batch, print_json, run_workers, take_turns  # noqa: E402
from benchmarks.models import Gpt, Llama, LlamaShape, next_token_loss  # noqa: E402
from benchmarks.reference_steps import Model, autopar_step, ddp_step, fsdp2_step, pipelined_step  # noqa: E402
from benchmarks.tensor_parallel_steps import tensor_parallel_step  # noqa: E402

OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)
BATCH, SEQ, MICROBATCHES = 8, 128, 8
MODELS: dict[str, Callable[[], Model]] = {
    "gpt": lambda: Gpt(seq=SEQ, dim=256, layers=4),
    "llama": lambda: Llama(LlamaShape(layers=4, dim=256, ffn=704, heads=8, kv_heads=4, vocab=4096), SEQ),
}
PEERS: dict[str, dict[str, Callable[..., Step]]] = {
    "dp": {"ddp": ddp_step, "ddp 4 MB": functools.partial(ddp_step, bucket_mb=4.0)},
    "zero3": {"fsdp2": fsdp2_step, "fsdp2 kept": functools.partial(fsdp2_step, reshard=False)},
    "tp": {
        "tp": tensor_parallel_step,
        "tp sequence": functools.partial(tensor_parallel_step, sequence=True),
        "tp loss": functools.partial(tensor_parallel_step, vocabulary=True),
        "tp sequence loss": functools.partial(tensor_parallel_step, sequence=True, vocabulary=True),
    },
    "1f1b": {
        name: functools.partial(pipelined_step, microbatches=MICROBATCHES, schedule=name) for name in ("1F1B", "GPipe")
    },
}
CASES = tuple(f"{model}_{kind}" for model in MODELS for kind in PEERS)
batch_of = functools.partial(make_batch, batch=BATCH, seq=SEQ)


def options_of(kind: str, ranks: int, layers: int) -> dict[str, Any]:
    """The options that ask autopar for the plan of these peers."""
    if kind == "1f1b":
        cuts = [f"blocks.{layers * stage // ranks}" for stage in range(1, ranks)]
        return {"pp": ranks, "microbatches": MICROBATCHES, "schedule": "1f1b", "stage_boundaries": cuts}
    axis, strategy = ("tp", "megatron") if kind == "tp" else ("dp", kind)
    return {"mesh": {axis: ranks}, "strategy": strategy}


def seeded(model: str) -> Model:
    """The same weights wherever it is called."""
    torch.manual_seed(0)
    return MODELS[model]()


def measure(directory: Path, cases: Sequence[str], steps: int, warmup: int) -> dict[str, Any]:
    """One rank: the programs of every case in turn."""
    keep_freed_memory()
    results = {}
    for case in cases:
        model, kind = case.split("_")
        programs: dict[str, Step] = {"autopar": autopar_step(directory / case)}
        if (directory / model).exists():
            programs["autopar's choice"] = autopar_step(directory / model)
        for name, make_step in PEERS[kind].items():
            programs[name] = make_step(seeded(model), OPTIMIZER)
        turns = take_turns(programs, batch_of, steps, warmup)
        fastest = min(PEERS[kind], key=turns.median_s)
        ours = [name for name in programs if name not in PEERS[kind]]
        results[case] = {
            "ratio": {name: turns.ratios(name, fastest)["ratio_of_pairs"] for name in ours},
            "fastest_peer": fastest,
            **turns.summary(),
        }
    return {"benchmark": "peers", "ranks": dist.get_world_size(), "cases": results}


def compile_programs(directory: Path, cases: Sequence[str], ranks: int, profile: Mapping[str, Any]) -> dict[str, str]:
    """Writes one program per case and what is chosen without a word, which is told by model."""
    import autopar

    cluster = autopar.ClusterSpec.local(ranks).with_profile(profile)
    chosen = {}
    asked: dict[str, dict[str, Any]] = {}
    for case in cases:
        model, kind = case.split("_")
        asked |= {model: {}, case: options_of(kind, ranks, len(seeded(model).blocks))}
    for name, options in asked.items():
        program = autopar.compile(
            seeded(name.split("_")[0]),
            cluster,
            batch_of(0),
            loss_fn=next_token_loss,
            optimizer=OPTIMIZER,
            options=autopar.Options(**options),
        )
        program.save(directory / name)
        if not options:
            chosen[name] = f"{program.plan.show_meshes()}, {program.plan.origin}"
    return chosen


def main() -> None:
    parser = command_line(__doc__, steps=20, warmup=3, ranks=2, worker=True)
    parser.add_argument("--only", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--profile", type=Path, help="a profile to be read if it exists, else written")
    args = parser.parse_args()
    if args.worker:
        return as_worker(functools.partial(measure, args.worker, args.only, args.steps, args.warmup))
    from autopar.costmodel.calibrate import calibrate

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        profile = args.profile or Path(folder) / "profile.json"
        if not profile.exists():
            profile.write_text(json.dumps(calibrate(quick=True, ranks=args.ranks, say=lambda text: None)))
        chosen = compile_programs(Path(folder), args.only, args.ranks, json.loads(profile.read_text()))
        arguments = ["--worker", folder, "--steps", args.steps, "--warmup", args.warmup, "--only", *args.only]
        print_json({**run_workers(__file__, args.ranks, arguments), "chosen": chosen})


if __name__ == "__main__":
    main()
