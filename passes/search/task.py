"""A planning task: one program on one cluster under one set of options, and how a plan of it is lowered and accounted for.

A request has a `Task` for every number of microbatches that is looked at (`autopar.passes.search.microbatches`); all of
them share their prices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.cluster.device import DeviceSpec
from autopar.cluster.process import tensor_room
from autopar.costmodel.software import Software
from autopar.errors import NoRoomError
from autopar.ir.lowered import LoweredProgram
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.setting import Setting
from autopar.ir.text import size_text
from autopar.options import Options
from autopar.passes.account.program import Account, account, as_lowered, stage_costs
from autopar.passes.account.stage import representatives
from autopar.passes.batch.microbatches import Microbatches
from autopar.passes.lower import lower, outline
from autopar.passes.order.ordered import in_order
from autopar.passes.price.pricer import Pricers
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.per_axis import PerAxis, by_signature
from autopar.passes.search.layout import Layout
from autopar.passes.search.workers import Workers
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.passes.shard.solve_mesh import OnMesh
from autopar.passes.shard.uneven import for_experts, most_units
from autopar.plan import Plan, StagePlan


@dataclass
class Task:
    """A program to be planned, with all that planning it depends on.

    batches: the program by number of microbatches. software: what plans are
    priced with, by default that of the programs that are emitted. layout: of the plan whose parameters the program is to compute
    with, where there is one. order: that the program's sequence is in. workers: processes that the search may use.
    lowering_s: seconds spent in `finish` so far.
    """

    program: Program
    cluster: ClusterSpec
    rules: RuleBook
    setting: Setting
    options: Options
    batches: Microbatches
    software: Software | None = None
    layout: Layout | None = None
    order: int = 0
    pricers: Pricers = field(init=False)
    workers: Workers = field(init=False)
    lowering_s: float = 0.0

    def __post_init__(self) -> None:
        self.pricers = Pricers(self.cluster, self.software)
        self.workers = Workers(self.options.workers)

    @cached_property
    def limit(self) -> float:
        """Bytes that tensors of a plan may take on every rank at most; `limit_at` says what its mesh leaves of them."""
        return min(self._room(device) for _, device in self.cluster.devices)

    @cached_property
    def room_bytes(self) -> float:
        """Bytes that a plan may use on all ranks together."""
        return sum(count * self._room(device) for count, device in self.cluster.devices)

    def limit_at(self, mesh: Mesh) -> float:
        """Bytes that tensors may take on a rank of a mesh, beside what the process takes of the device."""
        return min(self._room(device, dict(mesh.axes)) for device in self._devices_at(mesh))

    def limit_on_devices(self, mesh: Mesh) -> float:
        """The same where the options allow more than the devices have, as of a plan that is priced whether it fits or not."""
        there = (self._room_there(device, dict(mesh.axes)) for device in self._devices_at(mesh))
        return min(self.limit_at(mesh), *there)

    def _devices_at(self, mesh: Mesh) -> list[DeviceSpec]:
        first_ranks = accumulate((count for count, _ in self.cluster.devices), initial=0)
        end = mesh.offset + mesh.size
        return [
            device
            for first, (count, device) in zip(first_ranks, self.cluster.devices, strict=False)
            if first < end and mesh.offset < first + count
        ]

    def short_bytes(self, plan: Plan, counted: Account) -> float:
        """Bytes by which a plan breaks the limit of the group that is shortest of memory; none are short up to 0."""
        return max(self.short_by_group(plan, counted))

    def short_by_group(self, plan: Plan, counted: Account) -> list[float]:
        """Bytes by which a plan breaks the limit of every group. Where kinds of devices have shorter blocks than others, each
        kind is held against its own memory."""
        short = []
        for group, peak, on_kinds in zip(counted.graph.groups, counted.peaks, counted.peaks_on_kinds, strict=True):
            mesh = plan.stages[group[0]].mesh
            by_rank = [n - self._room(self.cluster.device(rank), dict(mesh.axes)) for rank, n in on_kinds.items()]
            short.append(max(by_rank, default=peak - self.limit_at(mesh)))
        return short

    def surely_short_bytes(self, plan: Plan, counted: Account) -> float:
        """Bytes by which a plan without stages breaks the limit at least (`Account.least_peak_bytes`); minus infinity where kinds
        of devices are held each against its own memory."""
        mesh = plan.stages[0].mesh
        if representatives(mesh, self.cluster):
            return -math.inf
        return counted.least_peak_bytes - self.limit_at(mesh)

    def budget_at(self, mesh: Mesh) -> float:
        """Bytes that a rank with the longest blocks of a mesh may take at most, before it is known what rests: on kinds of
        devices with shorter blocks all is taken to be as much less."""
        ranks = representatives(mesh, self.cluster)
        rooms = (self._room(self.cluster.device(rank)) / mesh.share_of_longest(rank) for rank in ranks)
        return min(rooms, default=self.limit)

    def most_units(self, plan: Plan, counted: Account) -> tuple[int, ...]:
        """Units of rows that a rank of every group has room for, where rows move between ranks."""
        return tuple(
            most_units(mesh, self.limit_at(mesh), peak, sum(counted.stages[s].memory.resting_bytes for s in group))
            for group, peak in zip(counted.graph.groups, counted.peaks, strict=True)
            for mesh in [plan.stages[group[0]].mesh]
        )

    def _room(self, device: DeviceSpec, axes: Mapping[str, int] | None = None) -> float:
        if self.options.memory_bytes is not None:
            return float(self.options.memory_bytes)
        return self._room_there(device, axes)

    def _room_there(self, device: DeviceSpec, axes: Mapping[str, int] | None = None) -> float:
        return tensor_room(self.cluster, axes, device, device.memory_bytes * self.options.memory_fraction)

    def changed(self, **fields: Any) -> Task:
        """The same task with some of its fields changed; prices are shared where the cluster stays the same."""
        task = replace(self, lowering_s=0.0, **fields)
        task.workers = self.workers
        same = task.cluster is self.cluster
        task.pricers = self.pricers if same else task.pricers.until(self.pricers.is_over)
        return task

    def at(self, microbatches: int) -> Task:
        """The task of one of so many microbatches. Raises CoupledError, InputError where the batch cannot be cut so."""
        if microbatches == self.setting.microbatches:
            return self
        program = self.batches.at(microbatches)
        return self.changed(program=program, setting=replace(self.setting, microbatches=microbatches))

    def in_order(self, order: int) -> Task:
        """The task of the same program with its sequence in an order. Raises NotOrdered, which says why it cannot be."""
        batches = in_order(self.batches, order)
        return self.changed(program=batches.at(self.setting.microbatches), batches=batches, order=order)

    def offloading(self, kinds: frozenset[str]) -> Task:
        """The task with these kinds of bytes resting in memory tiers (`autopar.passes.shard.offload`)."""
        return self if kinds == self.setting.offload else self.changed(setting=replace(self.setting, offload=kinds))

    def sharing(self, mesh: Mesh) -> Mesh:
        """The mesh with shares of experts that do not divide by their axis, or that of the layout's stage on such ranks where the
        stage's parameters would lie in other blocks under these shares."""
        mesh = for_experts(mesh, self.program, self.rules)
        for stage in self.layout.stages if self.layout is not None else ():
            if stage.mesh.ranks == mesh.ranks and not self._lie_alike(stage, mesh):
                return Mesh(stage.mesh.axes, mesh.offset)
        return mesh

    def _lie_alike(self, stage: StagePlan, mesh: Mesh) -> bool:
        """Whether dims are cut alike, and those of runs divide alike, as runs are where none does."""
        return all(
            mesh.blocks(size, axes) == stage.mesh.blocks(size, axes)
            and all(mesh.is_uneven(size, (axis,)) == stage.mesh.is_uneven(size, (axis,)) for axis in spec.run)
            for name, stored in stage.parameters.items()
            if name in self.program.parameters
            for spec in (stored.storage, stored.optimizer)
            for size, axes in zip(self.program.parameters[name].type.shape, spec.dims, strict=True)
        )

    def on(
        self, mesh: Mesh, setting: Setting | None = None, per_axis: PerAxis | None = None, room_bytes: float = math.inf
    ) -> OnMesh:
        """The whole program on one mesh, its parameters stored as in the layout's stages on such a mesh. setting: by default
        the task's. per_axis: what ops may take along an axis (None: whatever their rules allow). room_bytes: what an op may
        read and make on a rank, by default all that a device has."""
        stages = self.layout.stages if self.layout is not None else ()
        stored = {n: p for stage in stages if stage.mesh.ranks == mesh.ranks for n, p in stage.parameters.items()}
        pricer = self.pricers[mesh]
        if per_axis is not None:
            pricer = pricer.narrowed(by_signature(per_axis, self.program))
        rooms = (self._room(device, dict(mesh.axes)) for _, device in self.cluster.devices)
        room = min(room_bytes, max(rooms))
        return OnMesh(self.program, pricer, self.rules, setting or self.setting, self.options, stored, room)

    def lower(self, plan: Plan) -> LoweredProgram:
        """A plan of this task's program as lines."""
        return lower(self.program, plan, self.pricers, self.rules)

    def account(self, lowered: LoweredProgram, plan: Plan, like: Account | None = None) -> Account:
        """Seconds and bytes of a lowered plan. like: the account of one whose stages run the same lines, and whose gradients are
        reduced at other times."""
        return account(lowered, plan.stages, self.program.templates, self.pricers, self.setting, self.rules, like)

    def stage_costs(self, plan: Plan, split: bool) -> Account:
        """The account of the stages of a plan, whichever schedule they run under. split: B and W apart."""
        return self.costs_of(plan, self.outline(plan, split))

    def outline(self, plan: Plan, split: bool) -> LoweredProgram:
        """The stages of a plan lowered as far as their seconds and bytes need it. split: B and W apart."""
        return outline(self.program, plan, self.pricers, self.rules, split, self.parameter_kind)

    def costs_of(self, plan: Plan, outlined: LoweredProgram, like: Account | None = None) -> Account:
        """The account of the stages of a plan that was outlined. like: as of `account`."""
        given = plan.stages, self.program.templates, self.pricers, self.setting, self.rules
        return stage_costs(outlined, *given, like)

    def parameter_kind(self, name: str) -> Hashable:
        """The kind of a parameter: parameters of a kind cost the same under the same plan."""
        parameter = self.program.parameters[name]
        return parameter.type, parameter.trainable, self.setting.optimizer.kind(name)

    def finish(self, candidate: PricedPlan) -> PricedPlan:
        """The candidate lowered and accounted for as a whole. Raises NoRoomError where a memory tier is too small for it."""
        if candidate.lowered is not None:
            return candidate
        started = time.perf_counter()
        lowered = self.lower(candidate.plan)
        if candidate.account is None:
            counted = self.account(lowered, candidate.plan)
        else:
            counted = as_lowered(candidate.account, lowered, self.pricers)
        self.lowering_s += time.perf_counter() - started
        return self._within_tiers(replace(candidate, lowered=lowered, account=counted))

    def reduced_otherwise(self, candidate: PricedPlan, plan: Plan, lowered: LoweredProgram) -> PricedPlan:
        """The same of a plan, lowered, that differs from a finished candidate in when gradients are reduced: its lines are played
        once for both. Raises NoRoomError."""
        counted = self.account(lowered, plan, candidate.account)
        return self._within_tiers(replace(candidate, plan=plan, lowered=lowered, account=counted))

    def _within_tiers(self, candidate: PricedPlan) -> PricedPlan:
        """The candidate, which was accounted for. Raises NoRoomError where a memory tier is too small for it."""
        counted = account_of(candidate)
        tier_peaks = counted.tier_peaks if _uses_tiers(candidate.plan) else ({},) * len(counted.graph.groups)
        for group, peaks in zip(counted.graph.groups, tier_peaks, strict=True):
            mesh = candidate.plan.stages[group[0]].mesh
            device = self.cluster.pace(mesh.offset, mesh.size)
            for name, nbytes in peaks.items():
                if nbytes > device.tier(name).capacity_bytes:
                    raise NoRoomError(
                        f"memory tier {name} is to hold {size_text(nbytes)} per rank and has "
                        f"{size_text(device.tier(name).capacity_bytes)}; use more microbatches or ranks, or offload less"
                    )
        return candidate


def _uses_tiers(plan: Plan) -> bool:
    """Whether anything rests in a memory tier; bytes of plans without are counted only where they decide."""
    return any(
        any(t.offload for t in stage.templates.values())
        or any(p.tier or p.optimizer_tier for p in stage.parameters.values())
        for stage in plan.stages
    )


RankedPlans = list[tuple[Task, PricedPlan]]
"""Plans with the task that each is a plan of, best first."""


def account_of(candidate: PricedPlan) -> Account:
    """Seconds and bytes of a candidate that was lowered."""
    assert candidate.account is not None, "finish the candidate first"
    return candidate.account
