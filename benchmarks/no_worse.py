"""Whether plans got worse: today's plans beside those of an older commit, both priced by today's account.

    PYTHONPATH=OLDER python benchmarks/no_worse.py record PLANS.json   # OLDER: the root of a checkout of the older commit
    python -m benchmarks.no_worse compare PLANS.json [OUT.json]        # today; exits with 1 where a plan is worse

Options: --only PATTERN (part of a case's name). A case is one call of `autopar.compile` with a model, a cluster and options
that leave something to the search. What counts is `ratio`: seconds of a step of today's plan over those of the older plan,
which today's program takes with `with_plan` and its account prices like any other. It says nothing of how good a price is,
only whether the search finds by today's prices what the older one found by its own. A plan records the cluster that it was
made for, and fitted constants are part of that: the older plan is replayed for the cluster as it is described today. It is
no rival, and `no_rival` says why, where it no longer fits the memory limit, or where a strategy that the options name means
other plans today; such a ratio counts for nothing.

Beside autopar's public face the script uses what both commits have, so it runs in either checkout.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import autopar
from autopar import ClusterSpec, Plan
from autopar.cluster.process import tensor_room
from autopar.passes.rules.structure import parameter_groups
from autopar.passes.shard.allowed import allowed_states
from benchmarks.harness import command_line
from benchmarks.models import LLAMA_405B, Gpt, Llama, LlamaShape, next_token_loss
from benchmarks.sameness import ADAMW, cases, of_model, of_zoo
from tests.zoo.models import MODELS

Compile = Callable[[], autopar.ParallelProgram]
WITHOUT_SEARCH = ("random", "refused", "own op", "zoo", "large")
"""First words of the cases of `benchmarks.sameness` that search for nothing, find nothing, or cannot be made twice; and of
those that are measured here already."""
AS_GOOD = 1 + 1e-9
"""Ratios up to here are the same plan, added up in another order."""


# --- cases


def decoder(
    layers: int, dim: int, cluster: ClusterSpec, batch: int, seq: int = 2048, **options: Any
) -> autopar.ParallelProgram:
    """A Llama in bf16 on the meta device, trained with AdamW. dim 16384: blocks of the 405B model."""
    shape = (
        dataclasses.replace(LLAMA_405B, layers=layers) if dim == LLAMA_405B.dim else LlamaShape.of_width(layers, dim)
    )
    with torch.device("meta"):
        model = Llama(shape, seq).to(torch.float32 if options.get("precision") else torch.bfloat16)
        ids = torch.zeros(batch, seq, dtype=torch.long)
    return of_model(model, cluster, (ids, ids), {"optimizer": ADAMW}, **options)


def small_gpt(cluster: ClusterSpec, batch: int, trained: bool = True, **options: Any) -> autopar.ParallelProgram:
    """The GPT of the benchmarks, 512 wide, in training or answering."""
    with torch.device("meta"):
        model, ids = Gpt(dim=512), torch.zeros(batch, 128, dtype=torch.long)
    if not trained:
        return of_model(model.eval(), cluster, (ids,), **options)
    return of_model(model, cluster, (ids, ids), {"loss_fn": next_token_loss, "optimizer": ADAMW}, **options)


def searched_cases() -> dict[str, Compile]:
    """Every case by its name: those of `benchmarks.sameness` that search, the zoo on more clusters, and decoders."""
    run, preset = functools.partial, ClusterSpec.preset
    h100, a100 = run(preset, "dgx-h100"), run(preset, "dgx-a100")
    some = run(ClusterSpec.homogeneous, device="h100")
    ethernet = run(ClusterSpec.homogeneous, device="a100", inter_bandwidth_Bps=1.25e9)
    tiers = some(devices=4).with_tiers()
    searched = {name: case for name, case in cases().items() if not name.startswith(WITHOUT_SEARCH)}
    for zoo in MODELS:
        searched[f"{zoo.name} on 8 h100"] = run(of_zoo, zoo.name, h100())
    return searched | {
        "gpt on 1 cpu": run(small_gpt, ClusterSpec.local(1), 16),
        "gpt on 8 cpus": run(small_gpt, ClusterSpec.local(8), 32),
        "gpt on 8 h100": run(small_gpt, h100(), 64),
        "gpt on 16 a100 over ethernet": run(small_gpt, ethernet(devices=16, devices_per_node=4), 64),
        "gpt inference on 8 a100": run(small_gpt, a100(), 64, trained=False),
        "decoder 4x1024 on 1 h100": run(decoder, 4, 1024, some(devices=1), 4),
        "decoder 4x1024 on 2 h100": run(decoder, 4, 1024, some(devices=2), 8),
        "decoder 8x1024 on 8 h100": run(decoder, 8, 1024, h100(), 16),
        "decoder 8x1024 on 8 h100 in bf16": run(decoder, 8, 1024, h100(), 16, precision="bf16"),
        "decoder 8x2048 on 8 a100": run(decoder, 8, 2048, a100(), 16),
        "decoder 8x2048 on 16 h100": run(decoder, 8, 2048, h100(2), 16),
        "decoder 8x2048 on 16 a100 over ethernet": run(decoder, 8, 2048, ethernet(devices=16, devices_per_node=8), 32),
        "decoder 8x2048 on 16 a100 over ethernet, 4 a node": run(
            decoder, 8, 2048, ethernet(devices=16, devices_per_node=4), 16
        ),
        "decoder 8x2048 on 8 h100 in 4 stages": run(decoder, 8, 2048, h100(), 16, pp=4),
        "decoder 8x2048 on 8 h100 in 2 stages, 8 microbatches": run(decoder, 8, 2048, h100(), 16, pp=2, microbatches=8),
        "decoder 8x2048 on 8 h100, dp=2 tp=4 in 4 microbatches": run(
            decoder, 8, 2048, h100(), 16, mesh={"dp": 2, "tp": 4}, microbatches=4
        ),
        "decoder 8x2048 on 8 h100, three axes": run(decoder, 8, 2048, h100(), 8, mesh={"dp": 2, "tp": 2, "cp": 2}),
        "decoder 8x2048 on 8 h100, all recomputed": run(decoder, 8, 2048, h100(), 16, recompute="full", pp=1),
        "decoder 8x2048 on 8 h100, attention recomputed": run(decoder, 8, 2048, h100(), 16, recompute="selective"),
        "decoder 8x2048 on 8 h100, short memory": run(decoder, 8, 2048, h100(), 32, memory_bytes=6e9),
        "decoder 8x2048 on 8 h100, shorter memory": run(decoder, 8, 2048, h100(), 32, memory_bytes=3e9),
        "decoder 8x2048 on 4 h100, memory tiers": run(decoder, 8, 2048, tiers, 8, memory_bytes=4e9),
        "decoder 16x4096 on 8 h100": run(decoder, 16, 4096, h100(), 8),
        "decoder 32x4096 on 16 a100": run(decoder, 32, 4096, a100(2), 16),
        "decoder 32x4096 on 64 h100": run(decoder, 32, 4096, h100(8), 64),
        "decoder 16x8192 on 16 h100": run(decoder, 16, 8192, h100(2), 16),
        "decoder 16x8192 on 64 h100": run(decoder, 16, 8192, h100(8), 128),
        "decoder 8x16384 on 64 h100": run(decoder, 8, 16384, h100(8), 64),
    }


@mock.patch("time.monotonic", new=float)  # no deadline of a search passes, however busy the machine is
def compiled(only: str) -> Iterator[tuple[str, autopar.ParallelProgram | str]]:
    """Name and program of every case whose name contains `only`; what the compiler says where it refuses."""
    torch.set_num_threads(1)
    for name, compile_case in searched_cases().items():
        if only not in name:
            continue
        torch.manual_seed(0)
        before = time.process_time()
        try:
            program: autopar.ParallelProgram | str = compile_case()
        except autopar.AutoparError as error:
            program = f"{type(error).__name__}: {error}"
        print(f"{time.process_time() - before:6.1f} s  {name}", file=sys.stderr, flush=True)
        yield name, program


# --- one plan beside another


def recorded(program: autopar.ParallelProgram | str) -> dict[str, Any]:
    """The record of a case of the older commit: its plan, or why there is none."""
    return {"error": program} if isinstance(program, str) else {"plan": program.plan.to_dict()}


def priced(program: autopar.ParallelProgram) -> dict[str, Any]:
    """A plan in words, with its seconds and bytes by today's account."""
    plan, predicted = program.plan, program.predicted
    words = f"{plan.origin} {plan.show_meshes()}"
    return {"plan": words, "step_s": predicted.step_time_s, "peak_bytes": predicted.peak_bytes}


