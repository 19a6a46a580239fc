"""The exposed seconds of parameters' messages where links were measured, on the clock of a rank and its link (`link_clock.py`).

A call's gather sets out one call ahead. A gradient does when its bucket is full: the first early, the last after backward.

    forward     [gather 0][call 0, gather 1 beside it][call 1] …               nothing is beside the first gather
    backward    [call n, gathers of n-1 beside it] … first bucket … [last bucket]    nor beside the last bucket

So a program whose gradients fill no bucket but the first hides little of them, however long its backward is. Buckets are those
of the runtime (`runtime/gradients/buckets.py`); gradients that other stages send, and values that are gathered after the
step, are not among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass

from autopar.costmodel.bill import CallBill, Purpose, Shown, call_seconds
from autopar.ir.lines import AddGradient, Function, Prefetch, TakeParameters, TemplateCall
from autopar.ir.lowered import LoweredStage, StoredParameter
from autopar.passes.price.gradients import bucket_sizes, sent_in_place, summed_bytes, unreduced_bytes
from autopar.passes.price.lines import gather_alone_s, gradient_messages, line_messages, line_seconds, reduce_seconds
from autopar.passes.price.link_clock import LinkClock
from autopar.passes.price.pricer import Pricer

GATHER, REDUCE = Purpose("gather"), Purpose("reduce")


def shown_parameters(stage: LoweredStage, calls: Mapping[str, CallBill], pricer: Pricer) -> Shown:
    """Exposed seconds of a stage's gathers in a microbatch's forward and backward, and once of its reductions. calls: the
    bills of its templates."""
    forward, backward, last = (LinkClock(pricer.least_exposed) for _ in range(3))
    _run(forward, stage.forward, stage, calls, pricer)
    buckets = _Buckets(last, pricer, stage)
    for function in (stage.backward, stage.weights):
        _run(backward, function, stage, calls, pricer)
        _run(last, function, stage, calls, pricer, buckets)
    buckets.finish()
    each_backward_s = backward.exposed.get(GATHER, 0.0)
    reduce_s = sum(last.exposed.values()) - each_backward_s
    return Shown(forward.exposed.get(GATHER, 0.0), each_backward_s, max(reduce_s, 0.0))


def _run(
    clock: LinkClock,
    function: Function | None,
    stage: LoweredStage,
    calls: Mapping[str, CallBill],
    pricer: Pricer,
    buckets: _Buckets | None = None,
) -> None:
    """A function of a stage passes on a clock. buckets: where gradients go, in the last microbatch."""
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
            case AddGradient(parameter=name):
                clock.compute(line_seconds(line, held, stage, pricer))
                if buckets is not None:
                    buckets.add(stage.parameters[name])
            case _:
                clock.compute(line_seconds(line, held, stage, pricer))


@dataclass(frozen=True)
class _Bucket:
    """Gradients that travel together. seconds, summed_bytes: of all the messages that sum them; first_bytes: of the first of
    these, which are what fills a bucket."""

    seconds: float = 0.0
    first_bytes: float = 0.0
    summed_bytes: int = 0

    def __add__(self, other: _Bucket) -> _Bucket:
        return _Bucket(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class _Buckets:
    """Gradients of one microbatch on their way into the messages that reduce them."""

    def __init__(self, clock: LinkClock, pricer: Pricer, stage: LoweredStage) -> None:
        self.clock, self.pricer = clock, pricer
        self.sizes, self.in_place = bucket_sizes(stage), sent_in_place(stage)
        self._added: Counter[str] = Counter()
        self._open = _Bucket()
        self._axes: set[str] = set()
        self._started = self._sent_bytes = 0

    def add(self, p: StoredParameter) -> None:
        """A contribution to a gradient, which is reduced after the last of them."""
        self._added[p.name] += 1
        mesh = self.pricer.mesh
        messages = list(gradient_messages(p, mesh))
        if self._added[p.name] < p.contributions or not messages:
            return
        self._axes |= {message.axis for message in messages}
        gradient = _Bucket(reduce_seconds(p, self.pricer), unreduced_bytes(p, mesh), summed_bytes(p, mesh))
        if p.name in self.in_place:
            self._start(gradient)
            return
        self._open += gradient
        if self._open.first_bytes >= self.sizes.limit(self._started > 0, self._sent_bytes):
            self._start(self._open)
            self._open = _Bucket()

    def finish(self) -> None:
        """Backward is over: the last bucket, and all are waited for. Ranks meet once."""
        self._start(self._open + _Bucket(self.pricer.rendezvous_s(self._axes)))
        for number in range(self._started):
            self.clock.wait(str(number))

    def _start(self, bucket: _Bucket) -> None:
        self.clock.start(str(self._started), REDUCE, bucket.seconds)
        self._started += 1
        self._sent_bytes += bucket.summed_bytes
