"""A bill: all that a training step does, listed; and `step_seconds`, the one reader that turns it into seconds.

For every action of the schedule a bill has what a rank computes, its passes over memory, the kernels it launches and its
messages, each by what it is for and what may hide it; for every stage what comes once a step. Two writers make bills: closed
formulas of a transformer (`costmodel/estimator`) and the lines of a lowered program (`passes/price/bills.py`). A stage that
calls a block twice, whose products take 3 ms forward and 6 backward, and whose gradients take 4 ms to reduce:

    block = CallBill(Work(3e-3), Work(3e-3), Work(3e-3))
    stage = StageBill(((block, 2),), parameters=ParameterTraffic(reduce_s=4e-3))

    step_seconds(Bill((stage,), ((0,),), microbatches=1, pipeline=…), software).step_s

How it is read, with the shares and factors of a `Software`:

    action  =  stretched(computed + factor · passes) + exposed share · message, for every message
    step    =  (pipeline of the actions + parameters' messages that nothing hides + optimizer + the rest + overhead) · jitter

A call takes no less than the host needs to launch it, and so does what comes once a step. Parameters' messages once a step hide
behind one microbatch's forward (values) and backward (gradients); those of every microbatch (ZeRO-3) behind that microbatch;
of all a share stays exposed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log2
from typing import NamedTuple

from autopar.cluster import ClusterSpec
from autopar.costmodel.simulate import Durations
from autopar.costmodel.software import Software

# --- what is listed


class Purpose(NamedTuple):
    """The purpose of a message, and the constant (`Software.exposed_share`) that says how much of it stays exposed."""

    what: str
    overlap: str = ""


@dataclass(frozen=True)
class Work:
    """The work of an action of a call on one rank.

    computed_s: products, attention, and passes whose seconds are known. fused_s: the passes over memory of everything else,
    if neighbours were one kernel; apart_s: if every op is one. launches: kernels; host_s: what the host needs for further ones.
    messages: seconds of each alone. hidden_s: of messages that ops send themselves and that their own work hides; they add
    nothing.
    """

    computed_s: float = 0.0
    fused_s: float = 0.0
    apart_s: float = 0.0
    launches: int = 0
    messages: Mapping[Purpose, float] = field(default_factory=dict)
    hidden_s: float = 0.0
    host_s: float = 0.0

    def __add__(self, other: Work) -> Work:
        messages = dict(self.messages)
        for purpose, seconds in other.messages.items():
            messages[purpose] = messages.get(purpose, 0.0) + seconds
        return Work(
            self.computed_s + other.computed_s,
            self.fused_s + other.fused_s,
            self.apart_s + other.apart_s,
            self.launches + other.launches,
            messages,
            self.hidden_s + other.hidden_s,
            self.host_s + other.host_s,
        )

    def passes_s(self, software: Software) -> float:
        """Seconds of passes over memory with a software's kernels."""
        if software.kernels == "apart":
            return self.apart_s
        c = software.constants
        return c.eager_share * self.apart_s if software.kernels == "eager" else c.fused_passes * self.fused_s

    def busy_s(self, software: Software) -> float:
        """Seconds of the kernels, messages left out."""
        return self.computed_s + self.passes_s(software)

    def non_overlapped_s(self, software: Software) -> float:
        """Seconds of messages that nothing hides."""
        return sum(software.exposed_share(purpose.overlap) * s for purpose, s in self.messages.items())


NOTHING = Work()


@dataclass(frozen=True)
class CallBill:
    """The work of one call of a block: forward, backward of inputs, backward of weights. host_s: least seconds to launch it."""

    F: Work = NOTHING
    B: Work = NOTHING
    W: Work = NOTHING
    host_s: float = 0.0

    @property
    def works(self) -> tuple[Work, Work, Work]:
        """The work by action, in the order F, B, W."""
        return self.F, self.B, self.W

    @property
    def silent(self) -> CallBill:
        """The call as if its messages were hidden."""
        F, B, W = (replace(work, messages={}) for work in self.works)
        return CallBill(F, B, W, self.host_s)


class Shown(NamedTuple):
    """Seconds of a rank's messages for parameters that nothing hides: as in `ParameterTraffic`."""

    each_forward_s: float
    each_backward_s: float
    reduce_s: float


@dataclass(frozen=True)
class ParameterTraffic:
    """Seconds of a rank's messages for parameters, alone: of one microbatch in forward and in backward (ZeRO-3), and once a
    step to reduce gradients and to gather updated values; each_reduce_s: to reduce those that are after every microbatch. shown:
    what is exposed of all but the gathers of updated values, where whoever writes the bill knows it; None: by the shares of the
    software that it is read with."""

    each_forward_s: float = 0.0
    each_backward_s: float = 0.0
    reduce_s: float = 0.0
    gather_s: float = 0.0
    shown: Shown | None = None
    each_reduce_s: float = 0.0

    def __add__(self, other: ParameterTraffic) -> ParameterTraffic:
        return ParameterTraffic(
            self.each_forward_s + other.each_forward_s,
            self.each_backward_s + other.each_backward_s,
            self.reduce_s + other.reduce_s,
            self.gather_s + other.gather_s,
            _shown_together(self.shown, other.shown),
            self.each_reduce_s + other.each_reduce_s,
        )

    def total_s(self, microbatches: int) -> float:
        """Seconds of a step."""
        each_s = self.each_forward_s + self.each_backward_s + self.each_reduce_s
        return microbatches * each_s + self.reduce_s + self.gather_s


