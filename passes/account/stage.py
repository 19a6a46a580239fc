"""The account of one stage on one of its ranks: bytes, communication, and its bill with seconds of actions.

The bill is `passes.price.bills`' of the stage's lines and what memory tiers add to it; it is read as `costmodel/bill.py` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

from autopar.cluster import ClusterSpec
from autopar.costmodel.bill import StageBill, call_seconds, exposed_parameters_s, stage_seconds
from autopar.ir.lowered import LoweredStage
from autopar.ir.mesh import Mesh
from autopar.ir.program import Template
from autopar.ir.setting import Setting
from autopar.passes.account.collectives import Collective, stage_collectives
from autopar.passes.memory.peak import StageMemory, least_peak, stage_memory
from autopar.passes.memory.probe import Probe
from autopar.passes.memory.walk import ActionBytes, action_bytes
from autopar.passes.price.bills import stage_bill, template_bill
from autopar.passes.price.lines import TemplateSeconds, optimizer_s
from autopar.passes.price.pricer import Pricer
from autopar.passes.price.tiers import TierMove, gather_moves, gradient_moves, optimizer_moves, saved_moves
from autopar.passes.rules.book import RuleBook
from autopar.plan import StagePlan

Value = TypeVar("Value")


class Later(Generic[Value]):
    """A value that is made when it is first asked for, or goes to another process."""

    def __init__(self, make: Callable[[], Value]) -> None:
        self._make, self._values = make, list[Value]()

    def __call__(self) -> Value:
        if not self._values:
            self._values.append(self._make())
        return self._values[0]

    def __reduce__(self) -> tuple[type[Later[Value]], tuple[Callable[[], Value]]]:
        return Later, (partial(_itself, self()),)


def _itself(value: Value) -> Value:
    return value


@dataclass(frozen=True)
class StagePrice:
    """The price of one stage on one of its ranks. seconds: of one action by kind, exposed communication and transfers to memory
    tiers included; step_s: what a step of this stage alone adds to its actions; moves: what goes to memory tiers and back per
    step."""

    bill: StageBill
    seconds: dict[str, float]
    step_s: float
    moves: tuple[TierMove, ...] = ()


@dataclass(frozen=True)
class StageAccount:
    """One stage on one of its ranks. Seconds say which plans are worth a look at their bytes, or bytes which fit and are worth
    their seconds: so it is priced, its bytes are counted, and collectives listed, when asked for.

    told_s: seconds that a step takes beside its price. counted_on_kinds: where devices of several kinds have blocks of unequal
    size, the bytes of a rank of every kind and size. walked: one of its microbatches, played line by line, for accounts of stages
    that run the same lines. counted_at_least: what its bytes are at least where it is the whole program (`least_peak`).
    """

    priced: Later[StagePrice]
    counted: Later[StageMemory]
    listed: Later[tuple[Collective, ...]]
    counted_on_kinds: Later[tuple[tuple[int, StageMemory], ...]] = field(default_factory=lambda: Later(tuple))
    told_s: float = 0.0
    walked: Later[dict[str, ActionBytes]] | None = None
    counted_at_least: Later[float] = field(default_factory=lambda: Later(float))

    @property
    def bill(self) -> StageBill:
        """The stage's bill, with what is told once a step."""
        bill = self.priced().bill
        return replace(bill, rest_s=bill.rest_s + self.told_s) if self.told_s else bill

    @property
    def seconds(self) -> dict[str, float]:
        return self.priced().seconds

    @property
    def step_s(self) -> float:
        """Seconds that a step of this stage alone adds to its actions."""
        return self.priced().step_s + self.told_s

    @property
    def moves(self) -> tuple[TierMove, ...]:
        return self.priced().moves

    @property
    def memory(self) -> StageMemory:
        return self.counted()

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return self.listed()

    @property
    def comm_time_s(self) -> float:
        return sum(c.time_s for c in self.collectives)

    @property
    def non_overlapped_s(self) -> float:
        """Seconds that memory tiers add to a step."""
        return sum(move.non_overlapped_s for move in self.moves)


def probe_of(pricer: Pricer) -> Probe:
    """The effects of lines on memory on such ranks, as far as the task has asked for them."""
    return _probe(pricer, pricer.mesh)


