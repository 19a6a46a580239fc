"""Whether two commits compile alike: what the compiler produces for some 150 requests, recorded and compared.

    python -m benchmarks.sameness record OUT.json [--only PATTERN]   # in a checkout; PATTERN is part of a case's name
    python -m benchmarks.sameness compare A.json B.json              # exits with 1 where anything differs

Cases are every option once ("schedule zb-v", "tight memory"), every model of the zoo under every option set of the
differential suite ("zoo mlp pp=2"), and three models as people train them, of which the plan is kept ("large …").

A case is one call of `autopar.compile`. Kept of it are the prediction, the alternatives, the report and every emitted
file (the plan among them), or the error. Python is kept without comments, docstrings and the order of definitions; times
of the compilation itself and line numbers of models are left out. So a change of the compiler that is to change nothing
may move, rename and retype what it likes, and whatever else it does to a user's program shows. The script uses autopar's
public face and the small models of the tests alone, which is why it runs on commits that are organised differently.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import json
import operator
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import ClusterSpec
from benchmarks.models import LLAMA_8B, LLAMA_405B
from benchmarks.models import Llama as LargeLlama
from benchmarks.published_models import MIXTRAL, Transformer
from tests.branching import Driving, driving_batch, driving_loss
from tests.differential.suite import OPTION_SETS
from tests.zoo.models import ADAMW, BY_NAME, MODELS, SGD, token_loss
from tests.zoo.transformers import Gpt2, Llama

ROOT = str(Path(__file__).resolve().parent.parent)
MADE_BY = ("timings", "torch", "python", "files")  # entries of program.json that do not depend on the request alone
SHOWN = 24  # lines of a diff that are printed per case
NUMBERS = operator.attrgetter("step_time_s", "comm_time_s", "peak_bytes")
COSINE = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=5)
Recording = dict[str, dict[str, str]]


# --- what the tests do not share


class WithOp(nn.Module):
    """Two products with an op between them."""

    def __init__(self, op: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.op = nn.Linear(16, 64), op
        self.scale, self.down = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.up(x), self.scale) @ self.down


def scaled_rms(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """An op that the compiler is taught: rows divided by their root mean square."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale


def some_rows(x: Tensor, scale: Tensor) -> Tensor:
    """An op that cannot be captured, as its shape depends on data."""
    return x[x.sum(dim=1) > 0] * scale


def parameter_groups(named_parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Matrices decay, the rest does not."""
    parameters = [p for _, p in named_parameters]
    groups = [{"params": [p for p in parameters if (p.ndim > 1) == big], "weight_decay": 0.1 * big} for big in (1, 0)]
    return torch.optim.AdamW(groups, lr=lr)


def two_optimizers(named_parameters: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for matrices, which it takes whole, and AdamW for the rest."""
    parameters = [p for _, p in named_parameters]
    muon = torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.02)
    return muon, torch.optim.AdamW([p for p in parameters if p.ndim != 2], lr=0.01)


# --- ways to compile


def of_model(
    model: nn.Module, cluster: ClusterSpec | int, batch: Any, given: dict[str, Any] | None = None, **options: Any
) -> autopar.ParallelProgram:
    """Compiled with time enough for every solver to finish; `given` are further arguments of compile."""
    where = ClusterSpec.local(cluster) if isinstance(cluster, int) else cluster
    chosen = autopar.Options(**{"solver_time_limit_s": 600.0, "explain_s": 0.0, **options})
    return autopar.compile(model, where, batch, options=chosen, **(given or {}))


def of_zoo(
    name: str, cluster: ClusterSpec | int = 4, given: dict[str, Any] | None = None, **options: Any
) -> autopar.ParallelProgram:
    """A zoo model in training."""
    zoo = BY_NAME[name]
    arguments = {"loss_fn": zoo.loss_fn, "optimizer": zoo.optimizer, **(given or {})}
    return of_model(zoo.make(), cluster, zoo.batch(), arguments, **options)


def inferred(name: str, cluster: ClusterSpec | int = 4, **options: Any) -> autopar.ParallelProgram:
    """A zoo model that only answers."""
    return of_model(BY_NAME[name].make().eval(), cluster, BY_NAME[name].inference_batch(), **options)