def _shown_together(one: Shown | None, other: Shown | None) -> Shown | None:
    if one is None or other is None:
        return one or other
    return Shown(*(a + b for a, b in zip(one, other, strict=True)))


@dataclass(frozen=True)
class StageBill:
    """The work of one stage on one of its ranks.

    calls: with how often a microbatch makes each. waits_s: seconds that memory tiers add to an action, by kind.
    optimizer_s, rest_s: once a step, of the update and of whatever else.
    """

    calls: tuple[tuple[CallBill, int], ...]
    parameters: ParameterTraffic = ParameterTraffic()
    optimizer_s: float = 0.0
    rest_s: float = 0.0
    waits_s: Mapping[str, float] = field(default_factory=dict)


def hidden_seconds(stage: StageBill) -> dict[str, float]:
    """Seconds by action of the messages that ops of one microbatch hide behind their own work."""
    hidden = dict.fromkeys("FBW", 0.0)
    for call, times in stage.calls:
        for action, work in zip("FBW", call.works, strict=True):
            hidden[action] += times * work.hidden_s
    return hidden


def exposed_seconds(stage: StageBill, software: Software) -> dict[str, float]:
    """Seconds by action of the messages of one microbatch's ops that nothing hides."""
    exposed = dict.fromkeys("FBW", 0.0)
    for call, times in stage.calls:
        for action, work in zip("FBW", call.works, strict=True):
            exposed[action] += times * work.non_overlapped_s(software)
    return exposed


Pipeline = Callable[[Durations], float]
"""Seconds of a schedule for all microbatches, its sends between stages included, from those of one action by (stage, kind)."""


@dataclass(frozen=True)
class Bill:
    """A whole step. groups: the stages of every group of ranks. nodes: machines that take part."""

    stages: tuple[StageBill, ...]
    groups: tuple[tuple[int, ...], ...]
    microbatches: int
    pipeline: Pipeline
    nodes: float = 1.0


# --- how it is read


class CallSeconds(NamedTuple):
    """Seconds of a call's actions with exposed messages, and these alone by what they are for."""

    F: float
    B: float
    W: float
    non_overlapped_s: dict[str, float]

    @property
    def by_action(self) -> dict[str, float]:
        """Seconds of F, B and W."""
        return {"F": self.F, "B": self.B, "W": self.W}

    @property
    def total_s(self) -> float:
        """Seconds of all three actions."""
        return self.F + self.B + self.W


class OnceSeconds(NamedTuple):
    """Seconds that a group of ranks adds once at the end of a step: in all, and of these messages for parameters that nothing
    hides, the optimizer, and the rest."""

    once_s: float
    parameters_s: float
    optimizer_s: float
    rest_s: float


@dataclass(frozen=True)
class StepSeconds:
    """Seconds that a bill comes to. seconds: of one action by (stage, kind). non_overlapped_s: of layers' messages in a
    microbatch, by group and by what they are for. once_s: what a group adds at the end, of it parameters_s messages.
    The group is the slowest; once_by_group: the same of every group."""

    step_s: float
    span_s: float
    seconds: dict[tuple[int, str], float]
    non_overlapped_s: tuple[dict[str, float], ...]
    once_s: float
    parameters_s: float
    optimizer_s: float
    rest_s: float
    once_by_group: tuple[OnceSeconds, ...]

    @property
    def overhead_s(self) -> float:
        """Seconds that a step takes whatever the plan, and that it loses to jitter."""
        return self.step_s - self.span_s - self.once_s


def call_seconds(call: CallBill, software: Software) -> CallSeconds:
    """A call under a software: its kernels stretched to what the host needs, then its exposed messages."""
    busy = [work.busy_s(software) for work in call.works]
    stretch = 1.0
    if 0 < sum(busy) < call.host_s:
        stretch = call.host_s / sum(busy)
    exposed: dict[str, float] = {}
    for work in call.works:
        for purpose, seconds in work.messages.items():
            share = software.exposed_share(purpose.overlap)
            exposed[purpose.what] = exposed.get(purpose.what, 0.0) + share * seconds
    F, B, W = (s * stretch + work.non_overlapped_s(software) for s, work in zip(busy, call.works, strict=True))
    return CallSeconds(F, B, W, exposed)


