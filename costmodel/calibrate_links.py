"""Times the collectives of emitted programs between ranks, and fits a link's constants to them.

T = a + f S / B with f the ring's factor. Between processes on CPUs the ranks compute in between, as they do in a step, and every
kind of collective takes what it took at each size: the cores that compute also move the bytes. Exchanges of rows are measured
inside the op that does them (`calibrate_exchanges.py`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from autopar.cluster.kernels import Points
from autopar.costmodel.by_node import FLAT
from autopar.costmodel.calibrate_exchanges import exchange_seconds
from autopar.costmodel.calibrate_lateness import usual_of_slowest_s
from autopar.costmodel.collective import COSTS
from autopar.costmodel.host_kernels import usual_s
from autopar.runtime.comm.backends import backend_of
from autopar.runtime.comm.calls import Handle, Message
from autopar.runtime.comm.comm import Comm
from autopar.runtime.data.schema import MOST_SIZE, integer

Progress = Callable[[str], None]
Links = dict[str, dict[str, Any]]
OVERLAPPED, OVERLAPPED_BYTES = "all_gather while computing", 1 << 22
SMALL_BYTES = 2**18
EXCHANGE = "exchange"


class Sample(NamedTuple):
    """One measurement: matmul (m, n, k), attention (batch*heads, seq, head), memory (bytes,), or a collective."""

    kind: str
    shape: tuple[Annotated[int, integer(0, MOST_SIZE)], ...]
    dtype: str
    seconds: float


def fit_line(factor_bytes: np.ndarray, seconds: np.ndarray) -> tuple[float, float, float]:
    """(a, B, median relative residual) of T = a + x / B, relative least squares, both at least tiny."""
    A = np.stack([1 / seconds, factor_bytes / seconds], axis=1)
    (a, per_byte), *_ = np.linalg.lstsq(A, np.ones(len(seconds)), rcond=None)
    a = max(float(a), 1e-9)
    per_byte = max(float(per_byte), 1e-15)
    residual = float(np.median(np.abs((a + factor_bytes * per_byte) / seconds - 1)))
    return a, 1 / per_byte, residual


def measure_collectives(comm: Comm, quick: bool, say: Progress, kinds: Collection[str] = ()) -> list[Sample]:
    """Times the collectives of emitted programs, or those of some kinds, along the axis "all" of the mesh of all ranks, in all
    groups of it at the same time; every rank must call it."""
    group, device = comm.group("all"), comm.device
    n, rank = group.size, group.index
    gpu = not backend_of(device).is_host
    sizes = [2**10, 2**14, 2**18, 2**22, 2**24] if quick else [2 ** (10 + 2 * i) for i in range(10 if gpu else 9)]
    samples = []
    for size in sizes:
        elements = max(n * n, size // 4 // n * n)
        full, part = torch.zeros(elements, device=device), torch.zeros(elements // n, device=device)

        def hand_over(whole: torch.Tensor = full) -> None:
            """Send from the first rank to the second, and back."""
            for sender in (0, 1):
                if rank in (0, 1):
                    kind = "send" if rank == sender else "recv"
                    comm.start_messages([Message(kind, whole, group.ranks[1 - rank], sender)])[0].wait()

        calls: dict[str, Callable[[], Any]] = {
            kind: functools.partial(row.sample, comm, full, part)
            for kind, row in COSTS.items()
            if row.sample is not None
        }
        calls["p2p"] = hand_over
        calls = {kind: call for kind, call in calls.items() if not kinds or kind in kinds}
        turns = 8 if size < 2**20 else 4 if size < 2**24 else 2
        for kind, kind_s in _collectives_s(calls, comm, turns).items():
            seconds = torch.tensor(kind_s / (2 if kind == "p2p" else 1), device=device)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            samples.append(Sample(kind, (4 * elements, n), "float32", float(seconds)))
            say(f"{kind} of {4 * elements} bytes over {n}: {float(seconds) * 1e6:.0f} us")
    if not gpu and not kinds:
        part = torch.zeros(OVERLAPPED_BYTES // 4 // n)
        seconds = torch.tensor(_overlapped_s(lambda: comm.start_all_gather(part, 0, "all"), comm, 4))
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        samples.append(Sample(OVERLAPPED, (OVERLAPPED_BYTES, n), "float32", float(seconds)))
        for nbytes, exchange_s in exchange_seconds(comm, "all", 4 if quick else 8):
            seconds = torch.tensor(exchange_s)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            samples.append(Sample(EXCHANGE, (nbytes, n), "float32", float(seconds)))
            say(f"{EXCHANGE} of {nbytes} bytes over {n}: {float(seconds) * 1e6:.0f} us")
    return samples


def _collectives_s(calls: Mapping[str, Callable[[], Any]], comm: Comm, turns: int) -> dict[str, float]:
    """Seconds that each collective adds to a round, from when the slowest rank calls it; they take turns.

    On CPUs ranks compute before it, as they do in a step: a message that finds every core at work waits for one, many times as
    long as between idle ranks.
    """
    operand = torch.randn(512, 512)
    backend = backend_of(comm.device)
    rounds: dict[str, list[float]] = {kind: [] for kind in calls}
    computing: list[float] = []
    for turn in range(turns + 1):
        for kind, call in calls.items():
            comm.barrier()
            start = time.perf_counter()
            if backend.is_host:
                torch.mm(operand, operand)
            computed = time.perf_counter()
            call()
            backend.module.synchronize(comm.device)
            if turn:
                rounds[kind].append(time.perf_counter() - start)
                computing.append(computed - start)
    computing_s = usual_of_slowest_s(comm, computing)
    return {kind: max(usual_s(seconds) - computing_s, 1e-6) for kind, seconds in rounds.items()}


def _overlapped_s(begin: Callable[[], Handle[Any]], comm: Comm, turns: int) -> float:
    """Seconds that a collective adds to a round in which ranks compute, until it has long arrived, before they wait."""
    operand = torch.randn(512, 512)

    def compute(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            torch.mm(operand, operand)
        return time.perf_counter() - start

    comm.barrier()
    start = time.perf_counter()
    begin().wait()
    lasts_s = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(lasts_s, op=dist.ReduceOp.MAX)
    times = max(4, int(2 * float(lasts_s) / max(compute(4) / 4, 1e-6)))
    count = torch.tensor(times)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    computing = [compute(int(count)) for _ in range(turns)]
    rounds = []
    comm.barrier()
    for _ in range(turns):
        start = time.perf_counter()
        handle = begin()
        compute(int(count))
        handle.wait()
        rounds.append(time.perf_counter() - start)
    return max(usual_s(rounds) - usual_s(computing), 1e-6)


def collective_lines(samples: Sequence[Sample]) -> dict[str, Points]:
    """Seconds of each kind of collective among some ranks, on straight lines between what small messages take and each large one.

    What a small message takes between busy ranks varies much, and it is the same for all kinds that go both ways: the median over
    those. Exchanges have a line of their own, T = a + S / B.
    """
    exchanges = [s for s in samples if s.kind == EXCHANGE]
    samples = [s for s in samples if s.kind != EXCHANGE]
    large: dict[str, dict[float, float]] = {}
    for s in samples:
        large.setdefault(s.kind, {})
        if s.shape[0] >= SMALL_BYTES:
            large[s.kind][float(s.shape[0])] = s.seconds
    lines: dict[str, Points] = {}
    for kind, by_size in large.items():
        small = [
            s.seconds for s in samples if s.shape[0] < SMALL_BYTES and COSTS[s.kind].one_way is COSTS[kind].one_way
        ]
        points = sorted({1.0: float(np.median(small)), **by_size}.items())
        lines[kind] = tuple((size, max(s for _, s in points[: i + 1])) for i, (size, _) in enumerate(points))
    if exchanges:
        a, B, _ = fit_line(np.array([s.shape[0] for s in exchanges]), np.array([s.seconds for s in exchanges]))
        most = max(s.shape[0] for s in samples)
        lines[EXCHANGE] = tuple((float(S), a + S / B) for S in (1, most))
    return lines


def exposed_share(samples: Sequence[Sample]) -> float | None:
    """Share of a message that computing meanwhile did not hide, between most of the ranks; None where it was not measured."""
    alone_s = {s.shape[1]: s.seconds for s in samples if s.kind == "all_gather" and s.shape[0] == OVERLAPPED_BYTES}
    shares = {s.shape[1]: s.seconds / alone_s[s.shape[1]] for s in samples if s.kind == OVERLAPPED}
    return float(np.clip(shares[max(shares)], 0.01, 1.0)) if shares else None


def fit_links(samples: Sequence[Sample], level: str = "node", tables: bool = False) -> tuple[Links, dict[str, float]]:
    """The `links` part of a profile: a level's launch time and bandwidth, from all collectives together; with `tables` also what
    each collective took, which then is what it is taken to take."""
    if not samples:
        return {}, {}
    exposed = exposed_share(samples)
    flat = [s._replace(kind=s.kind.removeprefix(FLAT)) for s in samples if s.kind.startswith(FLAT)]
    samples = [s for s in samples if s.kind != OVERLAPPED and not s.kind.startswith(FLAT)]
    plain = [s for s in samples if s.kind != EXCHANGE]
    x = np.array([s.shape[0] * COSTS[s.kind].crosses(s.shape[1]) for s in plain])
    y = np.array([s.seconds for s in plain])
    a, B, _ = fit_line(x, y)
    residuals = {}
    for kind in dict.fromkeys(s.kind for s in plain):
        pick = np.array([s.kind == kind for s in plain])
        residuals[kind] = float(np.median(np.abs((a + x[pick] / B) / y[pick] - 1)))
    link: dict[str, Any] = {
        "bandwidth_Bps": B,
        "base_s": a,
        "latency_s": 0.0,
        "ramp_s": 0.0,
        "efficiency": 1.0,
        "in_switch_efficiency": 1.0,
    }
    if tables:
        link["measured"] = [
            [way + kind, n, [list(point) for point in points]]
            for way, measured in (("", samples), (FLAT, flat))
            for n in dict.fromkeys(s.shape[1] for s in measured)
            for kind, points in collective_lines([s for s in measured if s.shape[1] == n]).items()
        ]
        if exposed is not None:
            link["exposed"] = exposed
    return {level: link}, residuals
