"""Measures this machine and fits the cost model's constants to it.

Device: matrix products of many shapes (rate R and the length d at which a dim halves it), attention, memory passes,
launch time. Links: collectives over torch.distributed for several sizes, T = a + f S / B with f the ring's factor.
A fit minimises squared relative error; its residuals are part of the profile. `ClusterSpec.with_profile` loads it.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from autopar.cluster.device import DeviceSpec, device_preset, preset_key

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Sample:
    """One measurement: matmul (m, n, k), attention (batch*heads, seq, head), memory (bytes,), or a collective."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    seconds: float


def timed_s(run: Callable[[], Any], device: torch.device, least_s: float) -> float:
    """Median seconds of `run` after a warm-up, repeated for at least `least_s` and three times."""
    sync: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    run()
    sync()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - begin < least_s and len(times) < 200):
        start = time.perf_counter()
        run()
        sync()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def matmul_shapes(gpu: bool, quick: bool) -> list[tuple[int, int, int]]:
    """Large, narrow, thin and ragged products."""
    sizes = [512, 1024, 2048, 4096, 8192] if gpu else [64, 128, 256, 512, 1024]
    sizes = sizes[:-1] if quick else sizes
    big = sizes[-1]
    shapes = [(s, s, s) for s in sizes] + [(64, big, big), (big, 64, big), (big, big, 64)]
    return shapes if quick else shapes + [(big, 3 * big + 64, big), (big - 7, big + 13, big)]


def measure_device(device: torch.device, dtypes: Sequence[torch.dtype], quick: bool, say: Progress) -> list[Sample]:
    """Products, attention, memory passes and the smallest kernel."""
    gpu = device.type == "cuda"
    least = 0.02 if quick else 0.1
    samples: list[Sample] = []
    tiny = torch.zeros(1, device=device)
    samples.append(Sample("launch", (1,), "float32", timed_s(lambda: tiny.add_(1), device, least)))
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        for m, n, k in matmul_shapes(gpu, quick):
            a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
            samples.append(Sample("matmul", (m, n, k), name, timed_s(lambda a=a, b=b: a @ b, device, least)))  # type: ignore[misc]
            say(f"matmul {m}x{n}x{k} {name}: {samples[-1].seconds * 1e6:.0f} us")
    dtype = dtypes[-1] if gpu else torch.float32
    for seq in (1024, 4096) if gpu else (128, 512):
        q = torch.randn(1, 16 if gpu else 4, seq, 128 if gpu else 64, device=device, dtype=dtype)
        seconds = timed_s(lambda q=q: F.scaled_dot_product_attention(q, q, q, is_causal=True), device, least)  # type: ignore[misc]
        samples.append(Sample("attention", (q.shape[1], seq, q.shape[3]), str(dtype).removeprefix("torch."), seconds))
        say(f"attention {tuple(q.shape)}: {seconds * 1e6:.0f} us")
    for size in (2**26, 2**28) if gpu else (2**23, 2**25):
        x = torch.zeros(size, device=device)
        samples.append(Sample("memory", (8 * size,), "float32", timed_s(lambda x=x: x.add_(1.0), device, least)))  # type: ignore[misc]
        say(f"memory {8 * size / 1e6:.0f} MB: {samples[-1].seconds * 1e6:.0f} us")
    return samples


def fit_matmul(samples: Sequence[Sample], launch_s: float) -> tuple[float, float, float]:
    """(R, d, median relative residual) of T = launch + 2mnk / R * (1+d/m)(1+d/n)(1+d/k)."""
    best = (1.0, 1.0, float("inf"))
    dims = np.array([s.shape for s in samples], dtype=float)
    seconds = np.maximum(np.array([s.seconds for s in samples]) - launch_s, 1e-9)
    flops = 2 * dims.prod(axis=1)
    for d in np.geomspace(0.5, 1024, 60):
        ideal = flops * np.prod(1 + d / dims, axis=1)
        ratio = ideal / seconds
        rate = float(np.sum(ratio**2) / np.sum(ratio))
        error = float(np.median(np.abs(ideal / rate / seconds - 1)))
        if error < best[2]:
            best = (rate, float(d), error)
    return best