def stage_seconds(
    stages: Sequence[StageBill], software: Software
) -> tuple[dict[tuple[int, str], float], list[dict[str, float]]]:
    """Seconds of one action by (stage, kind); and per stage the exposed messages of a microbatch by what they are for."""
    calls: dict[int, CallSeconds] = {}
    alike: dict[int, tuple[tuple[float, float, float], dict[str, float]]] = {}
    seconds: dict[tuple[int, str], float] = {}
    exposed: list[dict[str, float]] = []
    for s, stage in enumerate(stages):
        if id(stage) not in alike:
            alike[id(stage)] = _one_stage_seconds(stage, calls, software)
        (seconds[s, "F"], seconds[s, "B"], seconds[s, "W"]), by_purpose = alike[id(stage)]
        exposed.append(by_purpose)
    return seconds, exposed


def _one_stage_seconds(
    stage: StageBill, read: dict[int, CallSeconds], software: Software
) -> tuple[tuple[float, float, float], dict[str, float]]:
    """F, B and W of a stage, and its exposed messages. read: calls that were read already, by identity."""
    F, B, W = (stage.waits_s.get(kind, 0.0) for kind in "FBW")
    by_purpose: dict[str, float] = {}
    for call, times in stage.calls:
        one = read.get(id(call))
        if one is None:
            one = read[id(call)] = call_seconds(call, software)
        F, B, W = F + times * one.F, B + times * one.B, W + times * one.W
        for what, non_overlapped_s in one.non_overlapped_s.items():
            by_purpose[what] = by_purpose.get(what, 0.0) + times * non_overlapped_s
    return (F, B, W), by_purpose


def exposed_parameters_s(
    traffic: ParameterTraffic, busy_s: tuple[float, float], microbatches: int, window: float, software: Software
) -> float:
    """Seconds of a group's messages for parameters that nothing hides in a step.

    busy_s: forward and backward of one microbatch. window: how many such passes messages once a step may hide behind.
    """
    forward_s, backward_s = busy_s

    def exposed(seconds: float, behind_s: float, share: float) -> float:
        return max(seconds - behind_s, share * seconds)

    once = exposed(traffic.gather_s, window * forward_s, software.gather_share)
    if traffic.shown is not None:
        return (
            microbatches * (traffic.shown.each_forward_s + traffic.shown.each_backward_s)
            + traffic.shown.reduce_s
            + once
        )
    each = exposed(traffic.each_forward_s, forward_s, software.shards_share)
    each += exposed(traffic.each_backward_s, backward_s, software.shards_share)
    each += exposed(traffic.each_reduce_s, backward_s, software.reduce_share)
    once += exposed(traffic.reduce_s, window * backward_s, software.reduce_share)
    return microbatches * each + once


def overlap_window(chunks: int, groups: int, microbatches: int) -> float:
    """How many passes of a microbatch the parameters' messages of a step may hide behind: a group with several chunks is
    done with one of them while microbatches of the others remain."""
    return 1 / chunks + min(microbatches, groups) * (chunks - 1) / chunks


def group_seconds(seconds: Durations, groups: Sequence[Sequence[int]], kinds: str = "FBW") -> list[float]:
    """Seconds of one microbatch's actions on every group."""
    return [sum(seconds.get((s, kind), 0.0) for s in group for kind in kinds) for group in groups]


def cluster_nodes(cluster: ClusterSpec) -> float:
    """How many nodes a cluster has, at least one."""
    return max(1.0, cluster.size / cluster.levels[0].group_size)


def least_step_s(seconds: float, nodes: float, software: Software) -> float:
    """A step that spends so many seconds, with its overhead and a small loss per doubling of nodes."""
    c = software.constants
    return (seconds + c.step_overhead_s) * (1 + c.jitter * log2(nodes))


def step_seconds(bill: Bill, software: Software) -> StepSeconds:
    """Seconds of a step. Raises PlanError where the schedule's table deadlocks."""
    seconds, exposed = stage_seconds(bill.stages, software)
    span_s = bill.pipeline(seconds)
    once: list[OnceSeconds] = []
    for group in bill.groups:
        stages = [bill.stages[s] for s in group]
        traffic = sum((stage.parameters for stage in stages), ParameterTraffic())
        forward_s, backward_s = (sum(seconds[s, k] for s in group for k in kinds) for kinds in ("F", "BW"))
        window = overlap_window(len(group), len(bill.groups), bill.microbatches)
        messages = exposed_parameters_s(traffic, (forward_s, backward_s), bill.microbatches, window, software)
        optimizer_s, rest_s = sum(s.optimizer_s for s in stages), sum(s.rest_s for s in stages)
        rest_s = max(rest_s, software.constants.once_host_s - optimizer_s)
        once.append(OnceSeconds(messages + optimizer_s + rest_s, messages, optimizer_s, rest_s))
    slowest = max(once)
    step_s = least_step_s(span_s + slowest.once_s, bill.nodes, software)
    by_group = tuple(_summed([exposed[s] for s in group]) for group in bill.groups)
    return StepSeconds(step_s, span_s, seconds, by_group, *slowest, tuple(once))


def _summed(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}
