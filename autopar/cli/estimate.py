"""`autopar estimate`: seconds and bytes of a training step for a transformer, a cluster and a plan.

With `--search` these are the best plans that were found: `--config config.json --cluster cluster.yaml --batch 512 --search`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autopar.cli.cluster_argument import read_cluster
from autopar.cli.command import Commands, add, alone
from autopar.cli.model_config import read_config
from autopar.cli.terminal import show
from autopar.cluster import ClusterSpec
from autopar.costmodel.estimator.search import SearchResult, reason, search
from autopar.costmodel.estimator.shape import ParallelConfig, TransformerShape
from autopar.costmodel.estimator.step import Estimate, estimate
from autopar.costmodel.estimator.workload import StepPlan
from autopar.costmodel.software import Software, emitted_on
from autopar.errors import ConstraintError, InputError
from autopar.report.table import Table

_LLAMA3: dict[str, Any] = {"kv_heads": 8, "vocab": 128256, "seq_len": 8192, "gated_mlp": True}
_GPT: dict[str, Any] = {"gated_mlp": False}

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {**_GPT, "layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "vocab": 50257, "seq_len": 1024},
    "gpt3-175b": {**_GPT, "layers": 96, "hidden": 12288, "heads": 96, "ffn": 49152, "vocab": 51200, "seq_len": 2048},
    "llama3-8b": {**_LLAMA3, "layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336},
    "llama3-70b": {**_LLAMA3, "layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672},
    "llama3-405b": {**_LLAMA3, "layers": 126, "hidden": 16384, "heads": 128, "ffn": 53248},
    "mixtral-8x7b": {
        **_LLAMA3,
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "ffn": 14336,
        "vocab": 32000,
        "seq_len": 4096,
        "experts": 8,
        "topk": 2,
    },
}


def parse_plan(text: str) -> dict[str, int]:
    """`dp=8,tp=4` as a dict. Raises ConstraintError."""
    plan = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key.strip() not in ("dp", "tp", "pp", "cp", "ep", "vpp", "zero") or not value.strip().isdigit():
            raise ConstraintError(
                f"--plan: {part!r} is not one of dp, tp, pp, cp, ep, vpp, zero = number, e.g. dp=8,tp=4"
            )
        plan[key.strip()] = int(value)
    return plan


def read_model(args: argparse.Namespace) -> TransformerShape:
    """The shape from --model or --config. Raises InputError."""
    if args.config:
        return TransformerShape.from_hf_config(read_config(args.config), args.seq_len)
    if args.model not in MODELS:
        raise InputError(f"unknown model {args.model!r}; known: {', '.join(MODELS)}; or use --config config.json")
    fields = dict(MODELS[args.model])
    if args.seq_len:
        fields["seq_len"] = args.seq_len
    return TransformerShape(**fields, name=args.model)


def estimate_table(e: Estimate, cluster: ClusterSpec, batch: int, why: str) -> Table:
    """One estimate as a table. batch: sequences of a step; why: what the plan loses time to."""
    rows = [
        ("step", f"{e.step_time_s:.4g} s"),
        ("batch", f"{batch:,} sequences on {cluster.size:,} devices"),
        ("tokens/s", f"{e.tokens_per_s_per_device * cluster.size:,.0f}"),
        ("tokens/s per device", f"{e.tokens_per_s_per_device:,.0f}"),
        ("model FLOPs utilisation", f"{e.mfu:.1%}"),
        ("bubble", f"{e.bubble_fraction:.1%}"),
    ]
    for name, seconds in e.breakdown.items():
        rows.append((f"  {name.replace('_', ' ')}", f"{seconds:.4g} s  ({seconds / e.step_time_s:.1%})"))
    for kind, what in e.comm.items():
        exposed = f"{what['total_s']:.4g} s, {what['exposed_share']:.1%} of the step exposed"
        rows.append((f"{kind} communication", exposed))
    rows += [(f"memory: {kind}", f"{held / 1e9:.2f} GB") for kind, held in e.memory_bytes.items() if held]
    room = cluster.pace(0, cluster.size).memory_bytes / 1e9
    rows.append(("fits", f"{'yes' if e.fits else 'NO'} (device has {room:.1f} GB)"))
    rows.append(("why", why))
    return Table((), rows, title=f"{cluster.name}: {cluster.size} x {cluster.pace(0, cluster.size).name}")


def search_table(result: SearchResult) -> Table:
    """The best plans as a table."""
    title = (
        f"{result.enumerated} parts of the space: {result.out_of_memory} too large, {result.pruned} pruned by "
        f"their bound, {result.timed} timed"
    )
    sizes = ("dp", "tp", "pp", "cp", "ep", "vpp", "zero", "micro")
    fastest_s = min((c.estimate.step_time_s for c in result.best), default=0.0)
    rows = []
    for c in result.best:
        p, e = c.plan.parallel, c.estimate
        numbers = (p.dp, p.tp, p.pp, p.cp, p.ep, p.vpp or 1, p.zero, c.plan.micro_batch)
        held = f"{e.memory_bytes['reserved'] / 1e9:.1f}"
        choices = (c.plan.recompute, c.plan.schedule, c.reason)
        slower = f"{e.step_time_s / fastest_s - 1:.1%}" if e.step_time_s > fastest_s else ""
        rows.append((f"{e.step_time_s:.4g}", slower, f"{e.mfu:.1%}", held, *map(str, numbers), *choices))
    head = ("step s", "slower", "MFU", "GB", *sizes, "recompute", "schedule", "why")
    return Table(head, rows, right=tuple(range(4 + len(sizes))), title=title)


EXAMPLE = "autopar estimate --model llama3-8b --cluster dgx-h100 --nodes 4 --batch 128 --plan dp=8,tp=4"


def add_parser(commands: Commands) -> None:
    """The command among those of `autopar`."""
    p = add(commands, "estimate", run, __doc__, EXAMPLE)
    p.add_argument("--model", default="llama3-8b", help=f"one of {', '.join(MODELS)}")
    p.add_argument("--config", help="a Hugging Face config.json instead of --model")
    p.add_argument("--seq-len", type=int, help="sequence length (default: the model's)")
    p.add_argument("--cluster", default="dgx-h100", help="a preset, a cluster file (YAML, JSON), or here: this machine")
    p.add_argument("--nodes", type=int, default=1, help="nodes of the preset")
    p.add_argument("--batch", type=int, required=True, help="sequences per step")
    p.add_argument("--micro-batch", type=int, default=1)
    p.add_argument("--plan", default="", help="e.g. dp=8,tp=4,pp=2,zero=1; dp fills what is left out")
    p.add_argument("--sequence-parallel", action=argparse.BooleanOptionalAction, default=None)
    p.add_argument("--recompute", default="none", choices=("none", "selective", "mlp", "full"))
    p.add_argument(
        "--precision", help="bf16, fp16, fp32, fp8, mxfp8, fp4 (default: the first of these that all devices have)"
    )
    p.add_argument("--schedule", default="1f1b")
    p.add_argument(
        "--kernels", default="fused", choices=("fused", "eager", "emitted"), help="emitted: as compiled programs are"
    )
    p.add_argument("--offload", default="none", choices=("none", "activations", "optimizer"))
    p.add_argument("--search", action="store_true", help="find the best plans")
    p.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the estimate, or the best plans; 0. Raises AutoparError."""
    model, cluster = read_model(args), read_cluster(args.cluster, args.nodes)
    asked = args.precision or cluster.half_dtype
    precision = asked if asked == "mxfp8" else {"fp4": "float4"}.get(asked, asked)
    is_emitted = args.kernels == "emitted"
    software = replace(emitted_on(cluster), precision=precision) if is_emitted else Software(precision, args.kernels)
    if args.search:
        result = search(model, cluster, batch=args.batch, software=software)
        if args.json:
            print(json.dumps(found_plans(result), indent=1))
        else:
            show(search_table(result))
        return 0
    sizes = parse_plan(args.plan)
    rest = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
    sizes.setdefault("dp", max(1, cluster.size // rest))
    sequence = sizes.get("tp", 1) > 1 if args.sequence_parallel is None else args.sequence_parallel
    parallel = ParallelConfig(**sizes, sequence_parallel=sequence)
    plan = StepPlan(parallel, args.micro_batch, args.recompute, args.schedule, args.offload)
    e = estimate(model, cluster, plan, batch=args.batch, software=software)
    if args.json:
        print(json.dumps({**e.to_dict(), "reason": reason(e, plan)}, indent=1))
    else:
        show(estimate_table(e, cluster, args.batch, reason(e, plan)))
    return 0


def found_plans(result: SearchResult) -> list[dict[str, Any]]:
    """The best plans with their estimates, as plain data."""
    return [
        {
            "parallel": c.plan.parallel.__dict__,
            "micro_batch": c.plan.micro_batch,
            "recompute": c.plan.recompute,
            "schedule": c.plan.schedule,
            "reason": c.reason,
            **c.estimate.to_dict(),
        }
        for c in result.best
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """`autopar-estimate`, the command as a program of its own."""
    return alone("estimate", add_parser, argv)


if __name__ == "__main__":
    sys.exit(main())
