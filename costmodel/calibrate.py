"""Measures this machine and fits the cost model's constants to it.

Device: matrix products of many shapes (rate R and the length d at which a dim halves it), attention, memory passes,
launch time; on CPUs also the ops of programs one by one, on all ranks at once (`host_kernels.py`). Links: the collectives of
emitted programs (`calibrate_links.py`). A fit minimises squared relative error; its residuals are part of the profile.
`ClusterSpec.with_profile` loads it.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from autopar.cluster.device import DeviceSpec
from autopar.cluster.here import base_device
from autopar.costmodel.by_node import FLAT
from autopar.costmodel.calibrate_lateness import late_share, of_ranks, of_slowest
from autopar.costmodel.calibrate_links import Progress, Sample, fit_links, measure_collectives
from autopar.costmodel.flash import flash_kernel
from autopar.costmodel.host_kernels import Measured, fit_kernels, measure_kernels, middle
from autopar.runtime.comm.backends import Backend, backend_of, present_backend
from autopar.runtime.comm.hierarchical import KINDS
from autopar.runtime.comm.process import TorchComm
from autopar.runtime.data.fields import form_of, from_data, to_data

SWEEPS = 3
"""Ops and collectives are measured so often, one after the other, and each takes the median: what the machine does meanwhile for
a few seconds would else make one kind of them dear beside the others."""

LAUNCHES = 40
SMALL_OPS: Sequence[Callable[[torch.Tensor], Any]] = (
    lambda x: x @ x,
    lambda x: x + x,
    lambda x: x.mul(2.0),
    lambda x: x.sum(1),
    F.silu,
)
"""Small ops such as programs are made of; one after the other, on small tensors, the host's launching is all that takes time."""


def timed_s(run: Callable[[], Any], device: torch.device, least_s: float) -> float:
    """Median seconds of `run` after a warm-up, repeated for at least `least_s` and three times."""
    synchronize = backend_of(device).module.synchronize
    run()
    synchronize(device)
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - begin < least_s and len(times) < 200):
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def launched(tiny: torch.Tensor) -> None:
    """Small kernels, LAUNCHES of each of SMALL_OPS, and nobody waits between them."""
    for _ in range(LAUNCHES):
        for op in SMALL_OPS:
            op(tiny)


def matmul_shapes(gpu: bool, quick: bool) -> list[tuple[int, int, int]]:
    """Large, narrow, thin and ragged products."""
    sizes = [512, 1024, 2048, 4096, 8192] if gpu else [64, 128, 256, 512, 1024]
    sizes = sizes[:-1] if quick else sizes
    big = sizes[-1]
    shapes = [(s, s, s) for s in sizes] + [(64, big, big), (big, 64, big), (big, big, 64)]
    return shapes if quick else shapes + [(big, 3 * big + 64, big), (big - 7, big + 13, big)]


def measure_device(device: torch.device, dtypes: Sequence[torch.dtype], quick: bool, say: Progress) -> list[Sample]:
    """Products, attention, memory passes, a small kernel that is waited for ("wait"), and small kernels in a row ("launch")."""
    gpu = not backend_of(device).is_host
    least = 0.02 if quick else 0.1
    samples: list[Sample] = []
    tiny = torch.zeros(32, 32, device=device)
    samples.append(Sample("wait", (1,), "float32", timed_s(lambda: tiny.add_(1), device, least)))
    in_a_row = timed_s(lambda: launched(tiny), device, least)
    samples.append(Sample("launch", (1,), "float32", in_a_row / (LAUNCHES * len(SMALL_OPS))))
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


def fit_matmul(samples: Sequence[Sample], wait_s: float) -> tuple[float, float, float]:
    """(R, d, median relative residual) of T = wait + 2mnk / R * (1+d/m)(1+d/n)(1+d/k)."""
    best = (1.0, 1.0, float("inf"))
    dims = np.array([s.shape for s in samples], dtype=float)
    seconds = np.maximum(np.array([s.seconds for s in samples]) - wait_s, 1e-9)
    flops = 2 * dims.prod(axis=1)
    for d in np.geomspace(0.5, 1024, 60):
        ideal = flops * np.prod(1 + d / dims, axis=1)
        ratio = ideal / seconds
        rate = float(np.sum(ratio**2) / np.sum(ratio))
        error = float(np.median(np.abs(ideal / rate / seconds - 1)))
        if error < best[2]:
            best = (rate, float(d), error)
    return best


