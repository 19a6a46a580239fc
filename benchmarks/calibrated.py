"""Predicted steps against measured ones on two Gloo processes of this machine, right after calibrating, one JSON object.

    python -m benchmarks.calibrated [--limit N] [--compressed] [--shaped MBIT] [--profile FILE]

Plans of several models are compiled for two ranks of the calibrated machine and take turns in the same two processes, a few steps
each turn; a step's time is that of a turn over its steps, its median over all turns. With --shaped the ranks are in two network
namespaces joined by a link of so many Mbit/s in either direction (needs root, `ip` and `tc`), where calibration runs too. With
--compressed the plans are data parallel, with gradients as they are and compressed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import Llama, LlamaShape, next_token_loss, seeded_gpt
from benchmarks.turns import WorkersFailed, as_worker, make_batch, print_json

STEPS_A_TURN, TURNS = 4, 7
DATA, TENSOR = {"mesh": {"dp": 2}}, {"mesh": {"tp": 2}}
PIPELINE = {"pp": 2, "microbatches": 4, "schedule": "1f1b"}


class Mlp(nn.Module):
    """The loss of classifying x: (batch, dim)."""

    def __init__(self, dim: int = 512, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.head = nn.Linear(dim, 64)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), labels)


class Conv(nn.Module):
    """The loss of classifying images: (batch, 3, height, width) by residual convolutions."""

    def __init__(self, channels: int = 32, layers: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(layers))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def gpt() -> tuple[nn.Module, Any, Any]:
    return seeded_gpt(), make_batch(0, 8, 128), next_token_loss


def llama() -> tuple[nn.Module, Any, Any]:
    ids = torch.randint(0, 2048, (4, 256))
    return Llama(LlamaShape(4, 256, 704, 8, 4, 2048), 256), (ids, ids.roll(-1, 1)), None


def mlp() -> tuple[nn.Module, Any, Any]:
    return Mlp(), (torch.randn(1024, 512), torch.randint(0, 64, (1024,))), None


def conv() -> tuple[nn.Module, Any, Any]:
    return Conv(), (torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))), None


class Case(NamedTuple):
    """A plan of a model: name of the plan, and the options that ask for it."""

    model: Callable[[], tuple[nn.Module, Any, Any]]
    plan: str
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.model.__name__}_{self.plan}"


CASES = (
    Case(gpt, "dp", {**DATA, "strategy": "dp"}),
    Case(llama, "zero3", {**DATA, "strategy": "zero3"}),
    Case(mlp, "zero1", {**DATA, "strategy": "zero1"}),
    Case(conv, "dp", {**DATA, "strategy": "dp"}),
    Case(gpt, "1f1b", {**PIPELINE, "stage_boundaries": ["blocks.3"]}),
    Case(llama, "megatron", {**TENSOR, "strategy": "megatron"}),
    Case(mlp, "dp", {**DATA, "strategy": "dp"}),
    Case(gpt, "recompute", {**DATA, "strategy": "dp", "recompute": "full"}),
    Case(llama, "dp", {**DATA, "strategy": "dp"}),
    Case(conv, "zero1", {**DATA, "strategy": "zero1"}),
    Case(gpt, "zero1", {**DATA, "strategy": "zero1"}),
    Case(llama, "1f1b", {**PIPELINE, "stage_boundaries": ["blocks.2"]}),
    Case(gpt, "megatron", {**TENSOR, "strategy": "megatron"}),
    Case(llama, "recompute", {**DATA, "strategy": "zero3", "recompute": "full"}),
    Case(mlp, "zero3", {**DATA, "strategy": "zero3"}),
    Case(gpt, "zero3", {**DATA, "strategy": "zero3"}),
)
COMPRESSED = tuple(
    Case(gpt, f"{strategy}_{name or 'plain'}", {**DATA, "strategy": strategy, "gradient_compression": name})
    for strategy in ("dp", "zero1")
    for name in (None, "bf16", "int8")
)


# --- two ranks, with or without a shaped link between them


@contextlib.contextmanager
def shaped_link(mbit: float) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Two network namespaces joined by a link of so many Mbit/s in either direction: what a command of the second rank starts
    with, and both ranks' environment."""
    name, here, there = f"autopar{os.getpid()}", f"apa{os.getpid()}"[:15], f"apb{os.getpid()}"[:15]

    def run(*words: str) -> None:
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)

    inside = ["ip", "netns", "exec", name]
    shape = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "100ms"]
    run("ip", "netns", "add", name)
    try:
        run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        for prefix, device, address in (([], here, "10.213.7.1/30"), (inside, there, "10.213.7.2/30")):
            run(*prefix, "ip", "addr", "add", address, "dev", device)
            run(*prefix, "ip", "link", "set", device, "up")
            run(*prefix, "tc", "qdisc", "add", "dev", device, *shape)
        run(*inside, "ip", "link", "set", "lo", "up")
        yield inside, {"MASTER_ADDR": "10.213.7.1", "GLOO_SOCKET_IFNAME": f"{here},{there}"}
    finally:
        run("ip", "netns", "del", name)


