"""The cost model as the passes ask it, with the mesh filled in: seconds per op on a block, per collective along an axis.

One `Pricer` serves one mesh on one cluster; nothing is cached across meshes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from autopar.cluster import ClusterSpec
from autopar.costmodel import collective, compute
from autopar.costmodel.bill import cluster_nodes, least_step_s
from autopar.costmodel.by_node import gloo_time_s
from autopar.costmodel.software import Software, emitted_on
from autopar.ir.call import OpCall
from autopar.ir.lines import Sent
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule, Strategy, carried_choices, factors_of
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType, dtype_name
from autopar.ops.registry import Grouped, find
from autopar.passes.price.compression import compressed_messages, compressing_bytes, compression_of, wire_share
from autopar.passes.price.mixtures import moved_bytes, work_share
from autopar.passes.price.op_choices import OpChoices
from autopar.passes.rules.alphabet import Shards, shards
from autopar.passes.rules.lattice import CollectiveCost, Lattice
from autopar.passes.rules.sends import sent_by
from autopar.passes.rules.strategy_table import strategy_table

PIECE = "piece"
"""The axis of pieces of a block, which a rank has one after another."""


class Pricer:
    """Prices for one mesh. `lattice(type)` and all times are cached for this mesh only.

    copy_s: seconds per byte that kernels read or write. software: by default that of programs emitted for the cluster.
    """

    def __init__(self, cluster: ClusterSpec, mesh: Mesh, software: Software | None = None) -> None:
        self.cluster, self.mesh, self.software = cluster, mesh, software or emitted_on(cluster)
        self.device = cluster.device(mesh.offset)
        self.copy_s = 1.0 / (self.device.memory_bandwidth_Bps * self.device.curve.memory)
        self._groups = {axis: mesh.group((axis,)) for axis in mesh.names}
        self._lattices: dict[tuple[TensorType, tuple[str, ...], tuple[str, ...], str], Lattice] = {}
        self._alike: dict[tuple[tuple[int, ...], int, tuple[str, ...], tuple[str, ...], str], Lattice] = {}
        self._collectives: dict[tuple[str, float, str], float] = {}
        self._choices: dict[str, OpChoices] = {}
        self._of_pieces: dict[int, Pricer] = {}
        self._arrivals: dict[tuple[TensorType, Spec], tuple[Spec, float]] = {}

    def of_pieces(self, count: int) -> Pricer:
        """Prices of ops that have one of so many pieces of their blocks, cut along the last axis of this pricer's mesh."""
        if count not in self._of_pieces:
            mesh = Mesh((*self.mesh.axes, (PIECE, count)), self.mesh.offset)
            self._of_pieces[count] = Pricer(self.cluster, mesh, self.software)
        return self._of_pieces[count]

    def collective_s(self, kind: str, nbytes: float, axis: str) -> float:
        """Seconds of one collective along `axis`; nbytes is the full array (see costmodel.collective)."""
        key = (kind, nbytes, axis)
        if key not in self._collectives:
            self._collectives[key] = gloo_time_s(self.cluster, kind, nbytes, self._groups[axis])
        return self._collectives[key]

    def bucketed_s(self, kind: str, nbytes: float, axis: str, packed: float = 1.0) -> float:
        """Seconds of nbytes inside a larger message: gradients, updated parameters and the loss travel together. packed: bytes
        of the message per byte of its bucket, where it is compressed."""
        whole = self.software.bucket_bytes * packed
        return self.collective_s(kind, max(nbytes, whole), axis) * min(nbytes / whole, 1.0)

    def joined_s(self, joined: tuple[str, ...], compression: str = "", itemsize: int = 1) -> CollectiveCost:
        """The price of a step of gradients or updated values: messages of these kinds travel in one with others, and what else
        is sent goes by itself, so that it is no cheap way around them. compression: of sums, with so many bytes an element."""
        packed = wire_share(compression, itemsize) if compression else 1.0

        def price(kind: str, nbytes: float, axis: str) -> float:
            if kind not in joined:
                return self.collective_s(kind, nbytes, axis)
            if not compression:
                return self.bucketed_s(kind, nbytes, axis)
            messages = compressed_messages(kind, nbytes, compression, itemsize)
            sent_s = sum(self.bucketed_s(sent, wire, axis, packed) for sent, wire in messages)
            return sent_s + self.copy_s * compressing_bytes(kind, nbytes, compression, self.mesh.sizes[axis])

        return price

    def meeting_s(self, kind: str, axis: str) -> float:
        """Seconds until ranks that compute meet for a message, however small it is; where collectives were not measured it is in
        the price of each."""
        return self.collective_s(kind, 1.0, axis) if self.is_measured else 0.0

    def rendezvous_s(self, axes: Iterable[str]) -> float:
        """Seconds until they meet for messages along these axes that are under way together."""
        return sum(self.meeting_s("all_reduce", axis) for axis in sorted(set(axes)) if self.mesh.sizes[axis] > 1)

    @cached_property
    def is_measured(self) -> bool:
        """Whether collectives of some link were measured one by one."""
        return any(level.measured for level in self.cluster.levels)

    def lattice(
        self, type_: TensorType, ops: tuple[str, ...] = ("sum",), joined: tuple[str, ...] = (), compression: str = ""
    ) -> Lattice:
        """Conversions of one tensor type; `ops`: reductions that may be owed. joined, compression: as of `joined_s`. Types of as
        many bytes whose dims divide alike share one lattice."""
        compression = compression_of(type_, compression)
        key = (type_, ops, joined, compression)
        if key not in self._lattices:
            shape = tuple(math.gcd(n, self.mesh.size) for n in type_.shape)
            alike = (shape, type_.nbytes, ops, joined, compression and f"{compression} {type_.dtype.itemsize}")
            if alike not in self._alike:
                price = self.joined_s(joined, compression, type_.dtype.itemsize) if joined else self.collective_s
                self._alike[alike] = Lattice(shape, type_.nbytes, self.mesh, price, self.copy_s, ops)
            self._lattices[key] = self._alike[alike]
        return self._lattices[key]

    def shards(self, type_: TensorType) -> Shards:
        """The specs that a tensor may have on the mesh."""
        return shards(self.mesh.axes, len(type_.shape))

    def convert_s(self, type_: TensorType, before: Spec, after: Spec) -> float:
        """Seconds to bring a value from one spec to another."""
        if before == after:
            return 0.0
        ops = tuple(sorted({"sum", *(op for _, op in before.partial), *(op for _, op in after.partial)}))
        return self.lattice(type_, ops).cost(before, after)

    def cast_s(self, before: TensorType, after: TensorType, spec: Spec) -> float:
        """Seconds to cast a block from one dtype to another: it is read and written."""
        return self.copy_s * (spec.local_bytes(before, self.mesh) + spec.local_bytes(after, self.mesh))

    def update_s(self, states: float, nbytes: Any) -> Any:
        """Seconds to update a shard of nbytes of a parameter (a number or an array), by elements of state per element."""
        return compute.update_time_s(self.device, states, nbytes)

    def hand_over_s(self, nbytes: float) -> float:
        """Seconds of a point-to-point message of nbytes to a rank of the next stage, where all stages have as many ranks: on
        average over the places where one follows another, as some of these lie inside a node and some do not."""
        places = self._borders
        sent_s = [n * collective.collective_time_s(self.cluster, "p2p", nbytes, (rank - 1, rank)) for rank, n in places]
        return sum(sent_s) / sum(n for _, n in places) if places else 0.0

    @cached_property
    def _borders(self) -> list[tuple[int, int]]:
        """First ranks of submeshes of this size that follow another one, of those that are linked alike one with their number."""
        levels = self.cluster.levels
        alike: dict[int, list[int]] = {}
        for rank in range(self.mesh.size, self.cluster.size, self.mesh.size):
            inside = sum(level.group_of(rank - 1) == level.group_of(rank) for level in levels)
            alike.setdefault(inside, []).append(rank)
        return [(ranks[0], len(ranks)) for ranks in alike.values()]

    def arrival(self, type_: TensorType, wanted: Spec) -> tuple[Spec, float]:
        """How a value comes from another stage: the spec it is received in, and seconds until it is `wanted`.

        Where ranks of a host want the same bytes it pays to receive a share each and gather them locally.
        """
        key = (type_, wanted)
        if key not in self._arrivals:
            ops = tuple(sorted({"sum", *(op for _, op in wanted.partial)}))
            lattice = self.lattice(type_, ops)
            column = lattice.costs[:, lattice.index[wanted]]
            best, least = Spec.replicated(len(type_.shape)), float("inf")
            for spec, seconds in zip(lattice.specs, column, strict=True):
                if not spec.partial and seconds < least:
                    total = float(seconds) + self.hand_over_s(spec.local_bytes(type_, self.mesh))
                    if total < least:
                        best, least = spec, total
            self._arrivals[key] = (best, least)
        return self._arrivals[key]

    def departure(self, type_: TensorType, before: Spec) -> tuple[Spec, float]:
        """The spec in which a value leaves for another stage (it must owe nothing), and seconds until it has it."""
        if not before.partial:
            return before, 0.0
        ops = tuple(sorted({"sum", *(op for _, op in before.partial)}))
        lattice = self.lattice(type_, ops)
        row = lattice.costs[lattice.index[before]]
        return min(
            ((s, float(c)) for s, c in zip(lattice.specs, row, strict=True) if not s.partial), key=lambda x: x[1]
        )

    def work_s(self, call: OpCall, rule: Rule) -> float:
        """A lower bound on an op's device-seconds however it is sharded: its products at peak, launches left out."""
        definition = find(call.op)
        if definition is None or definition.free or definition.work is None:
            return 0.0
        flops, _, _ = definition.work(call, rule)
        dtype = dtype_name(next((t.dtype for t in (*call.operands, *call.results) if t is not None), torch.float32))
        return flops / self.device.peak(_computable(dtype))

    def op_s(self, call: OpCall, rule: Rule, strategy: Strategy) -> float:
        """Seconds of one op's work on its block under `strategy`, messages of its own left out."""
        choices = self._choices.get(call.signature)
        if choices is not None and strategy in choices.index:
            return float(choices.computed_s[choices.index[strategy]])
        return self._op_seconds(call, rule, [self._parts(rule, strategy)], [strategy])[0]

    def grouped(self, call: OpCall, rule: Rule, strategy: Strategy) -> Grouped | None:
        """The rows that an op computes in groups on a rank, where it does."""
        definition = find(call.op)
        if definition is None or definition.grouped is None:
            return None
        return definition.grouped(call, self._parts(rule, strategy), rule.work_parts(strategy, self.mesh))

    def _parts(self, rule: Rule, strategy: Strategy) -> dict[str, int]:
        """Into how many blocks every factor is cut."""
        parts = dict.fromkeys(rule.factors, 1)
        for (_, size), choice in zip(self.mesh.axes, strategy, strict=True):
            for factor in factors_of(choice):
                parts[factor] *= size
        return parts

    def dispatched_s(self, nbytes: float, choices: int, axes: tuple[str, ...]) -> float:
        """Seconds until every token of a rank, of nbytes in all, is at the ranks of its choices along these axes, or back."""
        group = self.mesh.group(axes)
        shape = collective.shape_on_levels(self.cluster.levels, group)
        return collective.dispatch_time_s(shape, nbytes, choices, len(group))

    def alone_s(self, sent: Iterable[Sent]) -> Iterator[tuple[Sent, float]]:
        """Every message of an op's own, with the seconds of one of them if nothing hides it. Ranks meet once for messages that
        are under way together, as long as for the one that takes longest."""
        met_s = 0.0
        for one in sent:
            meeting_s = self.meeting_s(one.kind, one.axis)
            met_s = met_s if one.joins else 0.0
            yield one, self.collective_s(one.kind, one.nbytes, one.axis) - min(met_s, meeting_s)
            met_s = max(met_s, meeting_s)

    def exposed_s(self, sent: Iterable[Sent], computed_s: float) -> Iterator[tuple[Sent, float, float]]:
        """Every message of an op's own, with the seconds of one of them that its work does not hide, and with those alone.
        computed_s: of that work."""
        for one, alone_s in self.alone_s(sent):
            hidden_s = (1.0 - self.least_exposed) * min(one.behind * computed_s, alone_s)
            yield one, alone_s - hidden_s, alone_s

    def sent_s(self, sent: Iterable[Sent], computed_s: float) -> dict[str, float]:
        """Seconds by axis of an op's own messages that its work does not hide. computed_s: of that work."""
        exposed: dict[str, float] = {}
        for one, exposed_s, _ in self.exposed_s(sent, computed_s):
            exposed[one.axis] = exposed.get(one.axis, 0.0) + one.times * exposed_s
        return exposed

    @cached_property
    def least_exposed(self) -> float:
        """Share of a message that work does not hide however long it lasts, as it was measured: where cores that compute also
        move the bytes that is most of it. 0 where it was not measured."""
        return max((level.exposed for level in self.cluster.levels if level.measured), default=0.0)

    def op_choices(self, call: OpCall, rule: Rule) -> OpChoices:
        """Every strategy that an op may take on the mesh; made once for all ops of this signature."""
        if call.signature not in self._choices:
            table = strategy_table(rule, self.mesh)
            parts = table.parts(self.mesh)
            sizes = np.array([f.size for f in rule.factors.values()], int)
            kept = np.flatnonzero(((sizes % parts == 0) & (~table.single | (sizes == parts))).all(1))
            operands, results = (
                tuple(None if n is None else n[kept] for n in numbers) for numbers in (table.operands, table.results)
            )
            nbytes = tuple(
                self.shards(type_).of_bytes(type_.nbytes, numbers)
                if type_ is not None and numbers is not None
                else np.zeros(len(kept))
                for type_, numbers in zip(call.results, results, strict=True)
            )
            blocks = [dict(zip(rule.factors, row, strict=True)) for row in parts[kept].tolist()]
            strategies = tuple(table.strategies[i] for i in kept.tolist())
            seconds = np.array(self._op_seconds(call, rule, blocks, strategies))
            sent_s = np.zeros(len(kept))
            if rule.carries:
                for i, strategy in enumerate(strategies):
                    sent_s[i] = sum(
                        self.sent_s(sent_by(call, rule, strategy, self.mesh, self.device.runs_as), seconds[i]).values()
                    )
            self._choices[call.signature] = OpChoices(strategies, seconds, sent_s, operands, results, nbytes)
        return self._choices[call.signature]

    def _op_seconds(
        self, call: OpCall, rule: Rule, blocks: Sequence[dict[str, int]], strategies: Sequence[Strategy]
    ) -> list[float]:
        """Seconds of an op on blocks of it, each given by the number of parts that every factor is cut into, and the strategy."""
        definition = find(call.op)
        if definition is not None and definition.free:
            return [0.0] * len(blocks)
        flops, kind = 0.0, "pointwise"
        groups: tuple[tuple[str, ...], ...] = ()
        if definition is not None and definition.work is not None:
            flops, kind, groups = definition.work(call, rule)
        dims = definition.dims if definition is not None else None
        dtype = dtype_name(next((t.dtype for t in (*call.operands, *call.results) if t is not None), torch.float32))
        tensors = [
            (type_.nbytes, [f for dim in labels for f in dim])
            for type_, labels in zip((*call.operands, *call.results), (*rule.operands, *rule.results), strict=True)
            if type_ is not None and labels is not None
        ]
        tile = self.device.kernels.causal_tile if self.device.kernels is not None else 0.0
        seconds = []
        for parts, strategy in zip(blocks, strategies, strict=True):
            share = rule.work_parts(strategy, self.mesh)
            moved = [whole_bytes / math.prod(parts[f] for f in factors) for whole_bytes, factors in tensors]
            if definition is not None and definition.picks:
                moved[0] = min(moved[0], moved[-1])
            filled_s = 0.0
            if definition is not None and definition.fills:
                filled_s, moved[-1] = compute.filling_time_s(self.device, moved[-1], moved[0])
            nbytes = sum(moved)
            grouped = definition.grouped(call, parts, share) if definition is not None and definition.grouped else None
            along = [self.mesh.sizes[axis] for axis, _ in carried_choices(strategy, self.mesh)] if grouped else []
            imbalance = 1.0
            if definition is not None and definition.imbalance:
                imbalance = definition.imbalance(call, parts, tile)
            merged = (
                definition.merged(call, parts, self.device.runs_as)
                if definition is not None and definition.merged
                else None
            )
            merging_s = 0.0
            if merged is not None:
                merging_s = compute.merging_time_s(self.device, call.op, **vars(merged))
            seconds.append(
                merging_s
                + filled_s
                + compute.op_time_s(
                    self.device,
                    flops=work_share(grouped, self.software) * flops * imbalance / share,
                    nbytes=nbytes,
                    dtype=_computable(dtype),
                    kind=kind,
                    shape=_shape(groups, rule, parts) if dims is None else dims(call, parts, share),
                    eager=self.software.kernels != "fused",
                    op=call.op,
                    reached=self.software.constants.grouped_share if grouped is not None else 1.0,
                    moved_bytes=moved_bytes(grouped, self.software, along),
                )
            )
        return seconds


