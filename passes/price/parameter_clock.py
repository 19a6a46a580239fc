"""The exposed seconds of parameters' messages where links were measured, on the clock of a rank and its link (`link_clock.py`).

A call's gather sets out one call ahead. A gradient does when its bucket is full: the first early, the last after backward.

    forward     [gather 0][call 0, gather 1 beside it][call 1] …               nothing is beside the first gather
    backward    [call n, gathers of n-1 beside it] … first bucket … [last bucket]    nor beside the last bucket

So a program whose gradients fill no bucket but the first hides little of them, however long its backward is. Buckets are those
of the runtime (`passes/played/gradients.py`); gradients that other stages send, and values that are gathered after the
step, are not among them.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.costmodel.bill import CallBill, Purpose, Shown, call_seconds
from autopar.ir.lines import AddGradient, Function, Prefetch, TakeParameters, TemplateCall
from autopar.ir.lowered import LoweredStage
from autopar.passes.played.gradients import sent_buckets
from autopar.passes.price.lines import gather_alone_s, gradient_messages, line_messages, line_seconds, sums_seconds
from autopar.passes.price.link_clock import LinkClock
from autopar.passes.price.pricer import Pricer

GATHER, REDUCE = Purpose("gather"), Purpose("reduce")


def shown_parameters(stage: LoweredStage, calls: Mapping[str, CallBill], pricer: Pricer) -> Shown:
    """Exposed seconds of a stage's gathers in a microbatch's forward and backward, and once of its reductions. calls: the
    bills of its templates."""
    forward, backward, last = (LinkClock(pricer.least_exposed) for _ in range(3))
    _run(forward, stage.forward, stage, calls, pricer)
    reductions = _Reductions(last, pricer, stage)
    for function in (stage.backward, stage.weights):
        _run(backward, function, stage, calls, pricer)
        _run(last, function, stage, calls, pricer, reductions)
    reductions.finish()
    each_backward_s = backward.exposed.get(GATHER, 0.0)
    reduce_s = sum(last.exposed.values()) - each_backward_s
    return Shown(forward.exposed.get(GATHER, 0.0), each_backward_s, max(reduce_s, 0.0))


def _run(
    clock: LinkClock,
    function: Function | None,
    stage: LoweredStage,
    calls: Mapping[str, CallBill],
    pricer: Pricer,
    reductions: _Reductions | None = None,
) -> None:
    """A function of a stage passes on a clock. reductions: of gradients, in the last microbatch."""
    if function is None:
        return
    held = function.local_bytes(stage.mesh)
    for line in function.lines:
        match line:
            case Prefetch(key=key, gathers=gathers):
                seconds = sum(gather_alone_s(gather, stage.parameters[gather.name], pricer) for gather in gathers)
                seconds += pricer.rendezvous_s(message.axis for message in line_messages(line, held, stage))
                clock.start(str(key), GATHER, seconds)
            case TakeParameters(key=key):
                clock.wait(str(key))
            case TemplateCall(template=template, action=action):
                F, B, W, _ = call_seconds(calls[template], pricer.software)
                clock.compute({"F": F, "B": B, "W": W}[action])
            case AddGradient():
                clock.compute(line_seconds(line, held, stage, pricer))
                if reductions is not None:
                    reductions.add()
            case _:
                clock.compute(line_seconds(line, held, stage, pricer))


class _Reductions:
    """The messages that reduce the gradients of one microbatch, each of which sets out when the runtime sends it."""

    def __init__(self, clock: LinkClock, pricer: Pricer, stage: LoweredStage) -> None:
        self.clock = clock
        trained = [p for p in stage.parameters.values() if p.contributions and any(gradient_messages(p, pricer.mesh))]
        self._seconds = {(p.name, i): s for p in trained for i, s in enumerate(sums_seconds(p, pricer))}
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
