"""The outcome of a compilation, by where it comes from: the request, what was captured, what was decided, what was emitted."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Self

from torch import nn

from autopar.capture.exported import Captured
from autopar.cluster import ClusterSpec
from autopar.cluster.arrangement import arranged
from autopar.codegen.pipeline import MovingRows, pipeline_source
from autopar.codegen.stage import stage_sources
from autopar.errors import InputError
from autopar.ir.by_node import ALL_FLAT, ByNode
from autopar.ir.lowered import LoweredProgram, LoweredStage
from autopar.ir.program import Program
from autopar.ir.setting import Setting
from autopar.options import Options
from autopar.passes.account.energy import step_energy_J
from autopar.passes.account.program import Account
from autopar.passes.account.spent import Spent, spent
from autopar.passes.batch.microbatches import Microbatches
from autopar.passes.check.lines import check_program
from autopar.passes.memory.step_peaks import peak_kinds
from autopar.passes.price.by_node import by_node
from autopar.passes.price.pricer import Pricers
from autopar.passes.recompute.curve import Curve, curves
from autopar.passes.rules.book import RuleBook
from autopar.passes.search.task import Task
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.plan import Plan
from autopar.request import Request
from autopar.runtime.data.fields import Bytes, Seconds
from autopar.runtime.data.schema import number, optional
from autopar.runtime.update.update_rule import OptimizerFactory


@dataclass(frozen=True, eq=False)
class Known:
    """The findings of one compilation with which others of the same step begin: the capture with its microbatches, the rules of
    its ops, and prices by cluster. request: whose step it is; tensors: of its model, as they were captured."""

    request: Request
    batches: Microbatches
    rules: RuleBook
    tensors: tuple[Hashable, ...]
    pricers: list[Pricers] = field(default_factory=list)

    def serves(self, request: Request) -> bool:
        """Whether a request captures the same step of the same model."""
        return request.captures_like(self.request) and request.captured_tensors == self.tensors

    def pricers_on(self, cluster: ClusterSpec) -> Pricers:
        """The prices on a cluster, those that were asked for before among them."""
        for pricers in self.pricers:
            if pricers.cluster == cluster:
                return pricers
        self.pricers.append(Pricers(cluster))
        return self.pricers[-1]


@dataclass(frozen=True)
class Prediction:
    """The prediction of the cost model for a plan: seconds and bytes of one rank, and joules of a step on all its devices (None:
    what they draw is not known)."""

    step_time_s: Seconds
    peak_bytes: Bytes
    comm_time_s: Seconds
    energy_J: Annotated[float, number(0)] | None = None


@dataclass(frozen=True)
class Alternative:
    """A baseline or runner-up. spent: what its step is spent on (None: it was not lowered, and its seconds are a bound).
    short_bytes: that a rank of a faster one lacks (0: it fits, or is no faster)."""

    name: str
    plan: Plan
    predicted: Prediction
    spent: Spent | None = None
    short_bytes: Bytes = 0.0


@dataclass(frozen=True)
class SolverFacts:
    """How the plan was found. nodes, variables: of the sharding problem as it was built, and after reduction; gap: between
    the plan's cost and a bound that no plan is below, relative. unknown_ops have no rule and run whole on every rank;
    discovered_rules were found by experiment, op to rule. left_out: kinds of plans that a search that was ended early did
    not look at, or not all of; the gap is then one to what no plan of any kind is faster than. placed_by: how ranks were put on
    devices ("exact", "packing", "identity": in order, empty where their order costs nothing); placement_gap: how far above the
    least the cost of their traffic can be."""

    method: str
    gap: Annotated[float, optional(number())]
    nodes_before: int
    nodes_after: int
    variables_before: int
    variables_after: int
    unknown_ops: list[str]
    discovered_rules: dict[str, str]
    left_out: tuple[str, ...] = ()
    placed_by: str = ""
    placement_gap: float = 0.0

    @staticmethod
    def of(best: PricedPlan, rules: RuleBook) -> SolverFacts:
        """The facts about a plan that was found under these rules."""
        solution = best.solution
        before, after = solution.before, solution.after
        return SolverFacts(
            solution.method,
            solution.gap,
            before.get("nodes", 0),
            after.get("nodes", 0),
            before.get("variables", 0),
            after.get("variables", 0),
            list(rules.unknown),
            dict(rules.discovered),
            best.left_out,
            best.placed_by,
            best.placement_gap,
        )


@dataclass(frozen=True, eq=False)
class Decision:
    """The plan, what it is expected to cost, what else was looked at, and under what setting and rules it was found."""

    plan: Plan
    predicted: Prediction
    alternatives: tuple[Alternative, ...]
    solver: SolverFacts
    setting: Setting = field(repr=False)
    rules: RuleBook = field(repr=False)
    account: Account = field(repr=False)

    @staticmethod
    def of(task: Task, best: PricedPlan, others: Sequence[PricedPlan]) -> Decision:
        """The decision for a plan, lowered and accounted for, before others of the task."""
        account = best.account
        assert account is not None
        energy_J = step_energy_J(best.plan, account, task.cluster)
        predicted = Prediction(account.step_time_s, account.peak_bytes, account.comm_time_s, energy_J)
        precision = task.options.precision or ""
        alternatives = tuple(
            Alternative(
                f"{other.plan.origin} {other.plan.show_meshes()}",
                replace(other.plan, precision=precision),
                Prediction(other.step_s, other.solution.memory, 0.0),
                None if other.account is None else spent(other.account),
                short_bytes(task, other, account.step_time_s),
            )
            for other in others
        )
        known = {name: value for name, value in asdict(predicted).items() if value is not None}
        plan = replace(best.plan, predicted=known, precision=precision)
        solver = SolverFacts.of(best, task.rules)
        return Decision(plan, predicted, alternatives, solver, task.setting, task.rules, account)


def short_bytes(task: Task, other: PricedPlan, step_s: float) -> float:
    """Bytes that a rank of another plan lacks, where that is faster than a step of so many seconds and was lowered."""
    if other.account is None or other.step_s >= step_s or not task.cluster.homogeneous_devices:
        return 0.0
    return max(task.short_bytes(other.plan, other.account), 0.0)


@dataclass(frozen=True, eq=False)
class Emitted:
    """The plan as lines, and as text: pipeline.py and a file per stage. by_node: collectives that go inside nodes first."""

    lowered: LoweredProgram
    sources: tuple[str, ...]
    pipeline: str
    by_node: ByNode = ALL_FLAT


@dataclass(frozen=True, eq=False)
class Compiled:
    """All that is known of a compiled program. timings: seconds of capture, plan, lower, emit. buckets: the programs that run
    batches of other shapes with the same parameters; entries: those of other steps over them, each with buckets of its own."""

    request: Request = field(repr=False)
    captured: Captured = field(repr=False)
    decision: Decision
    emitted: Emitted = field(repr=False)
    timings: dict[str, float]
    buckets: tuple[Self, ...] = field(default=(), repr=False, kw_only=True)
    entries: Mapping[str, Self] = field(default_factory=dict, repr=False, kw_only=True)

    @property
    def of_buckets(self) -> tuple[Self, ...]:
        """The program of every bucket, this one first."""
        return (self, *self.buckets)

    @property
    def forms(self) -> tuple[Self, ...]:
        """All programs of the parameters: of this step's buckets, and of those of every entry."""
        return (*self.of_buckets, *(form for entry in self.entries.values() for form in entry.of_buckets))

    @property
    def model(self) -> nn.Module:
        return self.request.model

    @cached_property
    def cluster(self) -> ClusterSpec:
        """The cluster in the order of the plan's ranks."""
        return arranged(self.request.cluster, self.plan.placement)

    @property
    def options(self) -> Options:
        return self.request.options

    @property
    def optimizer(self) -> OptimizerFactory | None:
        """The optimizer factory."""
        return self.request.update.optimizer

    @property
    def ir(self) -> Program:
        return self.captured.program

    @property
    def training(self) -> bool:
        return self.ir.training

    @property
    def plan(self) -> Plan:
        return self.decision.plan

    @property
    def predicted(self) -> Prediction:
        """The prediction for a step of the largest bucket; the peak is that of any bucket of any entry."""
        own = self.decision.predicted
        return replace(own, peak_bytes=max(form.decision.predicted.peak_bytes for form in self.forms))

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        return self.decision.alternatives

    @property
    def solver(self) -> SolverFacts:
        return self.decision.solver

    @property
    def setting(self) -> Setting:
        return self.decision.setting

    @property
    def rules(self) -> RuleBook:
        return self.decision.rules

    @property
    def account(self) -> Account:
        return self.decision.account

    @property
    def lowered(self) -> LoweredProgram:
        return self.emitted.lowered

    @property
    def stages(self) -> tuple[LoweredStage, ...]:
        return self.lowered.stages

    @property
    def sources(self) -> tuple[str, ...]:
        return self.emitted.sources

    @property
    def pipeline(self) -> str:
        return self.emitted.pipeline

    @property
    def mesh(self) -> dict[str, int]:
        """Axes and sizes of the first stage's mesh."""
        return dict(self.plan.stages[0].mesh.axes)

    @property
    def pp(self) -> int:
        """Groups of ranks that follow each other in the pipeline."""
        return len(self.lowered.graph.groups)

    def group_of(self, rank: int) -> int:
        """Which row of the action table a rank runs. Raises InputError for ranks that do not exist."""
        if not 0 <= rank < self.plan.ranks:
            raise InputError(f"rank {rank} does not exist, the program has ranks 0 to {self.plan.ranks - 1}")
        for g, stages in enumerate(self.lowered.graph.groups):
            mesh = self.plan.stages[stages[0]].mesh
            if mesh.offset <= rank < mesh.offset + mesh.size:
                return g
        raise InputError(f"rank {rank} belongs to no stage")

    @cached_property
    def peak_kinds(self) -> dict[str, float]:
        """The predicted peak by kind, in bytes: parameters, gradients, optimizer, buffers, held for backward, for a moment."""
        return peak_kinds(self.lowered, [s.memory for s in self.account.stages])

    def recompute_curves(self) -> list[Curve]:
        """Per stage what keeping less for backward would cost (`autopar.passes.recompute.curve`); nothing for inference."""
        if not self.training:
            return []
        return curves(self.ir, self.plan, Pricers(self.cluster), self.rules)