def limit_bytes(program: autopar.ParallelProgram) -> float:
    """Bytes that tensors of a plan may take on every rank at most."""
    options = program.options
    if options.memory_bytes is not None:
        return options.memory_bytes
    cluster, share = program.cluster, options.memory_fraction
    return min(tensor_room(cluster, None, device, share * device.memory_bytes) for _, device in cluster.devices)


def is_asked_for(program: autopar.ParallelProgram) -> bool:
    """Whether the strategy and the constraints of the options leave the choices of the program's plan."""
    options, groups = program.options, parameter_groups(program.ir)
    for stage in program.plan.stages:
        allowed = allowed_states(program.ir, stage.mesh, program.rules, options.strategy, options.constraints)
        states: list[tuple[tuple[str, ...], Any]] = []
        for name, template in stage.templates.items():
            states += [(("op", name, op), strategy) for op, strategy in template.strategies.items()]
            states += [(("at", name, value), spec) for value, spec in template.specs.items()]
        stored = {name: p for name, p in stage.parameters.items() if name in groups}
        states += [(("param", name), (p.storage, p.optimizer)) for name, p in stored.items()]
        if allowed is not None and not all(allowed(key, state) for key, state in states):
            return False
    return True


def compared(program: autopar.ParallelProgram | str, older: dict[str, Any]) -> dict[str, Any]:
    """Today's plan beside the older one. ratio: seconds of a step, today's over the older's. no_rival: why the older plan is
    none, or "" where it is one."""
    if "error" in older:
        return {"ratio": None, "no_rival": older["error"]}
    if isinstance(program, str):
        return {"ratio": math.inf, "no_rival": "", "today": program}
    plan = dataclasses.replace(Plan.from_dict(older["plan"]), cluster=program.cluster.fingerprint())
    try:
        replayed = program.with_plan(plan)
    except autopar.AutoparError as error:
        return {"ratio": None, "no_rival": f"{type(error).__name__}: {error}"}
    today, rival = priced(program), priced(replayed)
    no_rival = ""
    if rival["peak_bytes"] > limit_bytes(program):
        no_rival = "it takes more than the memory limit"
    elif not is_asked_for(replayed):
        no_rival = f"strategy {program.options.strategy!r} does not leave its choices today"
    return {
        "ratio": today["step_s"] / rival["step_s"],
        "no_rival": no_rival,
        "gap": program.solver.gap,
        "today": today,
        "older": rival,
        "limit_bytes": limit_bytes(program),
    }


