"""The best plans of a transformer on a cluster, by enumeration with pruning.

Every dp x tp x pp x cp (x ep) that multiplies to the ranks is tried with chunks, microbatch, recompute and ZeRO level.
A plan is dropped before it is timed when its memory does not fit, or when its compute at the device's best efficiency
plus its ideal bubble is already slower than the worst plan kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from autopar.cluster import ClusterSpec
from autopar.costmodel.memory import Memory, stage_memory
from autopar.costmodel.shape import ParallelConfig, TransformerShape
from autopar.costmodel.step import USABLE_SHARE, Estimate, chunk_layers, estimate
from autopar.errors import ConstraintError, InfeasibleError


@dataclass(frozen=True)
class Candidate:
    """A plan and what it costs. reason: what it pays for what it saves."""

    parallel: ParallelConfig
    micro_batch: int
    recompute: str
    estimate: Estimate
    reason: str


@dataclass(frozen=True)
class SearchResult:
    """The best plans first; how many were enumerated, timed, and dropped for memory or by their bound."""

    best: tuple[Candidate, ...]
    enumerated: int
    timed: int
    out_of_memory: int
    pruned: int


def divisors(n: int) -> list[int]:
    """All, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def configs(model: TransformerShape, ranks: int, node: int, batch: int) -> Iterator[ParallelConfig]:
    """Sizes that multiply to the ranks: tp inside the innermost link level, cp and ep powers of two."""
    for tp in (t for t in divisors(ranks) if t <= min(node, 16) and model.heads % t == 0 and not t & (t - 1)):
        for pp in (p for p in divisors(ranks // tp) if p <= model.layers):
            for cp in (c for c in (1, 2, 4, 8, 16) if ranks // (tp * pp) % c == 0 and model.seq_len // c >= 1024):
                dp = ranks // (tp * pp * cp)
                if batch % dp:
                    continue
                eps = [1]
                if model.experts:
                    eps = [e for e in (1, 2, 4, 8, 16, 32, 64) if model.experts % e == 0 and (dp * cp * tp) % e == 0]
                chunks: list[int | None] = [None]
                if pp > 1:
                    chunks += [
                        v
                        for v in (2, 4, 8)
                        if pp * v <= model.layers + 2 and (model.layers % (pp * v) in (0, pp * v - 2))
                    ]
                for ep in eps:
                    for vpp in chunks:
                        for zero in (1, 3) if pp == 1 and dp * cp > 1 else (1,):
                            yield ParallelConfig(dp, tp, pp, cp, ep, vpp, tp > 1, zero)


def search(
    model: TransformerShape,
    cluster: ClusterSpec,
    *,
    batch: int,
    precision: str = "bfloat16",
    kernels: str = "fused",
    top: int = 10,
    micro_batches: tuple[int, ...] = (1, 2, 4, 8),
) -> SearchResult:
    """The `top` fastest plans that fit. Raises InfeasibleError saying what is short and what would do."""
    device = cluster.slowest(precision)
    room = USABLE_SHARE * device.memory_bytes
    flops = model.flops_per_token() * batch * model.seq_len / cluster.size
    share = max(
        device.curve.matmul8 if precision in ("float8", "mxfp8") else device.curve.matmul,
        device.curve.matmul4 * (precision == "float4"),
    )
    fastest = flops / (device.peak("float8" if precision == "mxfp8" else precision) * share)
    heap: list[tuple[float, int, Candidate]] = []
    order = count()
    enumerated = timed = short = pruned = 0
    least = float("inf")
    for parallel in configs(model, cluster.size, cluster.levels[0].group_size, batch):
        for b in micro_batches:
            if batch % (parallel.dp * b):
                continue
            m = batch // (parallel.dp * b)
            if parallel.vpp and m % parallel.pp:
                continue
            for recompute in ("none", "selective", "full"):
                enumerated += 1
                schedule = "interleaved" if parallel.vpp else "1f1b"
                memory = first_stage(model, parallel, m, b, recompute, precision, schedule)
                least = min(least, memory.reserved)
                if memory.reserved > room:
                    short += 1
                    continue
                extra = 4 / 3 if recompute == "full" else 1.0
                bound = fastest * extra * (1 + (parallel.pp - 1) / (m * parallel.V)) * 0.98
                if len(heap) == top and bound > -heap[0][0]:
                    pruned += 1
                    break
                try:
                    e = estimate(
                        model=model,
                        cluster=cluster,
                        parallel=parallel,
                        batch=batch,
                        micro_batch=b,
                        recompute=recompute,
                        precision=precision,
                        kernels=kernels,
                        schedule=schedule,
                    )
                except ConstraintError:
                    break
                timed += 1
                if e.fits:
                    entry = (
                        -e.step_time_s,
                        next(order),
                        Candidate(parallel, b, recompute, e, reason(e, recompute, parallel)),
                    )
                    heapq.heappush(heap, entry) if len(heap) < top else heapq.heappushpop(heap, entry)
                    break
    if not heap:
        raise InfeasibleError(infeasible(model, cluster, least))
    best = tuple(c for _, _, c in sorted(heap, key=lambda x: -x[0]))
    return SearchResult(best, enumerated, timed, short, pruned)


def first_stage(
    model: TransformerShape, parallel: ParallelConfig, m: int, b: int, recompute: str, precision: str, schedule: str
) -> Memory:
    """Memory of the first stage: cheap, and a lower bound of the fullest one."""
    layers = sum(chunk_layers(model.layers, parallel.pp, parallel.V)[0])
    return stage_memory(
        model, parallel, stage=0, layers=layers, m=m, b=b, recompute=recompute, precision=precision, schedule=schedule
    )


def reason(e: Estimate, recompute: str, parallel: ParallelConfig) -> str:
    """What the plan loses its time to, and how full it is."""
    step = e.step_time_s
    losses = {"bubble": e.bubble_fraction}
    for kind, what in e.comm.items():
        losses[f"{kind} communication"] = what["exposed_share"]
    if recompute == "full":
        losses["recompute"] = 0.25
    worst = sorted(losses.items(), key=lambda x: -x[1])[:2]
    said = ", ".join(f"{share:.1%} {name}" for name, share in worst if share > 0.001) or "almost nothing lost"
    return f"{said}; compute {e.breakdown['compute'] / step:.0%}"


def infeasible(model: TransformerShape, cluster: ClusterSpec, least: float) -> str:
    """What is short, by how much, and the least device count or storage that would do."""
    device = cluster.device(0)
    state = 16 * model.params
    total = cluster.size * device.memory_bytes
    text = (
        f"no plan fits: {model.params / 1e9:,.0f}B parameters need {state / 1e12:,.2f} TB "
        "for weights, gradients and Adam; "
        f"{cluster.size} x {device.name} have {total / 1e12:,.2f} TB"
    )
    if state > total:
        need = int(-(-state // (USABLE_SHARE * device.memory_bytes)))
        short = (state - total) / 1e12
        return f"{text}: {short:,.2f} TB short. Use {need:,} such devices or more, or offload that much to host or NVMe"
    over = (least - USABLE_SHARE * device.memory_bytes) / 1e9
    advice = "use a smaller microbatch or sequence, more devices, or offload"
    return f"{text}, but the leanest plan is {over:,.1f} GB over on the fullest device; {advice}"


def with_devices(cluster: ClusterSpec, n: int) -> ClusterSpec:
    """The same kind of cluster with n devices (for scaling tables)."""
    outer = cluster.levels[-1]
    levels = tuple(lv for lv in cluster.levels[:-1] if lv.group_size <= n) + (replace(outer, group_size=max(n, 1)),)
    return ClusterSpec(f"{cluster.name}-{n}", ((n, cluster.device(0)),), levels)