def emitted(
    request: Request, captured: Captured, task: Task, candidates: Sequence[PricedPlan], seconds: Mapping[str, float]
) -> tuple[Decision, Emitted, dict[str, float]]:
    """The first candidate lowered, checked and printed, with seconds by name; the others become alternatives. task: whose
    candidates they are; seconds: spent so far."""
    started = time.perf_counter()
    best = candidates[0]
    lowered = best.lowered or task.lower(best.plan)
    check_program(lowered, task.rules)  # before it is accounted for, which trusts its table
    best = replace(best, lowered=lowered, account=best.account or task.account(lowered, best.plan))
    checked = time.perf_counter()
    decision = Decision.of(task, best, candidates[1:])
    way = by_node(lowered, request.cluster, best.plan.placement)
    counted, moving = decision.account, MovingRows()
    if request.options.rebalance:
        actions_s = tuple(
            (float(s["F"]), float(s["B"]), float(s["W"])) for s in (one.seconds for one in counted.stages)
        )
        sends_s = {link: float(s) for link, s in counted.hand_over.items()}
        room = task.most_units(best.plan, counted)
        moving = MovingRows(room, tuple(map(float, counted.busy_s)), float(counted.step_time_s), actions_s, sends_s)
    text = _printed(lowered, captured.program, type(request.model).__name__, way, moving)
    timings = {**seconds, "lower_s": seconds["lower_s"] + checked - started, "emit_s": time.perf_counter() - checked}
    return decision, text, timings


def _printed(lowered: LoweredProgram, program: Program, name: str, way: ByNode, moving: MovingRows) -> Emitted:
    """The lines as text. name: of the model; way: that collectives go."""
    sources = stage_sources(lowered.stages, lambda stage: f"Stage {stage.index} of {name} on {stage.mesh}.")
    ranks = sum(lowered.stages[group[0]].mesh.size for group in lowered.graph.groups)
    title = f"The pipeline of {name} on {ranks} ranks."
    return Emitted(lowered, sources, pipeline_source(lowered, program, title, by_node=way, moving=moving), way)
