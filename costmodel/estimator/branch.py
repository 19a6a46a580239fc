"""The parts of a search's space and their bounds: what `search` opens, best first.

A part is a set of plans that share some decisions; opening it makes the next one. From large to small, each with the
lower bound of the step time of every plan in it:

    sizes      (tp, cp, ep, microbatch)            all of the model's work, without recompute, spread evenly
    cut        + pp and dp, recompute, ZeRO-3?     the same with what is recomputed, whole layers
    schedule   + chunks                            the fullest group's layers, filling the pipeline
    timed                                          the slowest group's work, filling and draining the pipeline
    storage    + ZeRO level and its group          + gradients, parameters, optimizer: the fastest that fits in memory

Every bound adds terms of `estimate` that only grow further down. A part is left out when the leanest of its plans does
not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log2
from typing import Any, NamedTuple

from autopar.cluster import ClusterSpec
from autopar.cluster.device import dtype_name
from autopar.costmodel.estimator.layer import Cost, StepConstants, Work, default_constants, head_cost, layer_cost
from autopar.costmodel.estimator.memory import Memory, layer_activation_bytes, stage_memory
from autopar.costmodel.estimator.shape import ParallelConfig, TransformerShape
from autopar.costmodel.estimator.space import Space, micro_batches, pipelines, sizes, storages
from autopar.costmodel.estimator.step import (
    USABLE_SHARE,
    Estimate,
    adam_s,
    busiest,
    chunk_layers,
    data_parallel_s,
    estimate,
    fullest_stage,
    group_seconds,
    pipeline_s,
    send_s,
    simulated_rounds,
    stage_seconds,
)


@dataclass(frozen=True)
class Software:
    """What the plans run on, as `estimate` takes it: none of it is the search's to choose."""

    precision: str = "bfloat16"
    kernels: str = "fused"
    overlap_tp: bool = True
    grad_bytes: float | None = None
    reduce_bytes: float = 2.0
    late_reduction: bool = False
    buffer_bytes: float = 0.0
    constants: StepConstants | None = None


@dataclass(frozen=True)
class Timed:
    """A pipeline's least seconds, and (forward, backward) of a microbatch on the group with most layers."""

    span_s: float
    busy: tuple[float, float]


class Part(NamedTuple):
    """Plans that share these decisions. cuts: (dp, pp) still possible; cut: whether one is chosen, with recompute and
    zero3 (are parameters sharded?); schedule: "" while open; timed: the pipeline's seconds, once known; storage: ZeRO
    level and group."""

    tp: int
    cp: int
    ep: int
    expert_tp: int
    sequence_parallel: bool
    b: int
    cuts: tuple[tuple[int, int], ...]
    cut: bool = False
    recompute: str = "none"
    zero3: bool = False
    schedule: str = ""
    vpp: int | None = None
    timed: Timed | None = None
    storage: tuple[int, int | None] | None = None

    def config(self) -> ParallelConfig:
        """As a plan; of open decisions the first."""
        dp, pp = self.cuts[0]
        zero, group = self.storage or (3 if self.zero3 else 1, None)
        return ParallelConfig(
            dp, self.tp, pp, self.cp, self.ep, self.vpp, self.sequence_parallel, zero, shard_group=group
        )


