"""The error for a request that nothing meets: what is short, and the nearest changes that would do."""

from __future__ import annotations

from autopar.errors import InfeasibleError
from autopar.ir.text import time_text
from autopar.passes.search.refused.changes import SettingFor, nearest_changes
from autopar.passes.search.refused.shortage import memory_shortage, smallest_plan
from autopar.passes.search.task import Task


def explained(task: Task, batch: int, setting_for: SettingFor, error: InfeasibleError | None = None) -> InfeasibleError:
    """The error for a request that nothing meets. batch: of the whole step. error: what the search said, where it ended
    with one."""
    total_s = task.options.explain_s
    smallest = smallest_plan(task, batch)
    shortage = memory_shortage(task, batch, smallest)
    changes, cut_off = nearest_changes(task, batch, setting_for, total_s) if total_s > 0 else ((), ())
    lines = [str(error)] if error is not None else []
    if shortage.short_bytes > 0 or not lines:
        lines.append(str(shortage))
    if changes:
        lines += ["What would do:", *(f"  - {change}" for change in changes)]
    elif total_s > 0:
        lines.append(
            "No single change (recompute, microbatches, memory tiers, a smaller batch, up to 1024 times the ranks) was found "
            "that would do; change several, or shard what the options or constraints keep whole"
        )
    if cut_off:
        lines.append(
            f"Looking further was cut off after {time_text(total_s)} (Options.explain_s) at: {'; '.join(cut_off)}"
        )
    refusal = (type(error) if error is not None else InfeasibleError)("\n".join(lines))
    refusal.shortage, refusal.alternatives, refusal.smallest = shortage, changes, smallest
    refusal.would_fit_bytes = error.would_fit_bytes if error is not None else None
    return refusal
