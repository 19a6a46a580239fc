"""The exposed seconds of parameters' messages where links were measured, on the clock of a rank and its link (`link_clock.py`).

A call's gather sets out one call ahead. A gradient does when its bucket is full: the first early, the last after backward.

    forward     [gather 0][call 0, gather 1 beside it][call 1] …               nothing is beside the first gather
    backward    [call n, gathers of n-1 beside it] … first bucket … [last bucket]    nor beside the last bucket

So a program whose gradients fill no bucket but the first hides little of them, however long its backward is. Buckets are those
of the runtime (`passes/played/gradients.py`); gradients that other stages send, and values that are gathered after the
step, are not among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.costmodel.bill import CallBill, Purpose, Shown, call_seconds
from autopar.ir.lines import AddGradient, Prefetch, TakeParameters
from autopar.ir.lowered import LoweredStage
from autopar.passes.played.gradients import sent_buckets
from autopar.passes.price.lines import GATHER, LineCost, gradient_messages, line_costs, sums_seconds
from autopar.passes.price.link_clock import LinkClock
from autopar.passes.price.pricer import Pricer

REDUCE = Purpose("reduce")


def shown_parameters(stage: LoweredStage, calls: Mapping[str, CallBill], pricer: Pricer) -> Shown:
    """Exposed seconds of a stage's gathers in a microbatch's forward and backward, and of its reductions in a step: before the
    last microbatch those by microbatch are exposed as they are in it. calls: the bills of its templates."""
    forward, backward, last = (LinkClock(pricer.least_exposed) for _ in range(3))
    per_call = {name: call_seconds(call, pricer.software).by_action for name, call in calls.items()}
    _run(forward, line_costs(stage.forward, stage, pricer, per_call))
    reductions = _Reductions(last, pricer, stage)
    for function in (stage.backward, stage.weights):
        costs = [*line_costs(function, stage, pricer, per_call)]
        _run(backward, costs)
        _run(last, costs, reductions)
    reductions.finish()
    each_backward_s = backward.exposed.get(GATHER, 0.0)
    reduce_s = sum(last.exposed.values()) - each_backward_s
    again = (stage.microbatches - 1) * reductions.by_microbatch
    return Shown(forward.exposed.get(GATHER, 0.0), each_backward_s, (1 + again) * max(reduce_s, 0.0))


def _run(clock: LinkClock, costs: Iterable[LineCost], reductions: _Reductions | None = None) -> None:
    """The lines of a function pass on a clock. reductions: of gradients, in the last microbatch."""
    for cost in costs:
        match cost.line:
            case Prefetch(key=key):
                clock.start(str(key), GATHER, sum(part.sent_s for part in cost.parts) + cost.met_s)
            case TakeParameters(key=key):
                clock.wait(str(key))
            case line:
                clock.compute(cost.non_overlapped_s)
                if reductions is not None and isinstance(line, AddGradient):
                    reductions.add()


class _Reductions:
    """The messages that reduce the gradients of one microbatch, each of which sets out when the runtime sends it.
    by_microbatch: the share of their seconds that every microbatch takes."""

    def __init__(self, clock: LinkClock, pricer: Pricer, stage: LoweredStage) -> None:
        self.clock = clock
        trained = [p for p in stage.parameters.values() if p.contributions and any(gradient_messages(p, pricer.mesh))]
        self._seconds = {(p.name, i): s for p in trained for i, s in enumerate(sums_seconds(p, pricer))}
        each_s = sum(s for (name, _), s in self._seconds.items() if stage.parameters[name].by_microbatch)
        self.by_microbatch = each_s / max(sum(self._seconds.values()), 1e-30)
        self._rendezvous_s = pricer.rendezvous_s(m.axis for p in trained for m in gradient_messages(p, pricer.mesh))
        self._left = list(sent_buckets(stage, pricer.memo))
        self._added = self._started = 0

    def add(self) -> None:
        """One more line that adds a gradient is done."""
        self._added += 1
        while self._left and self._left[0].after <= self._added:
            self._start(sum(map(self._seconds.pop, self._left.pop(0).sums)))

    def finish(self) -> None:
        """Backward is over: the other messages, and all are waited for. Ranks meet once."""
        self._start(sum(self._seconds.values()) + self._rendezvous_s)
        for number in range(self._started):
            self.clock.wait(str(number))

    def _start(self, seconds: float) -> None:
        self.clock.start(str(self._started), REDUCE, seconds)
        self._started += 1