def _shape(groups: tuple[tuple[str, ...], ...], rule: Rule, parts: dict[str, int]) -> tuple[int, ...] | None:
    if not groups:
        return None
    sizes = []
    for factors in groups:
        n = 1
        for f in factors:
            n *= rule.factors[f].size // parts[f] if f in rule.factors else 1
        sizes.append(max(n, 1))
    return tuple(sizes)


def _computable(dtype: str) -> str:
    return dtype if dtype in ("float64", "float32", "bfloat16", "float16") else "float32"


class OutOfTime(Exception):
    """The time for a search is over."""


def _never() -> bool:
    return False


class Pricers:
    """A Pricer per mesh of one cluster, made when first asked for.

    Meshes that lie alike on the links and run on the same device share one: their prices are the same. `lowered`: what
    lowering has made of templates so far, by template, plan and mesh. is_over: whether the time for a search is over; then
    asking raises OutOfTime. software: by default that of programs emitted for the cluster.
    """

    def __init__(
        self, cluster: ClusterSpec, software: Software | None = None, is_over: Callable[[], bool] = _never
    ) -> None:
        self.cluster, self.is_over = cluster, is_over
        self.software = software or emitted_on(cluster)
        self.lowered: dict[Any, Any] = {}
        self._made: dict[Any, Pricer] = {}

    def until(self, is_over: Callable[[], bool]) -> Pricers:
        """The same prices, given until time is over: every step of a search asks for some, so it ends there."""
        timed = Pricers(self.cluster, self.software, lambda: is_over() or self.is_over())
        timed.lowered, timed._made = self.lowered, self._made
        return timed

    def least_step_s(self, seconds: float) -> float:
        """A step that spends at least so many seconds on what a solver counts."""
        return least_step_s(seconds, cluster_nodes(self.cluster), self.software)

    def hand_over_s(self, nbytes: float, source: Mesh, target: Mesh) -> float:
        """Seconds of a point-to-point message of nbytes from a rank of one mesh to a rank of another, over the slowest link
        between them."""
        ranks = min(source.offset, target.offset), max(m.offset + m.size for m in (source, target)) - 1
        return collective.collective_time_s(self.cluster, "p2p", nbytes, ranks)

    def __getitem__(self, mesh: Mesh) -> Pricer:
        if self.is_over():
            raise OutOfTime
        where = tuple(mesh.offset % level.group_size for level in self.cluster.levels)
        ends = mesh.offset == 0 and mesh.size == self.cluster.size
        key = (mesh.axes, self.cluster.device(mesh.offset), where[:-1], ends)
        if key not in self._made:
            self._made[key] = Pricer(self.cluster, mesh, self.software)
        return self._made[key]
