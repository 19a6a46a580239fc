"""The executor: a rank runs its group's row of actions, messages under way while it computes.

Everything is planned when the session starts: for every action the stage function, what must have arrived, and where
what it makes goes. After an action its sends and the receives of later actions start together; an action then waits for
its own receives only. Buffers of sends are kept until they are done: asked for where the backend can tell, else waited
for in turn, a few actions later (order.py says why that cannot wait forever).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm.backends import backend_of
from ..comm.calls import Handle, Message, Posted
from ..comm.comm import Comm
from ..comm.recorder import Recorder, spanned
from ..errors import RuntimeProgramError
from ..kernels.overflow import Overflows
from ..program.layout import TensorInfo
from ..program.order import Slot, plan_order
from ..program.tables import Pipeline
from .channels import Arrival, Channel
from .stage import Inputs, Stage

Place = tuple[int, int]


def most_sends(groups: int) -> int:
    """The number of actions whose sends may be under way at once in a pipeline of so many groups."""
    return max(4, 2 * groups) if groups > 1 else 0


@dataclass(slots=True)
class _Step:
    """A slot bound to this rank: the stage, and channels by number. send: (place in SENDS, number, channel) by number.
    keep: a later action takes what this one leaves. last: of its stage."""

    name: str
    stage: Stage
    kind: str
    microbatch: int
    receive: list[tuple[Channel, int, int]]
    need: list[int]
    send: list[tuple[int, int, Channel]]
    keep: bool
    last: bool


class Executor:
    """Runs a rank's row of actions, once per step."""

    def __init__(self, pipeline: Pipeline, comm: Comm, stages: Mapping[int, Stage], in_order: bool) -> None:
        """in_order: messages have no tags, so they are received in the order sent."""
        self.comm = comm
        self.pipeline = pipeline
        self.group = pipeline.group_of(comm.rank)
        self.stages = stages
        self.microbatches = pipeline.microbatches
        self.recorder: Recorder | None = None
        self._gives = pipeline.training and pipeline.extras is not None
        guards = next((stage.rt.guards for stage in stages.values()), None)
        self.overflows = Overflows(comm, pipeline.tells_all, guards)
        transfers = [c.transfer for c in pipeline.boundary_tensors]
        self._slots = plan_order(
            pipeline.rows, pipeline.groups, transfers, pipeline.microbatches, pipeline.training, ahead=not in_order
        )[self.group]
        self.connect()
        forwards = [k for k, step in enumerate(self._steps) if step.kind == "F"]
        self._told_after = forwards[-1] if forwards and len(pipeline.groups) == 1 else -1  # where all ranks are at once
        self._in_order = pipeline.in_order
        self._limit = most_sends(len(pipeline.groups))
        self._arriving: dict[Place, Arrival] = {}
        self._kept: dict[Place, Tensor] = {}
        self._sending: deque[tuple[list[Posted], list[Message]]] = deque()
        self._states: dict[Place, list[Any]] = {}
        self._prepared: dict[int, list[Tensor]] = {}
        self._outputs: dict[int, list[list[Any]]] = {}

    def connect(self) -> None:
        """Plan the messages between stages, between two steps, under the shares that their meshes have now."""
        pipeline, stages = self.pipeline, self.stages
        self._channels = {
            c.transfer.number: Channel(
                f"{c.transfer.kind} {c.transfer.name} (stage {c.transfer.source} to {c.transfer.target})",
                c.shape,
                c.dtype,
                pipeline.placed(c.transfer.source, c.source_spec),
                pipeline.placed(c.transfer.target, c.target_spec),
                c.transfer.number * pipeline.microbatches,
                self.comm,
            )
            for c in pipeline.boundary_tensors
            if c.transfer.source in stages or c.transfer.target in stages
        }
        self._steps = [self._bind(slot, k, self._slots) for k, slot in enumerate(self._slots)]

    @torch.no_grad()
    def run(self, inputs: Inputs) -> dict[int, list[list[Any]]]:
        """One step's actions: stage -> per microbatch its outputs (in training maybe Handles)."""
        repeatable = backend_of(self.comm.device).repeatable(strict=False) if self._in_order else nullcontext()
        with self.overflows.noted(), repeatable:
            outputs = self._run(inputs)
        self.overflows.tell()
        return outputs

    def _run(self, inputs: Inputs) -> dict[int, list[list[Any]]]:
        self._outputs = {index: [[] for _ in range(self.microbatches)] for index in self.stages}
        for stage in self.stages.values():
            stage.rt.begin_step()
        self._prepared = {index: self._prepare(stage, inputs) for index, stage in self.stages.items()}
        self._exchange([], self._steps[0].receive if self._steps else [])
        for k, step in enumerate(self._steps):
            following = self._steps[k + 1].receive if k + 1 < len(self._steps) else []
            self.comm.at(step.stage.rt.step + 1, step.name)
            try:
                with spanned(self.recorder, step.name):
                    self._exchange(self._act(step, inputs), following)
            except Exception as error:
                error.add_note(f"in action {step.name} of group {self.group}, {self.comm.describe_rank()}")
                raise
            if step.last:
                step.stage.rt.grads.flush()
            if k == self._told_after:
                self.overflows.tell()
        for stage in self.stages.values():
            stage.rt.end_step()
        outputs, self._outputs, self._prepared = self._outputs, {}, {}
        return outputs

    def finish(self) -> None:
        """Wait until everything sent has left. Raises ExpertOverflow, GuardError."""
        self.overflows.end()
        while self._sending:
            self._release()

    # ---- one action

    def _act(self, step: _Step, inputs: Inputs) -> list[Message]:
        """Run an action; the messages that take its results to other ranks."""
        stage, microbatch = step.stage, step.microbatch
        rt, module, place = stage.rt, stage.module, (stage.index, microbatch)
        received = [self._take((number, microbatch)) for number in step.need]
        rt.microbatch = microbatch
        if step.kind == "F":
            own = inputs(stage, microbatch)
            rt.inputs = frozenset(t.untyped_storage()._cdata for t in own)
            prepared = list(self._prepared[stage.index])
            outputs, sent, left = module.forward(rt, own, received, prepared)
            if self._gives:
                outputs = [one if isinstance(one, Handle) else stage.apart(one) for one in outputs]
            self._outputs[stage.index][microbatch] = outputs
        elif step.kind == "B":
            sent, left = module.backward(rt, self._states.pop(place), received)
        else:
            module.weights(rt, self._states.pop(place))
            return []
        if step.keep:
            self._states[place] = left
        if len(sent) != len(step.send):
            raise RuntimeProgramError(f"{step.name} gave {len(sent)} values to send, the pipeline has {len(step.send)}")
        messages: list[Message] = []
        for position, number, channel in step.send:
            value = sent[position]
            messages += channel.outgoing(value, microbatch)
            if channel.keeps:
                self._kept[number, microbatch] = value
        return messages

    def _take(self, place: Place) -> Tensor:
        """A received tensor; nothing of it stays here."""
        channel, arrival = self._channels[place[0]], self._arriving.pop(place, None)
        if channel.stays:
            return self._kept.pop(place)
        assert arrival is not None
        if channel.keeps:
            channel.keep(self._kept.pop(place), arrival.tensor)
        return arrival.wait()

    def _exchange(self, messages: list[Message], receive: list[tuple[Channel, int, int]]) -> None:
        """Start sends and the receives of a later action together."""
        sends = len(messages)
        arrivals: list[tuple[Arrival, int]] = []
        for channel, number, microbatch in receive:
            arrival, incoming = channel.incoming(microbatch)
            messages = messages + incoming
            arrivals.append((arrival, len(messages)))
            self._arriving[number, microbatch] = arrival
        if not messages:
            return
        posted = self.comm.start_messages(messages)
        begin = sends
        for arrival, end in arrivals:
            arrival.posted = posted[begin:end]
            begin = end
        if sends:
            self._sending.append((posted[:sends], messages[:sends]))
            while len(self._sending) > self._limit or (self._sending and self._left(self._sending[0][0])):
                self._release()

    def _left(self, posted: list[Posted]) -> bool:
        return all(one.done() for one in posted)

    def _release(self) -> None:
        posted, _ = self._sending.popleft()
        for one in posted:
            one.wait()

    # ---- before the actions

    def _prepare(self, stage: Stage, inputs: Inputs) -> list[Tensor]:
        """The values of the whole batch that every forward of the step needs: the sum of its microbatches' terms, or
        the maximum. Those of a round are made of what the rounds before it left."""
        prepared: list[Tensor] = []
        for number in itertools.count():
            prepare = getattr(stage.module, f"prepare_{number}" if number else "prepare", None)
            if prepare is None:
                break
            rows = []
            for microbatch in range(self.microbatches):
                stage.rt.microbatch = microbatch
                rows.append(prepare(stage.rt, inputs(stage, microbatch), prepared))
            reductions = stage.module.PREPARED[len(prepared) : len(prepared) + len(rows[0])]
            terms = zip(zip(*rows, strict=True), reductions, strict=True)
            prepared = [*prepared, *(put_together(values, how) for values, how in terms)]
        return prepared

    def _bind(self, slot: Slot, k: int, slots: Sequence[Slot]) -> _Step:
        action, stage = slot.action, self.stages[slot.action.stage]
        module, by_name = stage.module, {t.name: t for t in slot.need + slot.send}
        need = {"F": "RECEIVES", "B": "GRADIENT_RECEIVES"}.get(action.kind)
        send = {"F": "SENDS", "B": "GRADIENT_SENDS"}.get(action.kind)
        receive = [(self._channels[t.number], t.number, m) for t, m in slot.receive]
        sends = [(by_name[n].number, place) for place, n in enumerate(getattr(module, send, ()) if send else ())]
        later = [other.action for other in slots[k + 1 :] if other.action.stage == action.stage]
        return _Step(
            str(action),
            stage,
            action.kind,
            action.microbatch,
            [row for row in receive if not row[0].stays],
            [by_name[name].number for name in getattr(module, need, ())] if need else [],
            [(place, number, self._channels[number]) for number, place in sorted(sends)],
            any(other.microbatch == action.microbatch for other in later),
            not later,
        )


def put_together(values: Sequence[Tensor], how: str) -> Tensor:
    """The microbatches' terms of a value as one: their "sum", "max" or "min"."""
    stacked = torch.stack(list(values))
    return stacked.sum(0) if how == "sum" else stacked.amax(0) if how == "max" else stacked.amin(0)


def joined_shape(info: TensorInfo, microbatches: int) -> tuple[int, ...]:
    """The shape of an output of the whole batch."""
    how, joined, _ = info.join
    return tuple(n * microbatches if how == "cat" and dim == joined else n for dim, n in enumerate(info.shape))


def join_microbatches(values: list[Tensor], how: str, dim: int, outer: int) -> Tensor:
    """The microbatches' values of an output as one: joined along a dim, in each of its `outer` parts."""
    if how == "same":
        return values[0]
    if how != "cat":
        return put_together(values, how)
    if outer == 1:
        return torch.cat(values, dim)
    parts = [v.unflatten(dim, (outer, -1)) for v in values]
    return torch.cat(parts, dim + 1).flatten(dim, dim + 1)