def fit_device(samples: Sequence[Sample], base: DeviceSpec) -> tuple[dict[str, Any], dict[str, float]]:
    """The `device` part of a profile (what to replace in `base`), and residuals by kind.

    On a CPU the measured rates become the peaks; on a GPU they become shares of the vendor's peaks.
    """
    launch, wait = (next(s.seconds for s in samples if s.kind == kind) for kind in ("launch", "wait"))
    profile: dict[str, Any] = {"launch_overhead_s": launch}
    residuals: dict[str, float] = {}
    curve: dict[str, float] = {}
    peaks: dict[str, float] = {}
    lengths: dict[str, float] = {}
    for dtype in sorted({s.dtype for s in samples if s.kind == "matmul"}):
        rate, d, residual = fit_matmul([s for s in samples if s.kind == "matmul" and s.dtype == dtype], wait)
        residuals[f"matmul {dtype}"] = residual
        peaks[dtype], lengths[dtype] = rate, d
    if base.kind == "cpu":
        profile["peak_flops"] = peaks
        curve["matmul"], curve["half_dim"] = 1.0, lengths[max(lengths)]
    else:
        half = "bfloat16" if "bfloat16" in peaks else next(iter(peaks))
        curve["matmul"], curve["half_dim"] = min(1.0, peaks[half] / base.peak(half)), lengths[half]
    attention = [s for s in samples if s.kind == "attention"]
    shares = []
    for s in attention:
        heads, seq, head = s.shape
        peak = peaks.get(s.dtype, 0.0) if base.kind == "cpu" else base.peak(s.dtype)
        # Causal attention, forward, by the kernels that torch calls.
        kernel = flash_kernel(base, eager=True, backward=False)
        shape = (1 + (kernel.half_seq + kernel.tile) / seq) / kernel.of_head(head)
        shares.append(2 * heads * seq * seq * head * shape / max(s.seconds - wait, 1e-9) / peak)
    curve["attention"] = curve["attention_eager"] = min(1.0, float(np.median(shares)))
    residuals["attention"] = float(np.median(np.abs(np.array(shares) / np.median(shares) - 1)))
    memory = [s for s in samples if s.kind == "memory"]
    x, y = np.array([float(s.shape[0]) for s in memory]), np.array([s.seconds for s in memory])
    rate = float(x[-1] / max(y[-1] - wait, 1e-9))
    residuals["memory"] = float(np.median(np.abs((wait + x / rate) / y - 1)))
    if base.kind == "cpu":
        profile["memory_bandwidth_Bps"], curve["memory"] = rate, 1.0
    else:
        curve["memory"] = min(1.0, rate / base.memory_bandwidth_Bps)
    profile["curve"] = curve
    return profile, residuals


@dataclass(frozen=True)
class Ranks:
    """Measurements of the ranks of a process group: the ops of programs (CPUs alone), all at once, as long as they take
    on the slowest rank (`calibrate_lateness.py`), and their collectives by level of links."""

    kernels: list[Measured]
    collectives: dict[str, list[Sample]]


class Groups(NamedTuple):
    """Groups of ranks, along the axis "all" of a mesh of all ranks, and the level of links that they say something of. kinds: of
    the collectives that are measured, all where there are none; way: that these go, before their names."""

    level: str
    mesh: dict[str, int]
    kinds: tuple[str, ...] = ()
    way: str = ""