def at_random(name: str, ranks: int, seed: int, microbatches: int = 1, **forced: Any) -> autopar.ParallelProgram:
    """A zoo model under a random plan, which is read from a file."""
    start = of_zoo(name, ranks, mesh={"dp": ranks}, strategy="dp", pp=1, microbatches=microbatches)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "plan.json"
        autopar.random_plan(start, seed, **forced).save(path)
        return of_zoo(name, ranks, {"plan": path}, microbatches=microbatches)


def of_text(
    kind: type[Gpt2] | type[Llama], cluster: ClusterSpec | int, batch: int = 16, width: int = 64, **options: Any
) -> autopar.ParallelProgram:
    """Four blocks on the meta device, which have no weights to write: a GPT-2 with dropout, tied, or a Llama."""
    given = {"loss_fn": token_loss if kind is Gpt2 else None, "optimizer": ADAMW}
    with torch.device("meta"):
        model, ids = kind(128, 32, width, layers=4), torch.empty(batch, 32, dtype=torch.long)
    return of_model(model, cluster, (ids, ids), given, **options)


def under_options(name: str, options: str) -> autopar.ParallelProgram:
    """A zoo model under an option set of the differential suite."""
    program = of_zoo(name, **OPTION_SETS[options])
    return program.with_plan(autopar.random_plan(program, len(name))) if options == "random plan" else program


