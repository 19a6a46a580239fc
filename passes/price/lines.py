"""The messages that lowered lines send, and what lines and parameters cost.

Every collective of a stage is listed by one of the generators here, as a `Message` of so many bytes along an axis. The lines
of a stage's function are walked once (`line_costs`), and whoever wants a price of them folds over that:

    when  line                                 what it takes
    0     Prefetch("0f", [w])                  the cast of w, and its gather, of which a share stays exposed
    0     CallForward("block", 0)              the forward of the block
    1     Convert(y, all_reduce over tp)       what is copied for it, and its message

The bill of a stage (`bills.py`) adds seconds up by what they are for, a clock (`parameter_clock.py`) lets them pass, cuts into
stages (`autopar.passes.account.calls`) give them to the calls beside them, and the list of collectives counts messages. A
template's function is walked on a clock of its own (`link_clock.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from autopar.costmodel.bill import Purpose
from autopar.costmodel.collective import COSTS
from autopar.ir.call import OpCall
from autopar.ir.lines import (
    AddGradient,
    Compute,
    Convert,
    Function,
    Line,
    ParameterGather,
    Prefetch,
    Start,
    SumLoss,
    TemplateCall,
)
from autopar.ir.lowered import LoweredStage, StoredParameter
from autopar.ir.mesh import Mesh
from autopar.ir.resting import on_rank
from autopar.ir.rule import Rule, Strategy, carried_choices
from autopar.ir.setting import Setting
from autopar.ir.steps import AnyStep, passed
from autopar.ops.registry import Grouped
from autopar.passes.played.gradients import sent_in_place, summed_bytes, unreduced_bytes, unreduced_spec
from autopar.passes.price.compression import compressed_messages, compressing_bytes, wire_share
from autopar.passes.price.pricer import Pricer
from autopar.runtime.gradients.bucket_sizes import BUCKETED
from autopar.runtime.gradients.gather import GATHERED

TemplateSeconds = Mapping[str, Mapping[str, float]]
"""Seconds of a call by template, then by action: F, B and W."""
GATHER = Purpose("gather")
Passed = Iterator[tuple[AnyStep, str, int, float]]
"""Steps axis by axis with their ranks, and the bytes that the one with most holds before (`autopar.ir.steps.passed`)."""


@dataclass(frozen=True)
class Message:
    """One collective along an axis. nbytes: of the full array; what: it is for; bucketed: it travels in one message with
    others, as gradients, updated parameters and the loss do; packed: bytes of that message per byte of its bucket."""

    kind: str
    axis: str
    what: str
    nbytes: float
    bucketed: bool = False
    packed: float = 1.0

    def seconds(self, pricer: Pricer) -> float:
        """How long it takes alone, or its share of the message that it is a part of."""
        if self.bucketed:
            return pricer.bucketed_s(self.kind, self.nbytes, self.axis, self.packed)
        return pricer.collective_s(self.kind, self.nbytes, self.axis)

    @property
    def purpose(self) -> Purpose:
        """The purpose of a message between ops. What software overlaps are the gathers and scatters around products (sequence
        parallelism), and the exchange of tokens between experts."""
        return Purpose(self.axis, COSTS[self.kind].overlap)


@dataclass(frozen=True)
class Dispatch:
    """Tokens, of nbytes on a rank, on their way to the ranks of their choices along axes, or back."""

    axes: tuple[str, ...]
    nbytes: float
    choices: int

    def seconds(self, pricer: Pricer) -> float:
        """How long it takes alone."""
        return pricer.dispatched_s(self.nbytes, self.choices, self.axes)

    @property
    def purpose(self) -> Purpose:
        """The purpose of an exchange of tokens between experts."""
        return Purpose(self.axes[0], COSTS["all_to_all"].overlap)


# --- messages


def line_messages(line: Line, held: Mapping[str, float], stage: LoweredStage, where: str = "") -> Iterator[Message]:
    """The messages that a line sends which stands in one of a stage's functions or in one of its templates'. held:
    bytes of the values of the line's function on one rank; where: the line stands."""
    match line:
        case Start(line=started):
            yield from line_messages(started, held, stage, where)
        case Convert():
            yield from conversion_messages(line, held, stage.mesh, where)
        case Compute(sent=sent):
            yield from (Message(s.kind, s.axis, f"{where}.{line.node}", s.nbytes) for s in sent for _ in range(s.times))
        case Prefetch(gathers=gathers):
            for gather in gathers:
                yield from gather_messages(gather, stage.parameters[gather.name], stage.mesh)
        case SumLoss(axes=axes, source=what):
            nbytes = float(line.types[0].nbytes) if line.types[0] else 0.0
            joined = not any(p.compression for p in stage.parameters.values())  # what is compressed leaves it behind
            yield from (
                Message("all_reduce", a, what or "loss", nbytes, joined) for a in axes if stage.mesh.sizes[a] > 1
            )


