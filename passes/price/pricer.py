"""The cost model as the passes ask it, with the mesh filled in: seconds per op on a block, per collective along an axis.

One `Pricer` serves one mesh on one cluster; nothing is cached across meshes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import copy
from functools import cached_property
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.costmodel import collective, compute
from autopar.costmodel.bill import cluster_nodes, least_step_s
from autopar.costmodel.by_node import gloo_time_s
from autopar.costmodel.software import Software, emitted_on
from autopar.ir.call import OpCall
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule, Strategy
from autopar.ir.sent import Sent
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.ops.registry import Grouped
from autopar.passes.price.compression import compressed_messages, compressing_bytes, compression_of, wire_share
from autopar.passes.price.op_choices import OpChoices, op_choices
from autopar.passes.price.op_seconds import OpSeconds, Roofline
from autopar.passes.rules.alphabet import Shards, shards
from autopar.passes.rules.lattice import CollectiveCost, Lattice
from autopar.passes.rules.memo import Memo
from autopar.passes.rules.runs import gather_steps, owed_block, scatter_steps, steps_s
from autopar.passes.rules.sends import sent_by

PIECE = "piece"
"""The axis of pieces of a block, which a rank has one after another."""


class Pricer:
    """Prices for one mesh. `lattice(type)` and all times are known for this mesh only.

    copy_s: seconds per byte that kernels read or write. software: by default that of programs emitted for the cluster. memo:
    what the task has found out so far.
    """

    def __init__(
        self, cluster: ClusterSpec, mesh: Mesh, software: Software | None = None, memo: Memo | None = None
    ) -> None:
        self.cluster, self.mesh, self.software = cluster, mesh, software or emitted_on(cluster)
        self.device = cluster.paced(Mesh(tuple(axis for axis in mesh.axes if axis[0] != PIECE), mesh.offset))
        self.copy_s = 1.0 / (self.device.memory_bandwidth_Bps * self.device.curve.memory)
        self._groups = {axis: self._group((axis,)) for axis in mesh.names}
        self._choices: dict[str, OpChoices] = {}
        self._per_axis: Mapping[str, Collection[str]] = {}
        self._op_s: dict[tuple[str, Strategy], float] = {}
        self.memo, own = memo or Memo(), Memo()
        self.of_pieces, self.collective_s = own[self._of_pieces], own[self._collective_s]
        self.lattice, self._alike = own[self._lattice], own[self._lattice_of]
        self.arrival, self.hand_over_s = own[self._arrival], own[self._hand_over_s]

    def _of_pieces(self, count: int) -> Pricer:
        """Prices of ops that have one of so many pieces of their blocks, cut along the last axis of this pricer's mesh."""
        return Pricer(self.cluster, Mesh((*self.mesh.axes, (PIECE, count)), self.mesh.offset), self.software, self.memo)

    def _collective_s(self, kind: str, nbytes: float, axis: str) -> float:
        """Seconds of one collective along `axis`; nbytes is the full array (see costmodel.collective)."""
        return gloo_time_s(self.cluster, kind, nbytes, self._groups[axis])

    def collective_along_s(self, kind: str, nbytes: float, axes: Collection[str]) -> float:
        """Seconds of one collective among the ranks of several axes."""
        return gloo_time_s(self.cluster, kind, nbytes, self._group(tuple(a for a in self.mesh.names if a in axes)))

    def _group(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that messages along axes are priced among: those that need longest."""
        if PIECE in self.mesh.sizes:  # it has no links
            return self.mesh.group(axes)
        return collective.slowest_group(self.cluster.levels, self.mesh, axes)

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

    def _lattice(
        self,
        type_: TensorType,
        ops: tuple[str, ...] = ("sum",),
        joined: tuple[str, ...] = (),
        compression: str = "",
        cut: tuple[bool, ...] | None = None,
    ) -> Lattice:
        """Conversions of one tensor type; `ops`: reductions that may be owed. joined, compression: as of `joined_s`. cut: per dim
        whether specs may shard it (None: any). Types of as many bytes whose dims divide alike share one lattice."""
        compression = compression_of(type_, compression)
        may_be_cut = cut or (True,) * len(type_.shape)
        period = self.mesh.period
        shape = tuple(math.gcd(n, period) if may else 1 for n, may in zip(type_.shape, may_be_cut, strict=True))
        return self._alike(shape, type_.nbytes, ops, joined, compression, type_.dtype.itemsize if compression else 1)

    def _lattice_of(
        self,
        shape: tuple[int, ...],
        nbytes: int,
        ops: tuple[str, ...],
        joined: tuple[str, ...],
        compression: str,
        itemsize: int,
    ) -> Lattice:
        price = self.joined_s(joined, compression, itemsize) if joined else self.collective_s
        return Lattice(shape, nbytes, self.mesh, price, self.copy_s, ops)

    def shards(self, type_: TensorType) -> Shards:
        """The specs that a tensor may have on the mesh."""
        return shards(self.mesh.axes, len(type_.shape))

    def convert_s(
        self, type_: TensorType, before: Spec, after: Spec, joined: tuple[str, ...] = (), compression: str = ""
    ) -> float:
        """Seconds to bring a value from one spec to another, or a parameter from its run or to it; joined, compression: as of
        `joined_s`."""
        if before == after:
            return 0.0
        if before.run or after.run:
            return self._run_s(type_, before, after, joined, compression)
        ops = tuple(sorted({"sum", *(op for _, op in before.partial), *(op for _, op in after.partial)}))
        return self.lattice(type_, ops, joined, compression).cost(before, after)

    def _run_s(self, type_: TensorType, before: Spec, after: Spec, joined: tuple[str, ...], compression: str) -> float:
        """The same from one run to another block or run."""
        compression = compression_of(type_, compression) if after.owner is None else ""
        cost = self.joined_s(joined, compression, type_.dtype.itemsize) if joined else self.collective_s
        middle = owed_block(before, after)
        ways = (
            (gather_steps(before, type_.shape, self.mesh), before),
            (scatter_steps(middle, after, type_.shape, self.mesh), middle),
        )
        own_s = (steps_s(w, s.local_bytes(type_, self.mesh), self.mesh, cost, self.copy_s) for w, s in ways)
        there = middle if after.run else after
        return sum(own_s) + self.convert_s(type_, before.block, there, joined, compression)

    def cast_s(self, before: TensorType, after: TensorType, spec: Spec) -> float:
        """Seconds to cast a block from one dtype to another: it is read and written."""
        return self.copy_s * (spec.local_bytes(before, self.mesh) + spec.local_bytes(after, self.mesh))

    def update_s(self, states: float, nbytes: Any) -> Any:
        """Seconds to update a shard of nbytes of a parameter (a number or an array), by elements of state per element."""
        return compute.update_time_s(self.device, states, nbytes)

    def _hand_over_s(self, nbytes: float) -> float:
        """Seconds of a point-to-point message of nbytes to a rank of the next stage, where all stages have as many ranks: on
        average over the places where one follows another, as some of these lie inside a node and some do not."""
        places, size = self._borders, self.mesh.size
        sent_s = [n * collective.message_time_s(self.cluster, nbytes, (rank - 1, rank), size) for rank, n in places]
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

    def _arrival(self, type_: TensorType, wanted: Spec) -> tuple[Spec, float]:
        """How a value comes from another stage: the spec it is received in, and seconds until it is `wanted`.

        Where ranks of a host want the same bytes it pays to receive a share each and gather them locally.
        """
        ops = tuple(sorted({"sum", *(op for _, op in wanted.partial)}))
        lattice = self.lattice(type_, ops)
        column = lattice.costs[:, lattice.index[wanted]]
        best, least = Spec.replicated(len(type_.shape)), float("inf")
        for spec, seconds in zip(lattice.specs, column, strict=True):
            if not spec.partial and seconds < least:
                total = float(seconds) + self.hand_over_s(spec.local_bytes(type_, self.mesh))
                if total < least:
                    best, least = spec, total
        return best, least

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
        return self._op_seconds(call, rule).at_peak

    def op_s(self, call: OpCall, rule: Rule, strategy: Strategy) -> float:
        """Seconds of one op's work on its block under `strategy`, messages of its own left out."""
        choices = self._choices.get(call.signature)
        if choices is not None and strategy in choices.table.index:
            return float(choices.computed_s[choices.table.index[strategy]])
        key = call.signature, strategy
        if key not in self._op_s:
            parts = rule.parts(strategy, self.mesh)
            self._op_s[key] = self._op_seconds(call, rule).on_block(parts, strategy, self.mesh)
        return self._op_s[key]

    def op_limits(self, call: OpCall, rule: Rule, strategy: Strategy) -> Roofline:
        """The same seconds by what bounds them."""
        return self._op_seconds(call, rule).limits_on_block(rule.parts(strategy, self.mesh), strategy, self.mesh)

    def grouped(self, call: OpCall, rule: Rule, strategy: Strategy) -> Grouped | None:
        """The rows that an op computes in groups on a rank, where it does."""
        return self._op_seconds(call, rule).grouped(rule.parts(strategy, self.mesh), strategy, self.mesh)

    def dispatched_s(self, nbytes: float, choices: int, axes: tuple[str, ...]) -> float:
        """Seconds until every token of a rank, of nbytes in all, is at the ranks of its choices along these axes, or back."""
        group = self._group(axes)
        shape = collective.shape_on_levels(self.cluster.levels, group)
        return collective.dispatch_time_s(shape, nbytes, choices, len(group), self.software.dispatch == "once")

    def alone_s(self, sent: Iterable[Sent]) -> Iterator[tuple[Sent, float]]:
        """Every message of an op's own, with the seconds of one of them if nothing hides it. Ranks meet once for messages that
        are under way together, as long as for the one that takes longest."""
        met_s = 0.0
        for one in sent:
            meeting_s = self.meeting_s(one.kind, one.axis)
            met_s = met_s if one.joins else 0.0
            yield one, self.collective_s(one.kind, one.nbytes, one.axis) - min(met_s, meeting_s)
            met_s = max(met_s, meeting_s)

    def non_overlapped_s(self, sent: Iterable[Sent], computed_s: float) -> Iterator[tuple[Sent, float, float]]:
        """Every message of an op's own, with the seconds of one of them that its work does not hide, and with those alone.
        computed_s: of that work."""
        for one, alone_s in self.alone_s(sent):
            hidden_s = (1.0 - self.least_exposed) * min(one.behind * computed_s, alone_s)
            yield one, alone_s - hidden_s, alone_s

    def sent_s(self, sent: Iterable[Sent], computed_s: float) -> dict[str, float]:
        """Seconds by axis of an op's own messages that its work does not hide. computed_s: of that work."""
        exposed: dict[str, float] = {}
        for one, non_overlapped_s, _ in self.non_overlapped_s(sent, computed_s):
            exposed[one.axis] = exposed.get(one.axis, 0.0) + one.times * non_overlapped_s
        return exposed

    @cached_property
    def least_exposed(self) -> float:
        """Share of a message that work does not hide however long it lasts, as it was measured: where cores that compute also
        move the bytes that is most of it. 0 where it was not measured."""
        return max((level.exposed for level in self.cluster.levels if level.measured), default=0.0)

    def op_choices(self, call: OpCall, rule: Rule) -> OpChoices:
        """Every strategy that an op may take on the mesh; made once for all ops of this signature."""
        if call.signature not in self._choices:

            def sent_s(strategy: Strategy, computed_s: float) -> float:
                sent = sent_by(call, rule, strategy, self.mesh, self.device.runs_as)
                return sum(self.sent_s(sent, computed_s).values())

            per_axis = self._per_axis.get(call.signature)
            seconds = self._op_seconds(call, rule)
            self._choices[call.signature] = op_choices(call, rule, self.mesh, seconds, sent_s, per_axis)
        return self._choices[call.signature]

    @property
    def is_narrowed(self) -> bool:
        """Whether ops have some of their strategies alone."""
        return bool(self._per_axis)

    def narrowed(self, per_axis: Mapping[str, Collection[str]]) -> Pricer:
        """The same prices, of those strategies of ops alone of which every axis takes one of these choices. per_axis: by the
        signature of an op."""
        other = copy(self)
        other._choices, other._per_axis = {}, per_axis
        return other

    def _op_seconds(self, call: OpCall, rule: Rule) -> OpSeconds:
        """Seconds of an op on blocks of it, which meshes of one kind of device share."""
        key = OpSeconds, call.signature, self.device, self.software
        return self.memo.get(key, lambda: OpSeconds(call, rule, self.device, self.software))


class OutOfTime(Exception):
    """The time for a search is over."""


def _never() -> bool:
    return False


class Pricers:
    """A Pricer per mesh of one cluster, made when first asked for.

    Meshes that lie alike on the links and run on the same device share one: their prices are the same. memo: what the task has
    found out so far, these prices among it. is_over: whether the time for a search is over; then
    asking raises OutOfTime. software: by default that of programs emitted for the cluster.
    """

    def __init__(
        self, cluster: ClusterSpec, software: Software | None = None, is_over: Callable[[], bool] = _never
    ) -> None:
        self.cluster, self.is_over = cluster, is_over
        self.software = software or emitted_on(cluster)
        self.memo = Memo()

    def until(self, is_over: Callable[[], bool]) -> Pricers:
        """The same prices, given until time is over: every step of a search asks for some, so it ends there."""
        timed = Pricers(self.cluster, self.software, lambda: is_over() or self.is_over())
        timed.memo = self.memo
        return timed

    def least_step_s(self, seconds: float) -> float:
        """A step that spends at least so many seconds on what a solver counts."""
        return least_step_s(seconds, cluster_nodes(self.cluster), self.software)

    def hand_over_s(self, nbytes: float, source: Mesh, target: Mesh) -> float:
        """Seconds of a point-to-point message of nbytes from a rank of one mesh to a rank of another, over the slowest link
        between them, which those ranks of a node that send at once share."""
        ranks = min(source.offset, target.offset), max(m.offset + m.size for m in (source, target)) - 1
        return collective.message_time_s(self.cluster, nbytes, ranks, min(source.size, target.size))

    def __getitem__(self, mesh: Mesh) -> Pricer:
        if self.is_over():
            raise OutOfTime
        where = tuple(level.place_of(mesh.offset, mesh.size) for level in self.cluster.levels[:-1])
        ends = mesh.offset == 0 and mesh.size == self.cluster.size
        key = (Pricer, mesh.axes, self.cluster.paced(mesh), where, ends)
        return self.memo.get(key, lambda: Pricer(self.cluster, mesh, self.software, self.memo))
