"""The account of a lowered program: its stages' accounts, the step that its schedule makes of them, peak bytes of every group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial

from autopar.costmodel.bill import Bill, Pipeline, StageBill, StepSeconds, call_seconds, cluster_nodes
from autopar.costmodel.bill import step_seconds as read_bill
from autopar.costmodel.simulate import Timeline, makespan_s, simulate
from autopar.costmodel.software import Software
from autopar.ir.actions import StageGraph, Table
from autopar.ir.lowered import LoweredProgram
from autopar.ir.program import Template
from autopar.ir.setting import Setting
from autopar.passes.account.collectives import Collective, stage_collectives
from autopar.passes.account.stage import Later, StageAccount, StagePrice, account_stage
from autopar.passes.memory.step_peaks import group_peaks, tier_peaks
from autopar.passes.price.pricer import Pricers
from autopar.passes.price.tiers import TierMove
from autopar.passes.rules.book import RuleBook
from autopar.plan import StagePlan


@dataclass(frozen=True)
class Account:
    """A whole program per step. hand_over: seconds from stage to stage. software: what the bill is read with."""

    stages: tuple[StageAccount, ...]
    table: Table
    graph: StageGraph
    hand_over: dict[tuple[int, int], float]
    microbatches: int
    nodes: float
    software: Software

    def read(self, pipeline: Pipeline) -> StepSeconds:
        """The step's seconds, and what they are spent on, where its actions take what a pipeline says of them."""
        bills = tuple(stage.bill for stage in self.stages)
        return read_bill(Bill(bills, self.graph.groups, self.microbatches, pipeline, self.nodes), self.software)

    def read_under(self, table: Table) -> StepSeconds:
        """The same where its actions are simulated in the order of a table."""
        return self.read(lambda seconds: makespan_s(table, self.graph, seconds, self.hand_over))

    @cached_property
    def step(self) -> StepSeconds:
        """The same under the account's own table."""
        return self.read_under(self.table)

    @property
    def step_time_s(self) -> float:
        """Seconds of a step."""
        return self.step.step_s

    @property
    def silent_s(self) -> float:
        """Seconds of a step as if all messages were hidden but those for parameters, and between stages."""
        silent = [replace(stage, priced=Later(partial(_silent, stage.priced()))) for stage in self.stages]
        return replace(self, stages=tuple(silent)).step_time_s

    @property
    def moves(self) -> tuple[TierMove, ...]:
        """Every transfer to a memory tier and back, of all stages."""
        return tuple(move for s in self.stages for move in s.moves)

    @property
    def seconds(self) -> dict[tuple[int, str], float]:
        """Seconds of one action, by (stage, kind)."""
        return {(i, kind): s for i, stage in enumerate(self.stages) for kind, s in stage.seconds.items()}

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step, without what comes once at its end."""
        return simulate(self.table, self.graph, self.seconds, self.hand_over)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds of a step for which a rank of every group computes, messages and memory tiers left out."""
        computed_s = [_computed_s(stage.bill, self.microbatches, self.software) for stage in self.stages]
        return tuple(sum(computed_s[s] for s in group) for group in self.graph.groups)

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """Bytes of a rank of every group."""
        return group_peaks(self.graph, self.table, [s.memory for s in self.stages])

    @property
    def least_peak_bytes(self) -> float:
        """The bytes that the peak of a program without stages is at least; its gradient store is not played for them."""
        (stage,) = self.stages
        return stage.counted_at_least()

    @cached_property
    def peaks_on_kinds(self) -> tuple[dict[int, float], ...]:
        """Bytes of a rank of every kind of device and size of blocks of every group, by rank; none where kinds or sizes are
        alike, or the stages of the group cut different blocks."""
        on_kinds = [dict(s.counted_on_kinds()) for s in self.stages]
        longest = [s.memory for s in self.stages]
        peaks: list[dict[int, float]] = []
        for g, group in enumerate(self.graph.groups):
            ranks = on_kinds[group[0]].keys()
            alike = all(on_kinds[s].keys() == ranks for s in group)
            peaks.append({})
            for rank in ranks if alike else ():
                stages = [on_kinds[s][rank] if s in group else memory for s, memory in enumerate(longest)]
                peaks[g][rank] = group_peaks(self.graph, self.table, stages)[g]
        return tuple(peaks)

    @cached_property
    def tier_peaks(self) -> tuple[dict[str, float], ...]:
        """Bytes in memory tiers of a rank of every group, by tier."""
        return tier_peaks(self.graph, self.table, [s.memory for s in self.stages])

    @property
    def peak_bytes(self) -> float:
        return max(self.peaks)

    @property
    def resting_bytes(self) -> dict[str, float]:
        """Resting bytes, by kind, of the stage that has most of them."""
        return max((s.memory for s in self.stages), key=lambda m: m.resting_bytes).resting

    @property
    def comm_time_s(self) -> float:
        """Seconds of all collectives of the stage that sends most, whatever hides them."""
        return max(s.comm_time_s for s in self.stages)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(c for s in self.stages for c in s.collectives)