def dispatches(call: OpCall, rule: Rule, strategy: Strategy, grouped: Grouped, mesh: Mesh) -> Iterator[Dispatch]:
    """The dispatches of an op that sends tokens to the ranks of their groups and back, each from one of the ranks that
    hold it."""
    type_, spec = call.operands[grouped.operand], rule.operand_spec(grouped.operand, strategy, mesh)
    assert type_ is not None
    assert spec is not None
    nbytes = spec.local_bytes(type_, mesh) * mesh.product(spec.axes) / mesh.size
    axes = tuple(axis for axis, _ in carried_choices(strategy, mesh))
    if axes:
        yield from 2 * [Dispatch(axes, nbytes, grouped.choices)]


def conversion_messages(line: Convert, held: Mapping[str, float], mesh: Mesh, where: str = "") -> Iterator[Message]:
    """The message of a conversion, if it sends one."""
    what = f"{where}.{line.node or line.source}"
    return _step_messages(passed((line.step,), held.get(line.value, 0.0), mesh), what)


def gather_messages(gather: ParameterGather, p: StoredParameter, mesh: Mesh) -> Iterator[Message]:
    """A parameter from its storage to where a call uses it; it is cast before."""
    return _step_messages(_gathered(gather, p, mesh), f"gather {p.name}")


def gradient_messages(p: StoredParameter, mesh: Mesh) -> Iterator[Message]:
    """The reduction of one parameter's gradient."""
    itemsize = p.type.dtype.itemsize
    for message in _step_messages(_reduced(p, mesh), f"gradient {p.name}", BUCKETED):
        if p.compression and message.bucketed:
            packed = wire_share(p.compression, itemsize)
            for kind, nbytes in compressed_messages(message.kind, message.nbytes, p.compression, itemsize):
                yield replace(message, kind=kind, nbytes=nbytes, packed=packed)
        else:
            yield message


def extra_messages(stage: LoweredStage) -> Iterator[tuple[Message, int]]:
    """The gathers of what a training step gives beside its loss, once the step is over, with how often they are sent."""
    for row in stage.outputs:
        held = row.spec.local_bytes(row.type, stage.mesh) if row.extra else 0
        for axes in row.spec.dims if row.extra else ():
            for axis in axes:
                held *= stage.mesh.sizes[axis]
                if stage.mesh.sizes[axis] > 1:
                    yield Message("all_gather", axis, f"output {row.name}", float(held)), stage.microbatches


def regather_messages(p: StoredParameter, mesh: Mesh) -> Iterator[Message]:
    """One parameter's updated value from the optimizer's shard to storage."""
    return _step_messages(_regathered(p, mesh), f"regather {p.name}", GATHERED)


def _step_messages(passed_steps: Passed, what: str, joined: tuple[str, ...] = ()) -> Iterator[Message]:
    """The messages of steps. joined: kinds of messages that travel in one with others."""
    for step, axis, size, before in passed_steps:
        if step.facts.sends:
            yield Message(step.kind, axis, what, step.facts.full_bytes(before, size), step.kind in joined)


def _gathered(gather: ParameterGather, p: StoredParameter, mesh: Mesh) -> Passed:
    """The steps of a parameter from its storage to where a call uses it."""
    return passed(gather.steps, p.stored_bytes(mesh, gather.dtype), mesh, p.storage, p.type.shape)


def _reduced(p: StoredParameter, mesh: Mesh) -> Passed:
    """The steps that reduce a parameter's gradient."""
    return passed(p.reduce, unreduced_bytes(p, mesh), mesh, unreduced_spec(p), p.type.shape)


def _regathered(p: StoredParameter, mesh: Mesh) -> Passed:
    """The steps of an updated value to where it is stored."""
    return passed(p.regather, p.updated_bytes(mesh), mesh, p.optimizer, p.type.shape)


# --- seconds


def conversion_copied_s(line: Convert, held: Mapping[str, float], pricer: Pricer) -> float:
    """Seconds that a rank copies for a conversion, beside its message."""
    return _steps_copied_s(passed((line.step,), held.get(line.value, 0.0), pricer.mesh), pricer)


def _steps_copied_s(passed_steps: Passed, pricer: Pricer) -> float:
    """Seconds that a rank copies for steps."""
    return sum(step.facts.copied_s(before, size, step.dims, pricer.copy_s) for step, _, size, before in passed_steps)


class Part(NamedTuple):
    """Seconds that a rank is busy, and of a message alone (None: there is none), of which a share stays exposed at least."""

    own_s: float
    sent_s: float = 0.0
    purpose: Purpose | None = None
    share: float = 1.0