def fit_line(factor_bytes: np.ndarray, seconds: np.ndarray) -> tuple[float, float, float]:
    """(a, B, median relative residual) of T = a + x / B, relative least squares, both at least tiny."""
    A = np.stack([1 / seconds, factor_bytes / seconds], axis=1)
    (a, per_byte), *_ = np.linalg.lstsq(A, np.ones(len(seconds)), rcond=None)
    a = max(float(a), 1e-9)
    per_byte = max(float(per_byte), 1e-15)
    residual = float(np.median(np.abs((a + factor_bytes * per_byte) / seconds - 1)))
    return a, 1 / per_byte, residual


def fit_device(samples: Sequence[Sample], base: DeviceSpec) -> tuple[dict[str, Any], dict[str, float]]:
    """The `device` part of a profile (what to replace in `base`), and residuals by kind.

    On a CPU the measured rates become the peaks; on a GPU they become shares of the vendor's peaks.
    """
    launch = next(s.seconds for s in samples if s.kind == "launch")
    profile: dict[str, Any] = {"launch_overhead_s": launch}
    residuals: dict[str, float] = {}
    curve: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for dtype in sorted({s.dtype for s in samples if s.kind == "matmul"}):
        rate, d, residual = fit_matmul([s for s in samples if s.kind == "matmul" and s.dtype == dtype], launch)
        residuals[f"matmul {dtype}"] = residual
        peaks[dtype] = rate
        curve["half_dim"] = d
    if base.kind == "cpu":
        profile["peak_flops"] = peaks
        curve["matmul"] = 1.0
    else:
        half = "bfloat16" if "bfloat16" in peaks else next(iter(peaks))
        curve["matmul"] = min(1.0, peaks[half] / base.peak(half))
    attention = [s for s in samples if s.kind == "attention"]
    shares = []
    for s in attention:
        heads, seq, head = s.shape
        peak = peaks.get(s.dtype, 0.0) if base.kind == "cpu" else base.peak(s.dtype)
        shape = (1 + 256 / seq) * (1 + 32 / head)
        shares.append(2 * heads * seq * seq * head * shape / max(s.seconds - launch, 1e-9) / peak)
    curve["attention"] = curve["attention_eager"] = min(1.0, float(np.median(shares)))
    residuals["attention"] = float(np.median(np.abs(np.array(shares) / np.median(shares) - 1)))
    memory = [s for s in samples if s.kind == "memory"]
    x, y = np.array([float(s.shape[0]) for s in memory]), np.array([s.seconds for s in memory])
    rate = float(x[-1] / max(y[-1] - launch, 1e-9))
    residuals["memory"] = float(np.median(np.abs((launch + x / rate) / y - 1)))
    if base.kind == "cpu":
        profile["memory_bandwidth_Bps"], curve["memory"] = rate, 1.0
    else:
        curve["memory"] = min(1.0, rate / base.memory_bandwidth_Bps)
    profile["curve"] = curve
    return profile, residuals


def ring_factor(kind: str, n: int) -> float:
    """Bytes that cross a rank's link for each byte of the full array."""
    return {
        "all_reduce": 2 * (n - 1) / n,
        "all_gather": (n - 1) / n,
        "reduce_scatter": (n - 1) / n,
        "all_to_all": (n - 1) / n,
        "broadcast": 1.0,
    }[kind]