def _silent(price: StagePrice) -> StagePrice:
    """A stage's price as if the messages of its calls were hidden."""
    calls = tuple((call.silent, times) for call, times in price.bill.calls)
    return replace(price, bill=replace(price.bill, calls=calls))


def _computed_s(bill: StageBill, microbatches: int, software: Software) -> float:
    """Seconds of a step for which a rank of a stage computes."""
    read = [(call_seconds(call, software), times) for call, times in bill.calls]
    each_s = sum(times * (one.total_s - sum(one.non_overlapped_s.values())) for one, times in read)
    return microbatches * each_s + bill.optimizer_s


def account(
    lowered: LoweredProgram,
    plans: tuple[StagePlan, ...],
    templates: dict[str, Template],
    pricers: Pricers,
    setting: Setting,
    rules: RuleBook,
    like: Account | None = None,
) -> Account:
    """Bytes, communication and time of a lowered program. like: as of `stage_costs`."""
    return under(stage_costs(lowered, plans, templates, pricers, setting, rules, like), lowered.table)


def stage_costs(
    lowered: LoweredProgram,
    plans: tuple[StagePlan, ...],
    templates: dict[str, Template],
    pricers: Pricers,
    setting: Setting,
    rules: RuleBook,
    like: Account | None = None,
) -> Account:
    """The account of the stages whichever schedule they run under, so without an action table.

    Stages that share their functions cost the same. like: the account of a program whose stages run the same lines, and whose
    gradients are reduced at other times.
    """
    by_function: dict[int, StageAccount] = {}
    walked = [stage.walked for stage in like.stages] if like is not None else [None] * len(plans)
    for stage, plan, known in zip(lowered.stages, plans, walked, strict=True):
        if id(stage.forward) not in by_function:
            priced = account_stage(stage, plan, templates, pricers[stage.mesh], setting, rules, known)
            by_function[id(stage.forward)] = priced
    told_s = told_seconds(lowered, pricers)
    stages = tuple(replace(by_function[id(stage.forward)], told_s=told_s) for stage in lowered.stages)
    return Account(
        stages,
        (),
        lowered.graph,
        hand_over(lowered, pricers),
        lowered.stages[0].microbatches,
        cluster_nodes(pricers.cluster),
        pricers.software,
    )


def as_lowered(costs: Account, lowered: LoweredProgram, pricers: Pricers) -> Account:
    """The account of a program that costs so much, by stages some of which are like others: in their own names."""
    stages = tuple(
        replace(
            counted,
            listed=Later(partial(stage_collectives, stage, pricers[stage.mesh])),
            priced=Later(partial(_as_stage, stage.index, counted)),
        )
        for counted, stage in zip(costs.stages, lowered.stages, strict=True)
    )
    account = replace(costs, stages=stages)
    vars(account).update(
        step=costs.step, peaks=costs.peaks, peaks_on_kinds=costs.peaks_on_kinds
    )  # whatever the names are
    return account


def _as_stage(index: int, counted: StageAccount) -> StagePrice:
    """The price of a stage that is like others, as the stage of this index."""
    price = counted.priced()
    return replace(price, moves=tuple(replace(move, stage=index) for move in price.moves))


def under(costs: Account, table: Table) -> Account:
    """The account of stages that cost so much under a table of actions."""
    return replace(costs, table=table)


def told_seconds(lowered: LoweredProgram, pricers: Pricers) -> float:
    """Seconds in which what the step gives beside its loss goes from the stages that make it to all ranks, once it is over."""
    seconds = 0.0
    for stage in lowered.stages:
        group = lowered.graph.group_of[stage.index]
        others = [one.mesh for one in lowered.stages if lowered.graph.group_of[one.index] != group]
        for row in stage.outputs if others else ():
            if row.extra:
                nbytes = float(row.type.nbytes * (stage.microbatches if row.join.how == "cat" else 1))
                seconds += max(pricers.hand_over_s(nbytes, stage.mesh, mesh) for mesh in others)
    return seconds


def hand_over(lowered: LoweredProgram, pricers: Pricers) -> dict[tuple[int, int], float]:
    """Seconds that what crosses from stage to stage takes for one microbatch."""
    between: dict[tuple[int, int], float] = {}
    for t in lowered.transfers:
        if lowered.graph.group_of[t.source] != lowered.graph.group_of[t.target]:
            source, target = lowered.stages[t.source].mesh, lowered.stages[t.target].mesh
            seconds = pricers.hand_over_s(t.target_spec.local_bytes(t.type, target), source, target)
            between[t.source, t.target] = between.get((t.source, t.target), 0.0) + seconds
    return between