@dataclass(frozen=True)
class LineCost:
    """A line of a stage's function on one rank. when: how many calls stand before it. messages: all that it sends. met_s: until
    ranks meet for parameters that are gathered, whatever becomes of the gathers."""

    line: Line
    when: int
    messages: tuple[Message, ...]
    parts: tuple[Part, ...]
    met_s: float = 0.0

    @property
    def non_overlapped_s(self) -> float:
        """Seconds of the line without what is hidden of it."""
        return sum(part.own_s + part.share * part.sent_s for part in self.parts)


def line_costs(
    function: Function | None,
    stage: LoweredStage,
    pricer: Pricer,
    calls: TemplateSeconds | None = None,
    where: str = "",
) -> Iterator[LineCost]:
    """Every line of a function. calls: seconds of the templates (None: they are left out); where: the function stands, for
    messages of conversions."""
    if function is None:
        return
    held, when = function.local_bytes(stage.mesh), 0
    exposed_share = pricer.software.exposed_share
    for line in function.lines:
        messages, own_s, met_s = tuple(line_messages(line, held, stage, where)), 0.0, 0.0
        match line:
            case TemplateCall(template=template, action=action) if calls is not None:
                own_s = calls[template][action]
            case Convert():
                own_s = conversion_copied_s(line, held, pricer)
            case AddGradient():
                own_s = stored_s(line, held, stage, pricer)
            case Prefetch():
                met_s = pricer.rendezvous_s(m.axis for m in messages)
        if isinstance(line, Prefetch):
            stored = ((gather, stage.parameters[gather.name], pricer) for gather in line.gathers)
            share = pricer.software.shards_share
            parts = [Part(cast_seconds(*one), gather_alone_s(*one), GATHER, share) for one in stored]
        else:
            sent = ((m.seconds(pricer), m.purpose) for m in messages)
            parts = [Part(own_s), *(Part(0.0, s, purpose, exposed_share(purpose.overlap)) for s, purpose in sent)]
        yield LineCost(line, when, messages, tuple(parts), met_s)
        when += isinstance(line, TemplateCall)


def stored_s(line: AddGradient, held: Mapping[str, float], stage: LoweredStage, pricer: Pricer) -> float:
    """Seconds of the gradient store's passes for a contribution, the mean of a step: the first is kept (on GPUs a pass is counted
    where it is cast), others are added to the sum, and after the last the sum is copied into its message, unless it is sent from
    where it lies. held: bytes of the function's values."""
    if not pricer.software.gradient_passes:
        return 0.0
    p = stage.parameters[line.parameter]
    in_place, came_bytes = p.name in sent_in_place(stage, pricer.memo), held.get(line.value)
    like = (
        p.type,
        p.storage,
        p.optimizer,
        p.reduce,
        p.contributions,
        p.by_microbatch,
        p.owned,
        stage.microbatches,
        stage.mesh.axes,
    )
    return pricer.memo.get(
        (stored_s, pricer, like, in_place, came_bytes), lambda: _stored_s(p, came_bytes, in_place, stage, pricer)
    )


def _stored_s(
    p: StoredParameter, came_bytes: float | None, in_place: bool, stage: LoweredStage, pricer: Pricer
) -> float:
    """The same of one parameter; those that are stored and reduced alike take as long. came_bytes: of the contribution (None: of
    the gradient); in_place: the sum is sent from where it lies."""
    mesh = stage.mesh
    nbytes = summed_bytes(p, mesh) if p.optimizer.run and p.optimizer.owner is None else unreduced_bytes(p, mesh)
    due, times = p.contributions * stage.microbatches, sent_times(p, stage)
    came_bytes = nbytes if came_bytes is None else came_bytes
    added_bytes = (due - times) * (2 * nbytes + came_bytes) + (times - 1) * 3 * on_rank(p, mesh).gradient
    if came_bytes < nbytes and pricer.device.runs_as.type != "cpu":
        added_bytes += times * (nbytes + came_bytes)
    packed_bytes = 0.0 if in_place else 2 * sum(m.nbytes for m in _sums(p, mesh)[:1])
    return pricer.copy_s * (added_bytes + times * packed_bytes) / due


def sent_times(p: StoredParameter, stage: LoweredStage) -> int:
    """How often in a step a parameter's gradient is reduced."""
    return stage.microbatches if p.by_microbatch else 1


def _sums(p: StoredParameter, mesh: Mesh) -> list[Message]:
    """The sums of a parameter's gradient, as they are without compression."""
    return [m for m in _step_messages(_reduced(p, mesh), "", BUCKETED) if m.bucketed]


def gather_alone_s(gather: ParameterGather, p: StoredParameter, pricer: Pricer) -> float:
    """Seconds of a gather's messages, and of what is copied for them; parameters that rest alike take as long."""
    like = gather_alone_s, pricer, gather.steps, gather.dtype, p.type, p.storage
    return pricer.memo.get(like, lambda: _gather_alone_s(gather, p, pricer))