class Question:
    """One search while it runs: its inputs, the costs of layers it has seen, and its counters."""

    def __init__(
        self,
        model: TransformerShape,
        cluster: ClusterSpec,
        batch: int,
        software: Software,
        space: Space,
        room: float | None,
    ):
        self.model, self.cluster, self.batch, self.software, self.space = model, cluster, batch, software, space
        precision = software.precision
        self.precision = precision if precision == "mxfp8" else dtype_name(precision)
        self.device = cluster.slowest(self.precision)
        self.constants = software.constants or default_constants()
        self.room = USABLE_SHARE * self.device.memory_bytes if room is None else room
        nodes = max(1.0, cluster.size / cluster.levels[0].group_size)
        self.jitter = (1 + self.constants.jitter * log2(nodes)) * (1 - 1e-12)
        self.costs: dict[tuple[Any, ...], tuple[Work, Cost | None, Cost | None, Cost]] = {}
        self.least = float("inf")
        self.opened = self.timed = self.short = 0

    def work(self, part: Part) -> tuple[Work, Cost | None, Cost | None, Cost]:
        """(what a layer's time depends on, a dense layer, one with experts, the head), remembered."""
        gathered = part.zero3 and part.recompute == "selective"
        key = (part.tp, part.cp, part.ep, part.expert_tp, part.sequence_parallel, part.b, part.recompute, gathered)
        if key not in self.costs:
            s, m = self.software, self.model
            w = Work(
                m,
                self.cluster,
                self.device,
                part.config(),
                part.b,
                self.precision,
                part.recompute,
                s.kernels,
                s.overlap_tp,
                self.constants,
            )
            dense = layer_cost(w, False) if m.moe_layers < m.layers else None
            self.costs[key] = w, dense, layer_cost(w, True) if m.experts else None, head_cost(w)
        return self.costs[key]

    def step_s(self, span_s: float) -> float:
        """A step that has nothing else to do."""
        return (span_s + self.constants.step_overhead_s) * self.jitter

    def rounds(self, part: Part) -> int:
        """Microbatches of a step."""
        return self.batch // (part.cuts[0][0] * part.b)

    def layers_s(self, part: Part) -> tuple[float, float]:
        """Seconds of one microbatch: (all layers and the head, the cheapest layer)."""
        _, dense, moe, head = self.work(part)
        n_moe = self.model.moe_layers
        one, expert = seconds(dense) if dense else 0.0, seconds(moe) if moe else 0.0
        body = (self.model.layers - n_moe) * one + n_moe * expert
        return body + seconds(head), min(one or expert, expert or one)

    def start(self) -> Iterator[tuple[float, Part]]:
        """All sizes. One microbatch of a layer must fit, and the model's work is spread over the groups at best."""
        found: dict[Part, list[tuple[int, int]]] = {}
        for dp, tp, pp, cp, ep in sizes(self.model, self.cluster.size, self.batch, self.space):
            expert_tp = ParallelConfig(dp, tp, pp, cp, ep).expert_tp
            for b in micro_batches(self.batch, dp, self.space):
                for sequence_parallel in (True, False) if tp > 1 else (False,):
                    found.setdefault(Part(tp, cp, ep, expert_tp, sequence_parallel, b, ()), []).append((dp, pp))
        for key, cuts in found.items():
            part = key._replace(cuts=tuple(cuts))
            self.opened += 1
            if self.one_layer(part) > self.room:
                self.short += 1
                continue
            rounds = self.batch * part.tp * part.cp / (self.cluster.size * part.b)
            yield self.step_s(rounds * self.layers_s(part)[0]), part

    def one_layer(self, part: Part) -> float:
        """Least bytes that one layer's backward needs, whatever is recomputed (for a moment, all of it is there)."""
        plan, moe, eager = part.config(), bool(self.model.experts), self.software.kernels == "eager"
        leanest = (("mlp", plan), ("selective", replace(plan, zero=3)))
        return min(layer_activation_bytes(self.model, p, part.b, k, self.precision, moe, eager) for k, p in leanest)

    def open(self, part: Part) -> Iterator[tuple[float, Part]]:
        """The parts of a part, with their bounds; those that cannot fit are left out."""
        if part.timed:
            return self.stored(part, part.timed)
        if part.schedule:
            return self.spanned(part)
        return self.pipelined(part) if part.cut else self.cuts(part)

    def cuts(self, part: Part) -> Iterator[tuple[float, Part]]:
        """Chooses pp (and with it dp), what is recomputed and whether parameters are sharded."""
        for dp, pp in part.cuts:
            m = self.batch // (dp * part.b)
            for recompute in self.space.recomputes:
                for zero3 in (False, True) if 3 in self.space.zeros and dp * part.cp > 1 else (False,):
                    child = part._replace(cuts=((dp, pp),), cut=True, recompute=recompute, zero3=zero3)
                    self.opened += 1
                    whole, one = self.layers_s(child)
                    slowest = max(whole / pp, -(-self.model.layers // pp) * one)
                    yield self.step_s(m * slowest), child

    def pipelined(self, part: Part) -> Iterator[tuple[float, Part]]:
        """Chooses schedule and chunks: the fullest group's work, and what must pass before and after it."""
        (dp, pp) = part.cuts[0]
        m, layers = self.batch // (dp * part.b), self.model.layers
        if self.leanest(part, "1f1b", least_layers(layers, pp, self.space.max_chunks), m) > self.room:
            self.short += 1
            return
        _, dense, moe, _ = self.work(part)
        whole, one = self.layers_s(part)
        costs = [c for c in (dense, moe) if c is not None]
        forward = min(c.F + c.exposed_forward for c in costs)
        for name, vpp in pipelines(layers, pp, m, self.space):
            self.opened += 1
            chunks = chunk_layers(layers, pp, vpp or 1)
            most = max(map(sum, chunks))
            fill = 0.0 if name in ("zb-2p", "zb-v", "zb-h2") else 0.5 * (pp - 1) * min(map(min, chunks)) * forward
            yield self.step_s(m * max(most * one, whole / pp) + fill), part._replace(schedule=name, vpp=vpp)

    def spanned(self, part: Part) -> Iterator[tuple[float, Part]]:
        """Times the groups of a pipeline, unless it cannot fit."""
        (_, pp), model = part.cuts[0], self.model
        m, chunks = self.rounds(part), chunk_layers(model.layers, pp, part.vpp or 1)
        if self.leanest(part, part.schedule, sum(chunks[0]), m) > self.room:
            self.short += 1
            return
        w, dense, moe, head = self.work(part)
        times, _ = stage_seconds(model, chunks, dense, moe, head, pp, part.vpp or 1)
        sent_s = 0.0 if pp == 1 else send_s(replace(w, parallel=part.config()))
        timed = Timed(span_bound_s(part.schedule, pp, m, part.vpp or 1, times, sent_s), busiest(times, chunks, pp))
        yield self.step_s(timed.span_s), part._replace(timed=timed)

    def stored(self, part: Part, timed: Timed) -> Iterator[tuple[float, Part]]:
        """Chooses where optimizer, gradients and parameters lie: the fastest way that fits."""
        (dp, pp), s = part.cuts[0], self.software
        m, chunks, w = self.rounds(part), chunk_layers(self.model.layers, pp, part.vpp or 1), self.work(part)[0]
        ways: list[tuple[float, int, Part]] = []
        for storage in storages(dp * part.cp, self.space.zeros, part.zero3):
            child = part._replace(storage=storage)
            at = replace(w, parallel=child.config())
            _, exposed = data_parallel_s(at, timed.busy, chunks, m, s.reduce_bytes, s.late_reduction)
            ways.append((exposed + adam_s(at, chunks), len(ways), child))
        self.opened += len(ways)
        for extra, _, child in sorted(ways, key=lambda way: way[:2]):
            held = self.memory(child, chunks, m).reserved
            self.least = min(self.least, held)
            if held <= self.room:
                yield self.step_s(timed.span_s + extra), child
                return
            self.short += 1

    def leanest(self, part: Part, schedule: str, layers: int, m: int) -> float:
        """Bytes of the first stage when as much as may be is sharded over all data-parallel ranks."""
        s, zero = self.software, 3 if part.zero3 else max((z for z in self.space.zeros if z < 3), default=3)
        held = stage_memory(
            self.model,
            replace(part.config(), zero=zero),
            stage=0,
            layers=layers,
            m=m,
            b=part.b,
            recompute=part.recompute,
            precision=self.precision,
            schedule=schedule,
            eager=s.kernels == "eager",
            grad_bytes=s.grad_bytes or 4.0,
            late_reduction=s.late_reduction,
            buffer_bytes=s.buffer_bytes,
        )
        self.least = min(self.least, held.reserved)
        return held.reserved

    def memory(self, part: Part, chunks: tuple[tuple[int, ...], ...], m: int) -> Memory:
        """Bytes of the fullest stage, as `estimate` has them."""
        s = self.software
        return fullest_stage(
            self.model,
            part.config(),
            chunks,
            m=m,
            b=part.b,
            recompute=part.recompute,
            precision=self.precision,
            schedule=part.schedule,
            eager=s.kernels == "eager",
            grad_bytes=s.grad_bytes or 4.0,
            late_reduction=s.late_reduction,
            buffer_bytes=s.buffer_bytes,
        )

    def time(self, part: Part) -> Estimate:
        """The estimate of a plan."""
        self.timed += 1
        return estimate(
            model=self.model,
            cluster=self.cluster,
            parallel=part.config(),
            batch=self.batch,
            micro_batch=part.b,
            recompute=part.recompute,
            schedule=part.schedule,
            **self.software.__dict__,
        )


@lru_cache(maxsize=4096)
def least_layers(layers: int, pp: int, chunks: int) -> int:
    """Fewest layers that the first of pp groups can have, whatever the number of chunks."""
    return min(sum(chunk_layers(layers, pp, V)[0]) for V in range(1, max(1, min(chunks, (layers + 2) // pp)) + 1))


def seconds(cost: Cost) -> float:
    """One microbatch's forward and backward, exposed communication included."""
    return cost.F + cost.B + cost.W + cost.again + cost.exposed_forward + cost.exposed_backward


def span_bound_s(name: str, p: int, m: int, V: int, times: dict[tuple[int, str], float], comm_s: float) -> float:
    """Least seconds of a pipeline; exact where no simulation is needed. Otherwise: before a group's first action its
    input passes the groups before it, and after its last backward the gradient passes them again, beside the one
    weight gradient that is left. Zero-bubble schedules may have more left: there the slowest group's work counts."""
    if not simulated_rounds(name, p, m, V):
        return pipeline_s(name, p, m, V, times, comm_s)
    work = group_seconds(times, p)
    if name.startswith("zb"):
        return m * max(work)
    best = before = after = 0.0
    for i in range(p):
        best = max(best, before + m * work[i] + max(0.0, after - times[i, "W"]))
        before += times[i, "F"] + comm_s
        after += times[i, "B"] + comm_s
    return best