def groups_of(nodes: int, local: int) -> list[Groups]:
    """Blocks of the ranks of a node; those of one place on every node, of all places at once; and all ranks of several nodes, for
    what may go flat or by node (`by_node.py`)."""
    inside = [Groups("node", {"blocks": nodes * local // n, "all": n}) for n in group_sizes(local)]
    between = [Groups("cluster", {"all": nodes, "places": local})] if nodes > 1 else []
    flat = [Groups("cluster", {"all": nodes * local}, KINDS, FLAT)] if nodes > 1 and local > 1 else []
    return inside + between + flat


def measure_ranks(device: torch.device, quick: bool, groups: Sequence[Groups], say: Progress) -> Ranks:
    """The measurements of this rank, in the initialised process group; every rank must call it. Ranks of all groups of a
    kind are at work meanwhile, as those of a program are."""
    comms = [TorchComm(one.mesh, device) for one in groups]
    whole = comms[-1]
    ops: list[list[Measured]] = []
    late: list[float] = []
    collectives: list[list[list[Sample]]] = []
    for sweep in range(SWEEPS):
        say(f"sweep {sweep + 1} of {SWEEPS}")
        if backend_of(device).is_host:
            ops.append(of_ranks(whole.share(measure_kernels(quick, say, whole.barrier), form_of(list[Measured]).read)))
            late.append(late_share(whole, 8 if quick else 16))
        pairs = zip(groups, comms, strict=True)
        collectives.append([measure_collectives(comm, quick, say, one.kinds) for one, comm in pairs])
    by_level: dict[str, list[Sample]] = {}
    for one, sweeps in zip(groups, zip(*collectives, strict=True), strict=True):
        samples = (sample._replace(kind=one.way + sample.kind) for sample in middle(sweeps))
        by_level.setdefault(one.level, []).extend(samples)
    return Ranks(of_slowest(middle(ops), float(np.median(late))) if ops else [], by_level)


def _worker(rank: int, world: int, port: int, device_type: str, quick: bool, path: str) -> None:
    torch.set_num_threads(1)
    backend = backend_of(torch.device(device_type))
    device = backend.device(rank)
    backend.module.set_device(device)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend.transport.name, init_method=address, rank=rank, world_size=world)
    try:
        ranks = measure_ranks(device, quick, groups_of(1, world), lambda text: None)
        if rank == 0:
            Path(path).write_text(json.dumps(to_data(ranks)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def local_ranks(world: int, backend: Backend, quick: bool) -> Ranks:
    """Measurements of `world` processes of this machine, on a device each where they have memory of their own."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ranks.json")
        torch.multiprocessing.spawn(_worker, args=(world, port, backend.device_type, quick, path), nprocs=world)
        return from_data(Ranks, json.loads(Path(path).read_text()))


def group_sizes(world: int) -> list[int]:
    """2, 4, 8, ... that divide the whole, and the whole."""
    return [n for n in (2**i for i in range(1, 10)) if n < world and world % n == 0] + ([world] if world > 1 else [])


def launched_ranks(backend: Backend, quick: bool, say: Progress) -> Ranks:
    """Measurements of the ranks that torchrun started; where its nodes are uneven, collectives of all ranks alone."""
    device = backend.device(int(os.environ.get("LOCAL_RANK", "0")))
    backend.module.set_device(device)
    dist.init_process_group(backend.transport.name)
    try:
        world = dist.get_world_size()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        groups = [Groups("cluster", {"all": world})] if world % local else groups_of(world // local, local)
        return measure_ranks(device, quick, [one for one in groups if backend.is_host or not one.way], say)
    finally:
        dist.destroy_process_group()


def calibrate(*, quick: bool = False, ranks: int | None = None, say: Progress = print) -> dict[str, Any]:
    """Measures device and links; returns the profile. ranks: processes for the collectives (default: GPUs, or 2).

    Under torchrun the collectives run over its ranks instead, so that several nodes can be measured.
    """
    backend = present_backend()
    device = backend.device(0)
    dtypes = [torch.float32] if backend.is_host else [torch.float32, torch.bfloat16]
    base = base_device(device)
    samples = measure_device(device, dtypes, quick, say)
    profile, residuals = fit_device(samples, base)
    kernels: list[Measured] = []
    by_level: dict[str, list[Sample]] = {}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        measured = launched_ranks(backend, quick, say)
        kernels, by_level = measured.kernels, measured.collectives
    else:
        world = ranks if ranks is not None else (2 if backend.is_host else backend.count())
        if world > 1:
            say(f"ops and collectives of {world} processes")
            measured = local_ranks(world, backend, quick)
            kernels, by_level = measured.kernels, measured.collectives
        elif backend.is_host:
            kernels = middle([measure_kernels(quick, say) for _ in range(SWEEPS)])
    links: dict[str, Any] = {}
    for level, link_samples in by_level.items():
        link, link_residuals = fit_links(link_samples, level, tables=backend.is_host)
        links |= link
        residuals |= {f"{kind} ({level})": one for kind, one in link_residuals.items()}
    if kernels:
        times, kernel_residuals = fit_kernels(kernels)
        profile["kernels"] = to_data(times)
        residuals |= kernel_residuals
    return {
        "base": base.name,
        "device": profile,
        "links": links,
        "residuals": residuals,
        "samples": [
            [s.kind, list(s.shape), s.dtype, s.seconds]
            for s in (*samples, *(s for of in by_level.values() for s in of))
        ],
    }