def measure_collectives(device: torch.device, quick: bool, say: Progress) -> list[Sample]:
    """Times collectives in the initialised process group; every rank must call it."""
    n = dist.get_world_size()
    gpu = device.type == "cuda"
    sizes = [2**14, 2**18, 2**22] if quick else [2**12, 2**16, 2**20, 2**24] + ([2**28] if gpu else [])
    samples = []
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        for size in sizes:
            elements = max(n, size // 4 // n * n)
            full, part = torch.zeros(elements, device=device), torch.zeros(elements // n, device=device)
            other = torch.zeros(elements, device=device)
            calls: dict[str, Callable[[], Any]] = {
                "all_reduce": lambda full=full: dist.all_reduce(full),  # type: ignore[misc]
                "all_gather": lambda full=full, part=part: gather(full, part),  # type: ignore[misc]
                "reduce_scatter": lambda full=full, part=part: scatter(part, full),  # type: ignore[misc]
                "all_to_all": lambda full=full, other=other: dist.all_to_all_single(other, full),  # type: ignore[misc]
                "broadcast": lambda full=full: dist.broadcast(full, 0),  # type: ignore[misc]
            }
            try:
                calls[kind]()
            except RuntimeError as err:
                say(f"{kind}: not available on this backend ({str(err).splitlines()[0][:60]})")
                break
            times = []
            for _ in range(5 if quick else 15):
                dist.barrier()
                start = time.perf_counter()
                calls[kind]()
                if gpu:
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            seconds = torch.tensor(float(np.median(times)), device=device)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            samples.append(Sample(kind, (4 * elements, n), "float32", float(seconds)))
            say(f"{kind} of {4 * elements} bytes over {n}: {float(seconds) * 1e6:.0f} us")
    return samples


def fit_links(samples: Sequence[Sample], level: str = "node") -> tuple[dict[str, Any], dict[str, float]]:
    """The `links` part of a profile: a level's launch time and bandwidth, from all collectives together."""
    if not samples:
        return {}, {}
    x = np.array([s.shape[0] * ring_factor(s.kind, s.shape[1]) for s in samples])
    y = np.array([s.seconds for s in samples])
    a, B, _ = fit_line(x, y)
    residuals = {}
    for kind in dict.fromkeys(s.kind for s in samples):
        pick = np.array([s.kind == kind for s in samples])
        residuals[kind] = float(np.median(np.abs((a + x[pick] / B) / y[pick] - 1)))
    link = {
        "bandwidth_Bps": B,
        "base_s": a,
        "latency_s": 0.0,
        "ramp_s": 0.0,
        "efficiency": 1.0,
        "in_switch_efficiency": 1.0,
    }
    return {level: link}, residuals


def _worker(rank: int, world: int, port: int, gpu: bool, quick: bool, path: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl" if gpu else "gloo", init_method=address, rank=rank, world_size=world)
    try:
        lines: list[str] = []
        samples = measure_collectives(device, quick, lines.append)
        if rank == 0:
            torch.save([(s.kind, s.shape, s.dtype, s.seconds) for s in samples], path)
    finally:
        dist.destroy_process_group()


def local_collectives(world: int, gpu: bool, quick: bool) -> list[Sample]:
    """Collectives over `world` processes of this machine (one per GPU with NCCL, else Gloo)."""
    if world < 2:
        return []
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "samples.pt")
        torch.multiprocessing.spawn(_worker, args=(world, port, gpu, quick, path), nprocs=world)
        return [Sample(*fields) for fields in torch.load(path)] if Path(path).exists() else []


def group_sizes(world: int) -> list[int]:
    """2, 4, 8, ... and the whole."""
    return [n for n in (2**i for i in range(1, 10)) if n < world] + ([world] if world > 1 else [])


def launched_collectives(gpu: bool, quick: bool, say: Progress) -> tuple[str, list[Sample]]:
    """(link level, timings) over the ranks that torchrun started: across nodes this is the cluster's level."""
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if gpu else "gloo")
    try:
        across = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) < dist.get_world_size()
        device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        return ("cluster" if across else "node"), measure_collectives(device, quick, say)
    finally:
        dist.destroy_process_group()


def base_device(device: torch.device) -> DeviceSpec:
    """The preset nearest to what is here."""
    if device.type == "cuda":
        key = preset_key(torch.cuda.get_device_name(device).replace(" ", "-"))
        return device_preset(key or "a100")
    return device_preset("cpu")


def calibrate(*, quick: bool = False, ranks: int | None = None, say: Progress = print) -> dict[str, Any]:
    """Measures device and links; returns the profile. ranks: processes for the collectives (default: GPUs, or 2).

    Under torchrun the collectives run over its ranks instead, so that several nodes can be measured.
    """
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    dtypes = [torch.float32, torch.bfloat16] if gpu else [torch.float32]
    base = base_device(device)
    samples = measure_device(device, dtypes, quick, say)
    profile, residuals = fit_device(samples, base)
    links: dict[str, Any] = {}
    link_residuals: dict[str, float] = {}
    link_samples: list[Sample] = []
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        level, link_samples = launched_collectives(gpu, quick, say)
        links, link_residuals = fit_links(link_samples, level)
    else:
        world = ranks if ranks is not None else (torch.cuda.device_count() if gpu else 2)
        for n in group_sizes(world):
            say(f"collectives over {n} processes")
            link_samples += local_collectives(n, gpu, quick)
        links, link_residuals = fit_links(link_samples)
    return {
        "base": base.name,
        "device": profile,
        "links": links,
        "residuals": {**residuals, **link_residuals},
        "samples": [[s.kind, list(s.shape), s.dtype, s.seconds] for s in (*samples, *link_samples)],
    }
