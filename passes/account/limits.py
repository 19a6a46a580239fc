"""The seconds of a step of every group of ranks by what limits them: parts that add up to the step.

    compute    arithmetic at the rate that it reaches
    memory     bytes that ops, copies and the optimizer read and write (the other side of the roofline)
    message    messages between ranks that nothing hides
    bubble     idle until the schedule goes on, with sends between stages, and until a slower group is done
    tiers      waiting for host memory or disks, where something rests there
    host       the launch of kernels, and device time that the host cannot fill with them
    input      waiting for the batch: measured alone, a price knows no data
    overhead   what a step takes whatever it does

The largest is the group's *limit*. `Spent` is the reading of the same account by purpose for the whole step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from autopar.costmodel.bill import StageBill, call_seconds
from autopar.costmodel.software import Software
from autopar.passes.account.program import Account
from autopar.passes.account.stage import StageAccount
from autopar.passes.price.op_seconds import Roofline
from autopar.runtime.data.fields import Seconds
from autopar.runtime.data.schema import choice

LIMITS = ("compute", "memory", "message", "bubble", "tiers", "host", "input", "overhead")
Limit = Annotated[str, choice(LIMITS)]
ByLimit = Mapping[Limit, Seconds]
"""Seconds of a step by limit; a limit that is not there is not known."""


def limit_of(seconds: Mapping[str, float]) -> str:
    """The limit that takes most of a step."""
    return max(seconds, key=seconds.__getitem__)


def limits(account: Account, rooflines: Sequence[Roofline]) -> tuple[dict[str, float], ...]:
    """The parts of every group's step. rooflines: of the ops of a microbatch, by stage."""
    step, m = account.step, account.microbatches
    stages = [
        stage_limits(stage, roofline, m, account.software)
        for stage, roofline in zip(account.stages, rooflines, strict=True)
    ]
    parts = []
    for group, once in zip(account.graph.groups, step.once_by_group, strict=True):
        own = {limit: sum(stages[s].get(limit, 0.0) for s in group) for limit in LIMITS if limit != "input"}
        moved_s = min(sum(_moved_at_end_s(account.stages[s], m) for s in group), once.rest_s)
        busy_s = sum(own.values())
        own["bubble"] += max(step.span_s - busy_s, 0.0) + max(step.once_s - once.once_s, 0.0)
        own["message"] += once.parameters_s
        own["memory"] += once.optimizer_s
        own["tiers"] += moved_s
        launched_s = max(once.rest_s - sum(account.stages[s].bill.rest_s for s in group), 0.0)
        own["host"] += launched_s
        own["overhead"] += max(once.rest_s - moved_s - launched_s, 0.0) + max(step.overhead_s, 0.0)
        parts.append(own)
    return tuple(parts)


def stage_limits(stage: StageAccount, roofline: Roofline, microbatches: int, software: Software) -> dict[str, float]:
    """Seconds of a stage's actions in a step."""
    bill = stage.bill
    busy_s, waited_s, message_s = _read(bill, software)
    each = {
        "compute": roofline.compute_s,
        "memory": busy_s - roofline.compute_s - roofline.launch_s,
        "message": message_s,
        "tiers": sum(bill.waits_s.values()),
        "host": roofline.launch_s + waited_s,
    }
    return {limit: microbatches * max(seconds, 0.0) for limit, seconds in each.items()}


def _read(bill: StageBill, software: Software) -> tuple[float, float, float]:
    """Seconds of a microbatch: of kernels, of the device waiting for the host, of messages that nothing hides."""
    busy_s = waited_s = message_s = 0.0
    for call, times in bill.calls:
        read = call_seconds(call, software)
        kernels_s, exposed_s = sum(work.busy_s(software) for work in call.works), sum(read.non_overlapped_s.values())
        busy_s += times * kernels_s
        message_s += times * exposed_s
        waited_s += times * (read.total_s - exposed_s - kernels_s)
    return busy_s, waited_s, message_s


def _moved_at_end_s(stage: StageAccount, microbatches: int) -> float:
    """Seconds that memory tiers add once a step, beside those of its actions."""
    return max(stage.non_overlapped_s - microbatches * sum(stage.bill.waits_s.values()), 0.0)
