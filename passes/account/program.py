"""What a lowered program costs: its stages' accounts, the step that its schedule makes of them, peak bytes of every group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from autopar.costmodel.bill import Bill, StepSeconds, cluster_nodes
from autopar.costmodel.bill import step_seconds as read_bill
from autopar.costmodel.simulate import Durations, Timeline, makespan_s, simulate
from autopar.costmodel.software import Software
from autopar.ir.actions import StageGraph, Table
from autopar.ir.lowered import LoweredProgram
from autopar.ir.program import Template
from autopar.ir.setting import Setting
from autopar.passes.account.collectives import Collective
from autopar.passes.account.stage import StageAccount, account_stage
from autopar.passes.memory.peak import group_peaks, tier_peaks
from autopar.passes.price.pricer import Pricers
from autopar.passes.price.tiers import TierMove
from autopar.passes.rules.book import RuleBook
from autopar.plan import StagePlan


@dataclass(frozen=True)
class TablePipeline:
    """A table of actions, simulated (`costmodel.bill.Pipeline`). sends_s: from stage to stage, of one microbatch."""

    table: Table
    graph: StageGraph
    sends_s: dict[tuple[int, int], float]

    def __call__(self, seconds: Durations) -> float:
        return makespan_s(self.table, self.graph, seconds, self.sends_s)


@dataclass(frozen=True)
class Account:
    """A whole program per step. peaks: bytes of a rank of every group. hand_over: seconds from stage to stage.
    software: what the bill is read with. tier_peaks: bytes in memory tiers of a rank of every group, by tier."""

    stages: tuple[StageAccount, ...]
    peaks: tuple[float, ...]
    comm_time_s: float
    table: Table
    graph: StageGraph
    hand_over: dict[tuple[int, int], float]
    microbatches: int
    nodes: float
    software: Software
    tier_peaks: tuple[dict[str, float], ...] = ()

    def bill(self, table: Table) -> Bill:
        """The step's bill under a table."""
        pipeline = TablePipeline(table, self.graph, self.hand_over)
        bills = tuple(stage.bill for stage in self.stages)
        return Bill(bills, self.graph.groups, self.microbatches, pipeline, self.nodes)

    def least_step_s(self, span_s: float) -> float:
        """Seconds of a step whose pipeline takes so many."""
        return read_bill(replace(self.bill(()), pipeline=lambda _: span_s), self.software).step_s

    @cached_property
    def step(self) -> StepSeconds:
        """The step's seconds and what they are spent on."""
        return read_bill(self.bill(self.table), self.software)

    @property
    def step_time_s(self) -> float:
        """Seconds of a step."""
        return self.step.step_s

    @property
    def moves(self) -> tuple[TierMove, ...]:
        """What goes to memory tiers and back, of all stages."""
        return tuple(move for s in self.stages for move in s.moves)

    @property
    def seconds(self) -> dict[tuple[int, str], float]:
        """Of one action, by (stage, kind)."""
        return {(i, kind): s for i, stage in enumerate(self.stages) for kind, s in stage.seconds.items()}

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step, without what comes once at its end."""
        return simulate(self.table, self.graph, self.seconds, self.hand_over)

    @property
    def peak_bytes(self) -> float:
        return max(self.peaks)

    @property
    def resting_bytes(self) -> dict[str, float]:
        """Of the stage that rests most."""
        return max((s.memory for s in self.stages), key=lambda m: m.resting_bytes).resting

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(c for s in self.stages for c in s.collectives)


def account(
    lowered: LoweredProgram,
    plans: tuple[StagePlan, ...],
    templates: dict[str, Template],
    pricers: Pricers,
    setting: Setting,
    rules: RuleBook,
) -> Account:
    """Bytes, communication and time of a lowered program."""
    return under(stage_costs(lowered, plans, templates, pricers, setting, rules), lowered.table)


def stage_costs(
    lowered: LoweredProgram,
    plans: tuple[StagePlan, ...],
    templates: dict[str, Template],
    pricers: Pricers,
    setting: Setting,
    rules: RuleBook,
) -> Account:
    """What the stages cost, whichever schedule they run under: an account without table, step and peaks.

    Stages that share their functions cost the same.
    """
    by_function: dict[int, StageAccount] = {}
    for stage, plan in zip(lowered.stages, plans, strict=True):
        if id(stage.forward) not in by_function:
            priced = account_stage(stage, plan, templates, pricers[stage.mesh], setting, rules)
            by_function[id(stage.forward)] = priced
    stages = tuple(by_function[id(stage.forward)] for stage in lowered.stages)
    comm_time_s = max(s.comm_time_s for s in by_function.values())
    return Account(
        stages,
        (),
        comm_time_s,
        (),
        lowered.graph,
        hand_over(lowered, pricers),
        lowered.stages[0].microbatches,
        cluster_nodes(pricers.cluster),
        pricers.software,
    )


def under(costs: Account, table: Table) -> Account:
    """The account of stages that cost so much under a table of actions."""
    memory = [s.memory for s in costs.stages]
    return replace(
        costs,
        peaks=group_peaks(costs.graph, table, memory),
        table=table,
        tier_peaks=tier_peaks(costs.graph, table, memory),
    )


def step_seconds(counted: Account, table: Table) -> float:
    """Seconds of a step under a table."""
    return read_bill(counted.bill(table), counted.software).step_s


def hand_over(lowered: LoweredProgram, pricers: Pricers) -> dict[tuple[int, int], float]:
    """Seconds that what crosses from stage to stage takes for one microbatch."""
    between: dict[tuple[int, int], float] = {}
    for t in lowered.transfers:
        if lowered.graph.group_of[t.source] != lowered.graph.group_of[t.target]:
            mesh = lowered.stages[t.target].mesh
            seconds = pricers[mesh].hand_over_s(t.target_spec.local_bytes(t.type, mesh))
            between[t.source, t.target] = between.get((t.source, t.target), 0.0) + seconds
    return between
