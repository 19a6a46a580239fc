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
from typing import Any, NamedTuple

from autopar.cluster import ClusterSpec
from autopar.costmodel.bill import (
    CallSeconds,
    call_seconds,
    cluster_nodes,
    exposed_parameters_s,
    group_seconds,
    least_step_s,
    overlap_window,
    stage_seconds,
)
from autopar.costmodel.estimator.layer import LayerBills, layer_bills
from autopar.costmodel.estimator.memory import fullest_stage, layer_activation_bytes, stage_memory
from autopar.costmodel.estimator.parameters import parameter_traffic, update_s
from autopar.costmodel.estimator.pipeline_time import (
    Layers,
    chunk_layers,
    fullest,
    groups_of,
    pipeline_s,
    send_s,
    simulated_rounds,
    stage_bills,
)
from autopar.costmodel.estimator.schedules import ESTIMATED
from autopar.costmodel.estimator.shape import ParallelConfig, TransformerShape
from autopar.costmodel.estimator.space import Space, micro_batches, pipelines, sizes, storages
from autopar.costmodel.estimator.step import Estimate, estimate
from autopar.costmodel.estimator.workload import StepPlan, Workload, not_emitted
from autopar.costmodel.software import Software


@dataclass(frozen=True)
class Timed:
    """A pipeline's least seconds, and (forward, backward) of a microbatch on the group with most layers."""

    span_s: float
    busy: tuple[float, float]


@dataclass(frozen=True)
class ReadLayers:
    """The bills of a model's layers and their seconds: of every kind of layer, dense first, and of the head."""

    bills: LayerBills
    kinds: tuple[CallSeconds, ...]
    head: CallSeconds


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

    def plan(self) -> StepPlan:
        """The part as a plan; of open decisions the first."""
        dp, pp = self.cuts[0]
        zero, group = self.storage or (3 if self.zero3 else 1, None)
        parallel = ParallelConfig(
            dp, self.tp, pp, self.cp, self.ep, self.vpp, self.sequence_parallel, zero, shard_group=group
        )
        return StepPlan(parallel, self.b, self.recompute, self.schedule or "1f1b")