@contextlib.contextmanager
def link(mbit: float | None) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The same; without a rate the ranks talk as processes of one machine do."""
    if mbit is None:
        yield [], {"MASTER_ADDR": "127.0.0.1"}
    else:
        with shaped_link(mbit) as shaped:
            yield shaped


def on_both_ranks(joined: tuple[list[str], dict[str, str]], command: Sequence[str]) -> str:
    """What rank 0 prints when both run a command. Raises WorkersFailed."""
    second, shared = joined
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank, prefix in enumerate(([], second)):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        interfaces = shared.get("GLOO_SOCKET_IFNAME", "").split(",")
        own = {"GLOO_SOCKET_IFNAME": interfaces[rank]} if len(interfaces) > 1 else {}
        ranks.append(
            subprocess.Popen(
                [*prefix, sys.executable, *command],
                env={**os.environ, **environment, **shared, **own, "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
        )
    printed, _ = ranks[0].communicate()
    failed = max(rank.wait() for rank in ranks)
    if failed:
        raise WorkersFailed(failed)
    return printed or ""


# --- the comparison


def measure(directory: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """One rank: median seconds of a step of every program."""
    import autopar

    programs = {case.name: autopar.load(directory / case.name) for case in cases}
    batches = {case.name: case.model()[1] for case in cases}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(TURNS + 1):
        for name, program in programs.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS_A_TURN):
                program(batches[name])
            dist.barrier()
            if turn:
                times[name].append((time.perf_counter() - start) / STEPS_A_TURN)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def compile_programs(directory: Path, cases: Sequence[Case], profile: Any) -> dict[str, float]:
    """Writes every program; the seconds that are predicted of its step."""
    import autopar

    predicted_s = {}
    for case in cases:
        torch.manual_seed(0)
        model, batch, loss = case.model()
        program = autopar.compile(
            model,
            autopar.ClusterSpec.local(2).with_profile(profile),
            batch,
            loss_fn=loss,
            optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
            options=autopar.Options(**case.options),
        )
        program.save(directory / case.name)
        predicted_s[case.name] = float(program.predicted.step_time_s)
    return predicted_s


def compared(predicted_s: Mapping[str, float], measured_s: Mapping[str, float]) -> dict[str, Any]:
    """Rows, and what they say together."""
    rows = [
        {
            "plan": name,
            "predicted_s": round(predicted_s[name], 5),
            "measured_s": round(measured_s[name], 5),
            "error": round(predicted_s[name] / measured_s[name] - 1, 4),
        }
        for name in predicted_s
    ]
    errors = [predicted_s[name] / measured_s[name] - 1 for name in predicted_s]
    return {
        "rows": rows,
        "median_error": round(statistics.median(map(abs, errors)), 4),
        "worst_error": round(max(map(abs, errors)), 4),
        "bias": round(statistics.median(errors), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=len(CASES), help="the first plans alone")
    parser.add_argument("--compressed", action="store_true", help="plans with and without compressed gradients")
    parser.add_argument("--shaped", type=float, help="Mbit/s of the link between the ranks")
    parser.add_argument("--profile", type=Path, help="a profile to be read if it exists, else written")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = (COMPRESSED if args.compressed else CASES)[: args.limit]
    if args.worker:
        return as_worker(functools.partial(measure, args.worker, cases))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, link(args.shaped) as joined:
        profile = args.profile or Path(folder) / "profile.json"
        if not profile.exists():
            on_both_ranks(joined, ["-m", "autopar.cli.calibrate", "--quick", "-o", str(profile)])
        predicted_s = compile_programs(Path(folder), cases, json.loads(profile.read_text()))
        chosen = ["--limit", str(args.limit), *(["--compressed"] if args.compressed else [])]
        printed = on_both_ranks(joined, ["-m", "benchmarks.calibrated", "--worker", folder, *chosen])
    measured_s = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    print_json({"benchmark": "calibrated", "shaped_mbit": args.shaped, **compared(predicted_s, measured_s)})


if __name__ == "__main__":
    main()