def large(make: Callable[[], nn.Module], devices: int, batch: int, seq: int) -> autopar.ParallelProgram:
    """A model in bf16 on the meta device, trained with AdamW on so many H100, everything searched."""
    with torch.device("meta"):
        model, ids = make().to(torch.bfloat16), torch.zeros(batch, seq, dtype=torch.long)
    cluster = ClusterSpec.preset("dgx-h100", nodes=devices // 8)
    return of_model(model, cluster, (ids, ids), {"optimizer": ADAMW})


LARGE: dict[str, Callable[[], autopar.ParallelProgram]] = {
    "large 8B on 8": functools.partial(large, functools.partial(LargeLlama, LLAMA_8B, 4096), 8, 16, 4096),
    "large 405B on 16384": functools.partial(large, functools.partial(LargeLlama, LLAMA_405B, 8192), 16384, 2048, 8192),
    "large Mixtral on 64": functools.partial(large, functools.partial(Transformer, MIXTRAL), 64, 256, 4096),
}


# --- cases


def cases() -> dict[str, Callable[[], Any]]:
    """Every case by its name."""
    run, taught = functools.partial, autopar.register_op("n d!, d! -> n d!")(scaled_rms)
    h100 = run(ClusterSpec.preset, "dgx-h100")
    slow = run(ClusterSpec.homogeneous, device="cpu", inter_bandwidth_Bps=1e8)
    nodes = [{"count": 1, "device": device, "devices_per_node": 2} for device in ("h100", "a100")]
    mixed, tiers = ClusterSpec.from_dict({"name": "mixed", "nodes": nodes}), ClusterSpec.local(2).with_tiers()
    square: dict[str, Any] = {"mesh": {"dp": 2, "tp": 2}}
    whole: dict[str, Any] = {"strategy": "dp", "mesh": {"dp": 2}, "recompute": "none"}
    grouped = {"optimizer": run(parameter_groups, lr=0.01), "scheduler": COSINE}
    clipped = {"clip_grad_norm": 0.3, "loss_scaling": autopar.LossScaling(64.0)}
    own = (torch.zeros(32, 16), torch.zeros(32, dtype=torch.long)), {"loss_fn": F.cross_entropy, "optimizer": ADAMW}
    layers, rows = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.zeros(512, 64)
    wide = layers, slow(devices=8, devices_per_node=4), (rows, rows), {"loss_fn": F.mse_loss, "optimizer": SGD}
    seen = driving_batch(16), {"loss_fn": driving_loss, "optimizer": SGD}
    found: dict[str, Callable[[], Any]] = {f"auto {zoo.name}": run(of_zoo, zoo.name) for zoo in MODELS}
    found |= {f"zoo {zoo.name} {name}": run(under_options, zoo.name, name) for zoo in MODELS for name in OPTION_SETS}
    for name in ("bert", "recommender", "resnet"):
        found[f"inference {name}"] = run(inferred, name)
    for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-auto", "zb-v"):
        found[f"schedule {name}"] = run(of_text, Llama, 4, width=32, schedule=name, pp=2, microbatches=4)
    for name in ("none", "selective", "full"):
        found[f"recompute {name}"] = run(of_text, Llama, 2, recompute=name, pp=1)
    for name in ("optimizer", "activations", "parameters", "all"):
        found[f"offload {name}"] = run(of_text, Gpt2, tiers, offload=name, strategy="zero3", microbatches=2)
    return found | {
        "dp gpt2": run(of_zoo, "gpt2", strategy="dp"),
        "zero1 llama in 4 microbatches": run(of_zoo, "llama", 2, strategy="zero1", microbatches=4),
        "megatron t5": run(of_zoo, "t5", strategy="megatron", **square),
        "mesh of three axes": run(of_zoo, "llama", 8, mesh={"dp": 2, "tp": 2, "cp": 2}),
        "resnet in 2 microbatches": run(of_zoo, "resnet", 2, microbatches=2, pp=1, compensated_sums=True),
        "random moe": run(at_random, "moe", 8, 2),
        "random llama zb-v": run(at_random, "llama", 4, 3, 2, pp=2, schedule="zb-v"),
        "random t5 zb-h1": run(at_random, "t5", 4, 4, 2, pp=3, schedule="zb-h1"),
        "pp=2 mlp": run(of_zoo, "mlp", pp=2),
        "pp=2 of tp=2 llama": run(of_zoo, "llama", pp=2, mesh={"tp": 2}, microbatches=2),
        "pp=2 of zero3 vit": run(of_zoo, "vit", pp=2, strategy="zero3", microbatches=2),
        "pp=2 inference": run(inferred, "gpt2", pp=2, microbatches=2),
        "stage boundaries": run(of_text, Llama, 3, stage_boundaries=["blocks.1", "blocks.3"]),
        "constraints": run(of_zoo, "mlp", constraints={"layers.0.weight": "[@tp, .]"}, **square),
        "ranks placed": lambda: of_model(*wide, mesh={"tp": 4, "dp": 2}, constraints={"*.weight": "[@tp, .]"}),
        "tight memory": run(of_text, Llama, 2, batch=8, memory_bytes=2.3e6, pp=1, microbatches=1),
        "tight memory pp=2": run(of_text, Llama, 2, batch=8, memory_bytes=2.1e6, pp=2),
        "tight memory with tiers": run(of_zoo, "mlp", tiers, memory_bytes=5e4, pp=1, microbatches=1),
        "bf16 llama": run(of_zoo, "llama", strategy="zero3", precision="bf16"),
        "fp16 gpt2": run(of_zoo, "gpt2", 2, {"loss_scaling": True}, precision="fp16"),
        "branches": lambda: of_model(Driving(32, (2, 1, 1)), slow(devices=4, devices_per_node=2), *seen),
        "branches tied": lambda: of_model(Driving(32, (1, 1, 1), tied=True), 4, *seen, microbatches=2),
        "two optimizers": run(of_zoo, "mlp", 4, {"optimizer": two_optimizers}, **square),
        "parameter groups": run(of_zoo, "vit", 2, grouped),
        "clipping and scaling": run(of_zoo, "lstm", 2, clipped, strategy="zero3"),
        "own op": lambda: of_model(WithOp(taught), 4, *own, mesh={"dp": 4}, strategy="zero1"),
        "two kinds of devices": run(of_zoo, "gpt2", mixed),
        "two kinds of devices pp=2": run(of_zoo, "mlp", mixed, pp=2, microbatches=4),
        "h100 mesh": run(of_text, Gpt2, h100(), strategy="megatron", mesh={"dp": 2, "tp": 4}),
        "h100 search": run(of_text, Llama, h100()),
        "h100 pipelines": run(of_text, Gpt2, h100(2), batch=32, pp=4),
        "h100 inference": run(inferred, "llama", h100()),
        "refused for memory": run(of_zoo, "mlp", 2, memory_bytes=1e4, pp=1),
        "refused with advice": run(of_zoo, "mlp", 2, memory_bytes=6e4, explain_s=600.0, microbatches=1, **whole),
        "refused pipeline": run(of_zoo, "mlp", 2, memory_bytes=1e4, pp=2, microbatches=4),
        "refused constraint": run(of_zoo, "mlp", constraints={"nothing.like.it": "[., .]"}),
        "refused capture": lambda: of_model(WithOp(some_rows), 2, *own),
        **LARGE,
    }


# --- recording


def bare_python(source: str) -> str:
    """Python without comments, docstrings and imports of the runtime, its functions and classes last and sorted by name."""
    tree = ast.parse(source)
    tree.body = [
        s for s in tree.body if not (isinstance(s, ast.ImportFrom) and (s.module or "").startswith("autopar_runtime"))
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            node.body = [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    tree.body.sort(key=lambda node: node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else "")
    return ast.unparse(tree)


def bare_text(text: str) -> str:
    """Text without the checkout's path, line numbers and addresses."""
    return re.sub(r"(?<=\.py):\d+|(?<=\b0x)[0-9a-f]+", "", text.replace(ROOT, "."))


def bare_json(text: str) -> str:
    """JSON written in one way, without what says how it was made."""
    data = {key: value for key, value in json.loads(text).items() if key not in MADE_BY}
    return bare_text(json.dumps(data, indent=1, ensure_ascii=False))


def emitted(directory: Path) -> Iterator[tuple[str, str]]:
    """(path, text) of every file that the compiler wrote, without the runtime that is copied and the weights."""
    bare = {".py": bare_python, ".json": bare_json}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = path.relative_to(directory).as_posix()
        if not name.startswith(("autopar_runtime/", "weights/")):
            yield name, bare.get(path.suffix, bare_text)(path.read_text())


def described(program: autopar.ParallelProgram, files: bool) -> dict[str, str]:
    """The texts of a program that are compared, by name; numbers have all their digits. files: every file that it writes, or
    its plan alone."""
    report = [line for line in program.report().splitlines() if not line.startswith("compiled in ")]
    others = [f"{other.name}: {NUMBERS(other.predicted)}" for other in program.alternatives]
    found = {"predicted": str(NUMBERS(program.predicted))}
    found |= {"alternatives": "\n".join(others), "report": "\n".join(report)}
    with tempfile.TemporaryDirectory() as directory:
        if files:
            return found | dict(emitted(program.save(directory)))
        program.plan.save(Path(directory) / "plan.json")
        return found | dict(emitted(Path(directory)))


@mock.patch("time.monotonic", new=float)  # no deadline of a search passes, however busy the machine is
def record(only: str) -> Recording:
    """The results of the cases, an error among them: what is refused is to be refused in the same words."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found: Recording = {}
    started = time.process_time()
    for name, compile_case in cases().items():
        if only not in name:
            continue
        before = time.process_time()
        try:
            found[name] = described(compile_case(), files=name not in LARGE)
        except Exception as error:
            found[name] = {"error": bare_text(f"{type(error).__name__}: {error}")}
        said = found[name].get("error", "").split("\n")[0][:80]
        print(f"{time.process_time() - before:6.1f} s  {name}  {said}", file=sys.stderr, flush=True)
    print(f"{len(found)} cases in {time.process_time() - started:.0f} s of this process", file=sys.stderr)
    return found


def compare(first: Recording, second: Recording) -> int:
    """Print the fields in which each case differs, with a diff of the first of them; the number of such cases."""
    names, unlike = [*{**first, **second}], 0
    for name in names:
        a, b = first.get(name, {}), second.get(name, {})
        fields = [field for field in {**a, **b} if a.get(field) != b.get(field)]
        if fields:
            unlike += 1
            sides = [side.get(fields[0], "(not there)").splitlines() for side in (a, b)]
            lines = list(difflib.unified_diff(sides[0], sides[1], "first", "second", lineterm="", n=1))
            print(f"{name}: {', '.join(fields)}\n  {fields[0]}")
            print(*(f"    {line[:200]}" for line in lines[:SHOWN]), *["    …"] * (len(lines) > SHOWN), sep="\n")
    print(f"{unlike} of {len(names)} cases differ")
    return unlike


def main() -> None:
    """Record or compare, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run the cases and write what they give")
    recording.add_argument("out", type=Path)
    recording.add_argument("--only", default="", help="cases whose name contains this")
    comparing = commands.add_parser("compare", help="name what differs between two recordings")
    comparing.add_argument("recordings", nargs=2, type=Path)
    args = parser.parse_args()
    if args.command == "record":
        args.out.write_text(json.dumps(record(args.only), indent=1, ensure_ascii=False) + "\n")
    else:
        sys.exit(bool(compare(*(json.loads(path.read_text()) for path in args.recordings))))


if __name__ == "__main__":
    from benchmarks import sameness  # by this name an emitted program can import its functions

    sameness.main()