def summary(entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How many cases have a rival; of their ratios the worst and the geometric mean, and the cases above 1, worst first."""
    ratios = {name: entry["ratio"] for name, entry in entries.items() if not entry["no_rival"]}
    worse = sorted((name for name in ratios if ratios[name] > AS_GOOD), key=lambda name: -ratios[name])
    return {
        "cases": len(entries),
        "with_rival": len(ratios),
        "worst": max(ratios.values(), default=None),
        "mean": statistics.geometric_mean(ratios.values()) if ratios else None,
        "worse": worse,
    }


def main() -> None:
    """Record or compare, as the command line says."""
    parser = command_line(__doc__)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("plans", type=Path, help="what `record` writes and `compare` reads")
    parser.add_argument("out", type=Path, nargs="?", help="where `compare` writes; without it, the standard output")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    if args.command == "record":
        args.plans.write_text(json.dumps({name: recorded(p) for name, p in compiled(args.only)}) + "\n")
        return
    plans = json.loads(args.plans.read_text())
    entries = {name: compared(program, plans[name]) for name, program in compiled(args.only)}
    result = {"cases": entries, "summary": summary(entries)}
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    if args.out is None:
        print(text, end="")
    else:
        args.out.write_text(text)
    sys.exit(bool(result["summary"]["worse"]))


if __name__ == "__main__":
    main()