class BranchAndBound:
    """One search while it runs: its inputs, the costs of layers it has seen, and its counters.

    room: bytes that a process may take. opened, timed, short: parts made, plans estimated, parts left out for memory.
    least: bytes of the leanest plan seen.
    """

    def __init__(
        self,
        model: TransformerShape,
        cluster: ClusterSpec,
        batch: int,
        software: Software,
        space: Space,
        room: float | None,
    ):
        self.model, self.cluster, self.batch, self.space = model, cluster, batch, space
        self.software = software.canonical()
        self.device = cluster.pace(0, cluster.size)
        self.room = self.device.memory_bytes if room is None else room
        self.layers: dict[tuple[Any, ...], ReadLayers] = {}
        self.least = float("inf")
        self.opened = self.timed = self.short = 0

    def workload(self, part: Part) -> Workload:
        """A part as the formulas take it; of open decisions the first."""
        return Workload(self.model, self.cluster, self.device, part.plan(), self.software, self.batch)

    def allows(self, part: Part) -> bool:
        """Whether the software has such plans."""
        return not (self.software.is_emitted and not_emitted(self.workload(part)))

    def read_layers(self, part: Part) -> ReadLayers:
        """The model's layers, remembered by what they depend on."""
        gathered = part.zero3 and part.recompute == "selective"
        key = (part.tp, part.cp, part.ep, part.expert_tp, part.sequence_parallel, part.b, part.recompute, gathered)
        if key not in self.layers:
            bills = layer_bills(self.workload(part))
            kinds = [call_seconds(call, self.software) for call in (bills.dense, bills.moe) if call is not None]
            self.layers[key] = ReadLayers(bills, tuple(kinds), call_seconds(bills.head, self.software))
        return self.layers[key]

    def step_s(self, span_s: float) -> float:
        """A step that has nothing else to do."""
        return least_step_s(span_s, cluster_nodes(self.cluster), self.software) * (1 - 1e-12)

    def layers_s(self, part: Part) -> tuple[float, float]:
        """Seconds of one microbatch: (all layers and the head, the cheapest layer)."""
        read, n_moe = self.read_layers(part), self.model.moe_layers
        seconds = [kind.total_s for kind in read.kinds]
        body = (self.model.layers - n_moe) * seconds[0] + n_moe * seconds[-1]
        return body + read.head.total_s, min(seconds)

    def start(self) -> Iterator[tuple[float, Part]]:
        """All sizes. One microbatch of a layer must fit, and the model's work is spread over the groups at best."""
        cuts_by_part: dict[Part, list[tuple[int, int]]] = {}
        unequal = self.software.is_emitted
        for dp, tp, pp, cp, ep in sizes(self.model, self.cluster.size, self.batch, self.space, unequal):
            expert_tp = ParallelConfig(dp, tp, pp, cp, ep).expert_tp
            scattered = ParallelConfig(dp, tp, pp, cp, ep, sequence_parallel=True)
            ways = (True, False) if tp > 1 and not scattered.impossible(self.model, unequal) else (False,)
            for b in micro_batches(self.batch, dp, self.space, unequal and ep == 1):
                for sequence_parallel in ways:
                    key = Part(tp, cp, ep, expert_tp, sequence_parallel, b, ())
                    if not self.allows(key._replace(cuts=((dp, pp),))):
                        continue
                    cuts_by_part.setdefault(key, []).append((dp, pp))
        for key, cuts in cuts_by_part.items():
            part = key._replace(cuts=tuple(cuts))
            self.opened += 1
            if self.one_layer(part) > self.room:
                self.short += 1
                continue
            rounds = self.batch * part.tp * part.cp / (self.cluster.size * part.b)
            yield self.step_s(rounds * self.layers_s(part)[0]), part

    def one_layer(self, part: Part) -> float:
        """Least bytes that one layer's backward needs, whatever is recomputed (for a moment, all of it is there)."""
        w = self.workload(part)
        sharded = replace(w, plan=replace(w.plan, parallel=replace(w.parallel, zero=3)))
        return min(layer_activation_bytes(w, "mlp"), layer_activation_bytes(sharded, "selective"))

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
            m = self.workload(part._replace(cuts=((dp, pp),))).microbatches
            for recompute in self.space.recomputes:
                for zero3 in (False, True) if 3 in self.space.zeros and dp * part.cp > 1 else (False,):
                    child = part._replace(cuts=((dp, pp),), cut=True, recompute=recompute, zero3=zero3)
                    if not self.allows(child):
                        continue
                    self.opened += 1
                    whole, one = self.layers_s(child)
                    slowest = max(whole / pp, -(-self.model.layers // pp) * one)
                    yield self.step_s(m * slowest), child

    def pipelined(self, part: Part) -> Iterator[tuple[float, Part]]:
        """Chooses schedule and chunks: the fullest group's work, and what must pass before and after it."""
        (_, pp) = part.cuts[0]
        m = self.workload(part).microbatches
        if self.leanest(part, least_layers(self.model, pp, self.space.max_chunks)) > self.room:
            self.short += 1
            return
        whole, one = self.layers_s(part)
        forward = min(kind.F for kind in self.read_layers(part).kinds)
        for name, vpp in pipelines(self.model, pp, m, self.space):
            self.opened += 1
            chunks = chunk_layers(self.model.layers, pp, vpp or 1, self.model.mtp_layers)
            most = max(map(sum, chunks))
            fill = 0.5 * (pp - 1) * min(map(min, chunks)) * forward if ESTIMATED[name].fills else 0.0
            yield self.step_s(m * max(most * one, whole / pp) + fill), part._replace(schedule=name, vpp=vpp)

    def spanned(self, part: Part) -> Iterator[tuple[float, Part]]:
        """Times the groups of a pipeline, unless it cannot fit."""
        (_, pp), chunks = part.cuts[0], self.chunks(part)
        if self.leanest(part, sum(chunks[0])) > self.room:
            self.short += 1
            return
        w = self.workload(part)
        times, _ = stage_seconds(stage_bills(self.model, chunks, self.read_layers(part).bills), self.software)
        span_s = span_bound_s(part.schedule, pp, w.microbatches, part.vpp or 1, times, send_s(w))
        full = groups_of(pp, len(chunks[0]))[fullest(chunks)]
        busy = group_seconds(times, [full], "F")[0], group_seconds(times, [full], "BW")[0]
        yield self.step_s(span_s), part._replace(timed=Timed(span_s, busy))

    def stored(self, part: Part, timed: Timed) -> Iterator[tuple[float, Part]]:
        """Chooses where optimizer, gradients and parameters lie: the fastest way that fits."""
        (dp, _), chunks = part.cuts[0], self.chunks(part)
        extra_s: list[tuple[float, int, Part]] = []
        for storage in storages(dp * part.cp, self.space.zeros, part.zero3):
            child = part._replace(storage=storage)
            if not self.allows(child):
                continue
            w = self.workload(child)
            m = w.microbatches
            window = overlap_window(len(chunks[0]), len(chunks), m)
            exposed = exposed_parameters_s(parameter_traffic(w, chunks), timed.busy, m, window, self.software)
            extra_s.append((exposed + update_s(w, chunks), len(extra_s), child))
        self.opened += len(extra_s)
        for extra, _, child in sorted(extra_s, key=lambda way: way[:2]):
            held = fullest_stage(self.workload(child), chunks).reserved
            self.least = min(self.least, held)
            if held <= self.room:
                yield self.step_s(timed.span_s + extra), child
                return
            self.short += 1

    def chunks(self, part: Part) -> Layers:
        """Layers of every stage's chunks."""
        return chunk_layers(self.model.layers, part.cuts[0][1], part.vpp or 1, self.model.mtp_layers)

    def leanest(self, part: Part, layers: int) -> float:
        """Bytes of the first stage when as much as may be is sharded over all data-parallel ranks."""
        zero = 3 if part.zero3 else max((z for z in self.space.zeros if z < 3), default=3)
        held = stage_memory(self.workload(part._replace(storage=(zero, None))), 0, layers)
        self.least = min(self.least, held.reserved)
        return held.reserved

    def time(self, part: Part) -> Estimate:
        """The estimate of a plan."""
        self.timed += 1
        return estimate(self.model, self.cluster, part.plan(), batch=self.batch, software=self.software)


@lru_cache(maxsize=4096)
def least_layers(model: TransformerShape, pp: int, chunks: int) -> int:
    """Fewest layers that the first of pp groups can have, whatever the number of chunks."""
    most = max(1, min(chunks, model.most_stages // pp))
    return min(sum(chunk_layers(model.layers, pp, V, model.mtp_layers)[0]) for V in range(1, most + 1))


def span_bound_s(name: str, p: int, m: int, V: int, times: dict[tuple[int, str], float], comm_s: float) -> float:
    """Least seconds of a pipeline; exact where no simulation is needed. Otherwise: before a group's first action its
    input passes the groups before it, and after its last backward the gradient passes them again, beside the one
    weight gradient that is left. Zero-bubble schedules may have more left: there the slowest group's work counts."""
    if not simulated_rounds(name, p, m, V):
        return pipeline_s(name, p, m, V, times, comm_s)
    work = group_seconds(times, groups_of(p, V))
    if name.startswith("zb"):
        return m * max(work)
    best = before = after = 0.0
    for i in range(p):
        best = max(best, before + m * work[i] + max(0.0, after - times[i, "W"]))
        before += times[i, "F"] + comm_s
        after += times[i, "B"] + comm_s
    return best
