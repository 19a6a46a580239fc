"""A pipeline: what every stage does for a microbatch, and how long the schedule takes for all of them.

The pipeline is the event simulator on the schedule's action table. Once it is full every further microbatch adds the
same period, so only the first rounds are simulated. The period is the slowest stage's work; in 1F1B, whose sends wait
for each other, 2c (p-1)/p more for sends of c seconds.
"""

from __future__ import annotations

from functools import lru_cache

from autopar.costmodel import simulate
from autopar.costmodel.bill import StageBill, group_seconds
from autopar.costmodel.collective import strided_time_s
from autopar.costmodel.estimator.layer import LayerBills
from autopar.costmodel.estimator.schedules import ESTIMATED
from autopar.costmodel.estimator.shape import TransformerShape
from autopar.costmodel.estimator.workload import Workload
from autopar.ir.actions import StageGraph
from autopar.ir.schedules import SCHEDULES

Layers = tuple[tuple[int, ...], ...]
"""Layers of every stage's chunks, as `chunk_layers` gives them."""

SIMULATED_ACTIONS = 1100
"""Larger pipelines are timed by the closed form, which is the simulator's answer for equal stages."""


@lru_cache(maxsize=4096)
def chunk_layers(layers: int, p: int, V: int, further: int = 0) -> Layers:
    """Layers of each stage's chunks, in model order round-robin over stages.

    Embedding and head count as a layer each where that makes the chunks even (and there are several); otherwise chunks
    differ by at most one layer and the last ones, next to the head, are the smaller. further: layers that predict further tokens,
    which stand last: where there are any, chunks are even but for the last, which has what is left beside them.
    """
    chunks = p * V
    even = -(-layers // chunks)
    left = layers - (chunks - 1) * even
    if further and chunks > 1 and left > 0:
        counts = [even] * (chunks - 1) + [left]
    elif chunks > 1 and layers % chunks and (layers + 2) % chunks == 0:
        counts = [(layers + 2) // chunks] * chunks
        counts[0] -= 1
        counts[-1] -= 1
    else:
        low, extra = divmod(layers, chunks)
        counts = [low] * chunks
        for i in range(extra):
            counts[chunks - 2 - i if extra < chunks else i] += 1
    return tuple(tuple(counts[c * p + i] for c in range(V)) for i in range(p))


@lru_cache(maxsize=256)
def _network(order: str, p: int, m: int, V: int) -> simulate.Network:
    graph = StageGraph.chain(p, V)
    return simulate.network(SCHEDULES[order].table(graph, m), graph)


def pipeline_s(name: str, p: int, m: int, V: int, seconds: simulate.Durations, comm_s: float) -> float:
    """Seconds of one step's pipeline of p groups with V stages each. seconds: of (stage, kind); stage s is on group s % p."""
    groups = groups_of(p, V)
    work = group_seconds(seconds, groups)
    slowest = max(work)
    if p == 1:
        return m * slowest
    row = ESTIMATED[name]
    if row.closed_s is not None:
        return row.closed_s(p, m, slowest, seconds, comm_s)
    part = simulated_rounds(name, p, m, V)
    period = slowest + (2 * comm_s * (p - 1) / p if row.sends_wait else 0.0)
    if part:
        return simulate.longest_s(_network(row.order, p, part, V), seconds, comm_s) + (m - part) * period
    saved = row.W_saved * min(group_seconds(seconds, groups, "W")) * (p - 1)
    fill = (sum(work) - slowest) / V + 2 * (p - 1) * comm_s - saved
    return slowest * min(m, p) + max(0, m - p) * period + max(0.0, fill)


def simulated_rounds(name: str, p: int, m: int, V: int) -> int:
    """Microbatches that `pipeline_s` runs through the simulator; 0 where it has a closed form."""
    row = ESTIMATED[name]
    if p == 1 or row.closed_s is not None:
        return 0
    part = row.rounds(p, m)
    return part if 2 * p * V * part <= SIMULATED_ACTIONS else 0


def groups_of(p: int, V: int) -> tuple[tuple[int, ...], ...]:
    """The stages of every group: stage s is on group s % p."""
    return tuple(tuple(range(i, p * V, p)) for i in range(p))


def fullest(layers: Layers) -> int:
    """The group with most layers."""
    return max(range(len(layers)), key=lambda i: sum(layers[i]))


def stage_bills(model: TransformerShape, layers: Layers, bills: LayerBills) -> list[StageBill]:
    """The calls of every stage; stages that make the same calls share a bill."""
    p, V = len(layers), len(layers[0])
    dense_left = model.layers - model.moe_layers
    alike: dict[tuple[int, int, bool], StageBill] = {}
    stages = []
    for ch in range(V):
        for i in range(p):
            n = layers[i][ch]
            n_dense = min(n, dense_left) if bills.moe else n
            dense_left -= n_dense
            last = i == p - 1 and ch == V - 1
            if (n, n_dense, last) not in alike:
                calls = [(bills.dense, n_dense), (bills.moe, n - n_dense)]
                calls += [(bills.head, 1), (bills.further, model.mtp_layers)] if last else []
                made = tuple((call, count) for call, count in calls if call is not None and count)
                alike[n, n_dense, last] = StageBill(made)
            stages.append(alike[n, n_dense, last])
    return stages


def send_s(w: Workload) -> float:
    """Seconds to hand one microbatch's activations to the next stage."""
    p = w.parallel
    if p.pp == 1:
        return 0.0
    stride = p.tp * p.cp * p.dp
    return strided_time_s(w.cluster, "p2p", w.width * w.tokens * w.model.hidden / w.sequence_split, stride, 2)