def _probe(pricer: Pricer, mesh: Mesh) -> Probe:
    return pricer.memo[Probe](Mesh(mesh.axes), pricer.device.runs_as, pricer.memo)


def account_stage(
    stage: LoweredStage,
    plan: StagePlan,
    templates: dict[str, Template],
    pricer: Pricer,
    setting: Setting,
    rules: RuleBook,
    walked: Later[dict[str, ActionBytes]] | None = None,
) -> StageAccount:
    """Bytes, communication and seconds of one stage. walked: that of a stage which runs the same lines."""
    probe = probe_of(pricer)
    walked = walked or Later(partial(action_bytes, stage, probe))
    return StageAccount(
        Later(partial(_stage_price, stage, plan, templates, pricer, setting, rules)),
        Later(partial(stage_memory, stage, setting, probe, walked)),
        Later(partial(stage_collectives, stage, pricer)),
        Later(partial(_on_kinds, stage, setting, pricer)),
        walked=walked,
        counted_at_least=Later(lambda: least_peak(stage, setting, walked())),
    )


def _stage_price(
    stage: LoweredStage,
    plan: StagePlan,
    templates: dict[str, Template],
    pricer: Pricer,
    setting: Setting,
    rules: RuleBook,
) -> StagePrice:
    """The bill of one stage and its reading."""
    calls = {
        name: template_bill(t, plan.templates[t.planned_as], templates[t.planned_as], pricer, rules)
        for name, t in stage.templates.items()
    }
    bill, moves = _with_tiers(
        stage_bill(stage, calls, pricer, setting),
        stage,
        pricer,
        setting,
        {name: call_seconds(call, pricer.software).by_action for name, call in calls.items()},
    )
    F, B, W = stage_seconds((bill,), pricer.software)[0].values()
    messages_s = exposed_parameters_s(bill.parameters, (F, B + W), stage.microbatches, 1.0, pricer.software)
    step_s = messages_s + bill.optimizer_s + bill.rest_s
    return StagePrice(bill, {"F": F, "B": B, "W": W}, step_s, tuple(moves))


def _on_kinds(stage: LoweredStage, setting: Setting, pricer: Pricer) -> tuple[tuple[int, StageMemory], ...]:
    """The bytes of a rank of every kind of device and size of blocks, with the rank, where both differ."""
    ranks = representatives(stage.mesh, pricer.cluster)
    found = []
    for rank in ranks:
        seen = stage.mesh.seen_by(rank)
        found.append((rank, stage_memory(replace(stage, mesh=seen), setting, _probe(pricer, seen))))
    return tuple(found)


def representatives(mesh: Mesh, cluster: ClusterSpec) -> tuple[int, ...]:
    """A rank of every kind of device and size of blocks of a mesh; none where kinds or sizes are alike."""
    if cluster.homogeneous_devices or not mesh.uneven:
        return ()
    ranks = {
        (cluster.device(rank), mesh.units(rank)): rank for rank in reversed(range(mesh.offset, mesh.offset + mesh.size))
    }
    return tuple(sorted(ranks.values())) if len({device for device, _ in ranks}) > 1 else ()


def _with_tiers(
    bill: StageBill, stage: LoweredStage, pricer: Pricer, setting: Setting, per_call: TemplateSeconds
) -> tuple[StageBill, list[TierMove]]:
    """The bill with what memory tiers add to it, and what moves to them and back. per_call: seconds of the templates."""
    seconds = stage_seconds((bill,), pricer.software)[0]
    saved_s, moves = saved_moves(stage, per_call, pricer)
    gathers_s, gathers = gather_moves(stage, per_call, pricer)
    away = [p for p in stage.parameters.values() if p.optimizer_tier or p.tier]
    at_end = gradient_moves(stage, pricer, stage.microbatches * (seconds[0, "B"] + seconds[0, "W"]))
    at_end += optimizer_moves(stage, setting, pricer, sum(optimizer_s(p, stage, pricer, setting) for p in away))
    waits_s = {action: saved_s.get(action, 0.0) + gathers_s.get(action, 0.0) for action in "FBW"}
    rest_s = bill.rest_s + sum(move.non_overlapped_s for move in at_end)
    return replace(bill, waits_s=waits_s, rest_s=rest_s), [*moves, *gathers, *at_end]