def _gather_alone_s(gather: ParameterGather, p: StoredParameter, pricer: Pricer) -> float:
    """The same of one parameter."""
    joined = pricer.software.joins_gathers
    messages = gather_messages(gather, p, pricer.mesh)
    sent_s = sum(replace(message, bucketed=joined).seconds(pricer) for message in messages)
    return sent_s + _steps_copied_s(_gathered(gather, p, pricer.mesh), pricer)


def cast_seconds(gather: ParameterGather, p: StoredParameter, pricer: Pricer) -> float:
    """Seconds to cast a stored shard to the dtype in which it is gathered, unless a copy of it is kept."""
    if gather.dtype is None or p.narrow is not None or pricer.software.copy_bytes is not None:
        return 0.0
    return pricer.cast_s(p.type, replace(p.type, dtype=gather.dtype), p.storage)


def narrow_seconds(p: StoredParameter, pricer: Pricer) -> float:
    """Seconds to make the copy of a stored shard in lower precision, once a step, where the plan keeps one."""
    if p.narrow is None or pricer.software.copy_bytes is not None:
        return 0.0
    return pricer.cast_s(p.type, replace(p.type, dtype=p.narrow), p.storage)


def reduce_seconds(p: StoredParameter, pricer: Pricer) -> float:
    """Seconds of the messages that reduce a gradient, and of what is copied and compressed for them."""
    sent_s = _sent_s(gradient_messages(p, pricer.mesh), p, pricer.software.reduce_bytes, pricer)
    return sent_s + _steps_copied_s(_reduced(p, pricer.mesh), pricer) + _compressing_s(p, pricer)


def sums_seconds(p: StoredParameter, pricer: Pricer) -> list[float]:
    """The same of every sum of a gradient in the order in which they go: each with the steps before it, the last with all that
    follow."""
    mesh = pricer.mesh
    sums = [i for i, step in enumerate(p.reduce) if step.kind in BUCKETED and mesh.product(step.axes) > 1]
    starts = [0, *(i + 1 for i in sums[:-1])]
    from_each_s = [reduce_seconds(replace(p, reduce=p.reduce[start:]), pricer) for start in starts]
    return [a - b for a, b in pairwise([*from_each_s, 0.0])]


def _compressing_s(p: StoredParameter, pricer: Pricer) -> float:
    """Seconds to encode and decode a gradient."""
    if not p.compression:
        return 0.0
    return sum(
        pricer.copy_s * compressing_bytes(m.kind, m.nbytes, p.compression, pricer.mesh.sizes[m.axis])
        for m in _sums(p, pricer.mesh)
    )


def regather_seconds(p: StoredParameter, pricer: Pricer) -> float:
    """Seconds of the messages that bring an updated value to where it is stored, and of what is copied for them."""
    sent_s = _sent_s(regather_messages(p, pricer.mesh), p, pricer.software.copy_bytes, pricer)
    return sent_s + _steps_copied_s(_regathered(p, pricer.mesh), pricer)


def _sent_s(messages: Iterable[Message], p: StoredParameter, element_bytes: float | None, pricer: Pricer) -> float:
    """Seconds of messages whose elements have so many bytes on the wire (None: those of the parameter)."""
    share = 1.0 if element_bytes is None else element_bytes / p.type.dtype.itemsize
    return sum(replace(message, nbytes=share * message.nbytes).seconds(pricer) for message in messages)


def gradient_work(stage: LoweredStage, pricer: Pricer, setting: Setting) -> dict[str, float]:
    """Per trained parameter the seconds once per step, without what is hidden: gradient reduction, optimizer, gather of the
    updated value."""
    work = {}
    for p in stage.parameters.values():
        if p.contributions:
            non_overlapped_s = sent_times(p, stage) * pricer.software.reduce_share * reduce_seconds(p, pricer)
            non_overlapped_s += pricer.software.gather_share * regather_seconds(p, pricer)
            work[p.name] = non_overlapped_s + optimizer_s(p, stage, pricer, setting) + narrow_seconds(p, pricer)
    return work


def optimizer_s(
    p: StoredParameter, stage: LoweredStage, pricer: Pricer, setting: Setting, rank: int | None = None
) -> float:
    """Seconds of the optimizer's update of one parameter's shard, and to copy it for products where copies are kept. rank: as of
    `on_rank`."""
    if not (p.owned and p.contributions):
        return 0.0
    nbytes, itemsize = on_rank(p, stage.mesh, rank=rank).updated, p.type.dtype.itemsize
    update_s = float(pricer.update_s(setting.optimizer.update_elements(p.name), nbytes))
    copy_bytes = pricer.software.copy_bytes or itemsize
    return update_s + (nbytes * (1 + copy_bytes / itemsize) * pricer.copy_s if copy_bytes < itemsize else 0.0)
