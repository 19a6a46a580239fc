"""What an infeasible request says: what is short per rank by kind, and the nearest changes that would do.

The smallest plan is a real one: sharding and recompute chosen for the fewest bytes on every mesh, lowered and accounted
as any plan is, so its bytes by kind are those that it would use. Where the options ask for a pipeline, for which no
such plan is at hand, kinds are a lower bound: all that rests shared by all ranks. The changes are planned too
(`autopar.passes.search.changes`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from autopar.errors import AutoparError, InfeasibleError
from autopar.ir.memory_levers import CHANGES, MOVABLE
from autopar.ir.setting import Setting
from autopar.passes.memory.peak import peak_kinds
from autopar.passes.search.changes import SOLVER_S, Change, OutOfTime, TimedPricers, nearest
from autopar.passes.search.pipelines import asks_for_pipeline
from autopar.passes.search.smallest import Small, smallest_plans
from autopar.passes.search.spmd import Task
from autopar.passes.search.submesh import least_bytes, microbatch_counts
from autopar.report import size_text, time_text

SMALLEST_S = 10.0
"""Seconds for the smallest plan."""


@dataclass(frozen=True)
class MemoryShortage:
    """Bytes per rank of the smallest plan against the limit.

    plan: which it is, in words; empty where kinds are a lower bound of any plan. by_kind: "parameters", "gradients",
    "optimizer", "buffers", "held for backward", "for a moment"; they add up to needed_bytes. in_all: bytes of the whole
    model by kind, once. step_time_s: of the smallest plan, if memory were enough; None for a bound.
    """

    ranks: int
    limit_bytes: float
    needed_bytes: float
    by_kind: Mapping[str, float] = field(default_factory=dict)
    in_all: Mapping[str, float] = field(default_factory=dict)
    plan: str = ""
    step_time_s: float | None = None

    @property
    def short_bytes(self) -> float:
        """What is missing on a rank."""
        return self.needed_bytes - self.limit_bytes

    def __str__(self) -> str:
        whole = ", ".join(f"{kind} {size_text(n)}" for kind, n in self.in_all.items())
        kinds = ", ".join(f"{_WORDS.get(kind, kind)} {size_text(n)}" for kind, n in self.by_kind.items() if n >= 0.5)
        if not self.plan:
            return f"per rank at least {size_text(self.needed_bytes)} of {size_text(self.limit_bytes)}: {kinds} (in all: {whole})"
        return (
            f"nothing fits in {size_text(self.limit_bytes)} per rank: the smallest plan ({self.plan}) needs "
            f"{size_text(self.needed_bytes)}, {size_text(self.short_bytes)} too much: {kinds} (in all: {whole})"
        )


_WORDS = {"optimizer": "optimizer state"}


def explained(
    task: Task, batch: int, setting_for: Callable[[int], Setting], error: InfeasibleError | None = None
) -> InfeasibleError:
    """The error for a request that nothing meets. error: what the search said, where it ended with one. setting_for: the
    setting on so many ranks."""
    total_s = task.options.explain_s
    shortage = smallest(task, batch)
    lines = [str(error)] if error is not None else []
    if shortage is not None and (shortage.short_bytes > 0 or not lines):
        lines.append(str(shortage))
    changes, cut = nearest(task, batch, setting_for, total_s) if total_s > 0 else ((), ())
    text = "\n".join(lines) or "no plan exists on this cluster"
    if changes:
        text += "\nWhat would do:\n" + "\n".join(f"  - {change}" for change in changes)
    elif total_s > 0:
        tried = ", ".join(change.in_general for change in CHANGES.values())
        text += (
            f"\nNo single change ({tried}) was found that would do; change several, or shard what the options or constraints "
            "keep whole"
        )
    if cut:
        text += f"\nLooking further was cut off after {time_text(total_s)} (Options.explain_s) at: {'; '.join(cut)}"
    made = (type(error) if error is not None else InfeasibleError)(text)
    made.shortage, made.alternatives = shortage, changes
    return made


def smallest(task: Task, batch: int) -> MemoryShortage | None:
    """The smallest plan's bytes by kind; a lower bound where the options ask for a pipeline. None where time ends first."""
    in_all = kinds_in_all(task)
    if asks_for_pipeline(task.options):
        return _bound(task, batch, in_all)
    timed = Task(
        task.program,
        task.cluster,
        task.rules,
        task.setting,
        replace(task.options, solver_time_limit_s=min(task.options.solver_time_limit_s, SOLVER_S)),
    )
    timed.pricers = TimedPricers(task.cluster, time.monotonic() + SMALLEST_S, task.pricers)
    made: list[Small] = []
    try:
        for small in smallest_plans(timed, batch):
            made.append(small)
    except (OutOfTime, AutoparError):
        pass
    if not made:
        return _bound(task, batch, in_all)
    found = min(made, key=lambda small: small.peak_bytes).candidate
    assert found.account is not None
    assert found.lowered is not None
    kinds = peak_kinds(found.lowered, [s.memory for s in found.account.stages])
    M = found.plan.microbatches
    words = [f"{task.options.strategy} on {found.plan.stages[0].mesh}"]
    words += [f"{M} microbatches"] if M > 1 else []
    words += ["recompute"] if any(t.recompute for t in found.plan.stages[0].templates.values()) else []
    words += [f"offload={task.options.offload}"] if task.setting.offload else []
    return MemoryShortage(
        task.cluster.size,
        task.limit,
        found.account.peak_bytes,
        kinds,
        in_all,
        ", ".join(words),
        found.account.step_time_s,
    )


def kinds_in_all(task: Task) -> dict[str, float]:
    """Bytes of the whole model by kind, once: what all ranks together must hold at least."""
    program, setting = task.program, task.setting
    found = {"parameters": float(sum(p.type.nbytes for p in program.parameters.values()))}
    if program.training:
        types = {name: program.parameters[name].type for name in program.trained}
        found["gradients"] = float(sum(t.nbytes for t in types.values()))
        found["optimizer"] = float(sum(setting.optimizer.shard_bytes(t, t.nbytes, n) for n, t in types.items()))
    return found


def _bound(task: Task, batch: int, in_all: Mapping[str, float]) -> MemoryShortage:
    """All that rests on the device, and what the smallest microbatch holds for backward, shared by all ranks."""
    ranks, away = task.cluster.size, task.setting.offload
    rests_in = {kind: moved for moved, kinds in MOVABLE.items() for kind in kinds}
    kinds = {kind: nbytes / ranks for kind, nbytes in in_all.items() if rests_in[kind] not in away}
    _, held = least_bytes(task)
    pieces = 1 if task.options.microbatches is not None else max(microbatch_counts(task, batch))
    if "activations" not in away and task.program.training:
        kinds["held for backward"] = held / pieces / ranks
    return MemoryShortage(ranks, task.limit, sum(kinds.values()), kinds, in_all)


__all__ = ["Change", "MemoryShortage", "explained", "kinds_in_all", "smallest"]
