"""What one stage of a lowered program costs on one of its ranks: bytes, communication, and seconds of every action.

Seconds of an action are those of its ops on their blocks and of its conversions, line by line (`passes.price.lines`), and
what memory tiers add to them; a step adds once the gradient reductions, the optimizer and the gathers of updated parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from autopar.ir.lowered import LoweredStage, StoredParameter
from autopar.ir.program import Template
from autopar.ir.setting import Setting
from autopar.passes.account.collectives import Collective, stage_collectives
from autopar.passes.memory.peak import StageMemory, stage_memory
from autopar.passes.price.lines import action_seconds, gradient_messages, regather_messages, template_seconds
from autopar.passes.price.pricer import Pricer
from autopar.passes.price.tiers import TierMove, gather_moves, gradient_moves, optimizer_moves, saved_moves
from autopar.passes.rules.book import RuleBook
from autopar.plan import StagePlan


@dataclass(frozen=True)
class StageAccount:
    """One stage on one of its ranks. seconds: of one action by kind, communication and exposed transfers to memory tiers
    included; step_s: once per step; moves: what goes to memory tiers and back per step."""

    memory: StageMemory
    seconds: dict[str, float]
    step_s: float
    collectives: tuple[Collective, ...]
    moves: tuple[TierMove, ...] = ()

    @property
    def comm_time_s(self) -> float:
        return sum(c.time_s for c in self.collectives)

    @property
    def exposed_s(self) -> float:
        """Seconds that memory tiers add to a step."""
        return sum(move.exposed_s for move in self.moves)


def account_stage(
    stage: LoweredStage,
    plan: StagePlan,
    templates: dict[str, Template],
    pricer: Pricer,
    setting: Setting,
    rules: RuleBook,
) -> StageAccount:
    """Bytes, communication and seconds of one stage."""
    per_call = {
        name: template_seconds(t, plan.templates[name], templates[name], pricer, rules)
        for name, t in stage.templates.items()
    }
    functions = zip("FBW", (stage.forward, stage.backward, stage.weights), strict=True)
    seconds = {action: action_seconds(function, per_call, stage, pricer) for action, function in functions}
    once = sum(gradient_work(stage, pricer, setting).values())
    saved_s, moves = saved_moves(stage, per_call, pricer)
    gathers_s, gathers = gather_moves(stage, per_call, pricer)
    computed = stage.microbatches * (seconds["B"] + seconds["W"])
    seconds = {
        action: value + saved_s.get(action, 0.0) + gathers_s.get(action, 0.0) for action, value in seconds.items()
    }
    away = [p for p in stage.parameters.values() if p.optimizer_tier or p.tier]
    at_end = gradient_moves(stage, pricer, computed)
    at_end += optimizer_moves(stage, setting, pricer, sum(optimizer_s(p, stage, pricer, setting) for p in away))
    moves += [*gathers, *at_end]
    once += sum(move.exposed_s for move in at_end)
    once += stage.microbatches * action_seconds(stage.prepare, per_call, stage, pricer)
    return StageAccount(stage_memory(stage, setting), seconds, once, stage_collectives(stage, pricer), tuple(moves))


def gradient_work(stage: LoweredStage, pricer: Pricer, setting: Setting) -> dict[str, float]:
    """Per trained parameter the seconds once per step: gradient reduction, optimizer, gather of the updated value."""
    work = {}
    for p in stage.parameters.values():
        if p.contributions:
            messages = chain(gradient_messages(p, stage.mesh), regather_messages(p, stage.mesh))
            work[p.name] = sum(m.seconds(pricer) for m in messages) + optimizer_s(p, stage, pricer, setting)
    return work


def optimizer_s(p: StoredParameter, stage: LoweredStage, pricer: Pricer, setting: Setting) -> float:
    """Seconds of the optimizer's update of one parameter's shard."""
    if not (p.owned and p.contributions):
        return 0.0
    return setting.optimizer.update_s(p.optimizer.local_bytes(p.type, stage.mesh), pricer.copy_s, p.name)
