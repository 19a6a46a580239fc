"""A rank's part of a batch that was read ahead of its step, and its way to the device.

Whoever reads a batch copies this rank's part of every microbatch at once, to pinned memory where the device has memory of its
own: what the data function does with its memory afterwards is no concern of the step. To a device parts go on a stream of their
own, those of a microbatch while the one before it is computed, and those of a step's first one while the step before is. Room for
them is made in the order of the main stream, a microbatch ahead, and so is reused as all memory is:

    main   room for m + 1, a mark | kernels of m …           | wait for the copy | kernels of m + 1 …
    side                            wait for the mark, copy  |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm.backends import backend_of
from .own_rows import OwnRows, Taking
from .shape_variants import Form
from .stage import Cuts, Inputs, Stage, inputs_of

Place = tuple[int, int]
"""A stage and a microbatch."""
Rooms = list[Tensor | None]
"""Room on the device for inputs that are not there."""


@dataclass(frozen=True)
class Ready:
    """A batch that was read ahead. leaves: of the batch; parts: this rank's inputs, in memory of their own; go_on: called
    as soon as nothing but `parts` is read of it any more; cuts: where stages took their parts, before rows may have moved; rows:
    what they were taken by, where the batch has this rank's rows alone."""

    leaves: Sequence[Tensor]
    parts: Mapping[Place, list[Tensor]]
    cuts: Sequence[tuple[Stage, Cuts]] = ()
    rows: OwnRows | None = None
    go_on: Callable[[], None] = lambda: None


@torch.no_grad()
def made_ready(leaves: Sequence[Tensor], taking: Taking, forms: Sequence[Form]) -> Ready | None:
    """A batch as it is read ahead; nothing where it is not as a form takes it, which the step's guards say."""
    place, batch = taking.of(leaves)
    form, rows = forms[place], taking.rows[place]
    if [tuple(leaf.shape) for leaf in batch] != [like.shape for like in taking.inputs[place]]:
        return None
    microbatches = range(form.pipeline.microbatches)
    stages = form.stages.items()
    cuts: dict[int, Cuts] = {i: stage.cuts if rows is None else rows.cuts[i] for i, stage in stages}
    parts = {(i, m): stage.own_inputs(batch, m, cuts[i]) for i, stage in stages for m in microbatches}
    return Ready(leaves, parts, [(stage, stage.cuts) for _, stage in stages], rows)


class NextInputs:
    """The inputs of a rank's steps. ready: the batch of the next step, where it was read ahead."""

    def __init__(self, device: torch.device) -> None:
        row = backend_of(device)
        self.ready: Ready | None = None
        self._device, self._module = device, row.module
        self._stream = None if row.is_host else row.module.Stream()
        self._rooms: dict[int, tuple[Rooms, Any]] = {}
        """Room for the next microbatch of a stage, and a mark in the main stream from which on it may be written."""

    def of(
        self, given: Sequence[Tensor], shaped: Sequence[Tensor], checked: Sequence[Tensor], rows: OwnRows | None = None
    ) -> Inputs:
        """The inputs of a step that begins. given: its batch; shaped: in the shapes of its form; checked: as guards let it
        pass; rows: by which they are taken of a batch that has this rank's rows alone."""
        ready, self.ready = self.ready, None
        moved = ready is not None and any(stage.cuts is not cuts for stage, cuts in ready.cuts)
        as_read = ready is not None and ready.rows is rows and _same(ready.leaves, given) and _same(shaped, checked)
        if ready is None or moved or not as_read:
            return inputs_of(checked) if rows is None else rows.inputs_of(checked)
        inputs = self._arriving(ready.parts)
        ready.go_on()
        return inputs if rows is None else rows.completed(inputs)

    def _arriving(self, parts: Mapping[Place, list[Tensor]]) -> Inputs:
        """Inputs on the device, where microbatches are taken in turn."""
        if self._stream is None or all(x.device.type == self._device.type for own in parts.values() for x in own):
            return lambda stage, microbatch: parts[stage.index, microbatch]
        stream, arriving = self._stream, dict[Place, tuple[list[Tensor], Any]]()

        def start(place: Place) -> None:
            rooms, mark = self._rooms.pop(place[0], ([], None))
            if mark is None or not _fit(rooms, parts[place]):
                rooms, mark = self._room(parts[place])
            stream.wait_event(mark)
            with self._module.stream(stream):
                values = [
                    part if room is None else room.copy_(part, non_blocking=True)
                    for room, part in zip(rooms, parts[place], strict=True)
                ]
            arriving[place] = values, stream.record_event()

        def take(stage: Stage, microbatch: int) -> list[Tensor]:
            place, following = (stage.index, microbatch), (stage.index, microbatch + 1)
            if place not in arriving:
                start(place)
            values, arrived = arriving.pop(place)
            self._rooms[stage.index] = self._room(parts[following if following in parts else (stage.index, 0)])
            if following in parts:
                start(following)
            self._module.current_stream(self._device).wait_event(arrived)
            return values

        for index in dict.fromkeys(index for index, _ in parts):
            start((index, 0))
        return take

    def _room(self, like: Sequence[Tensor]) -> tuple[Rooms, Any]:
        rooms = [
            None if part.device.type == self._device.type else torch.empty_like(part, device=self._device)
            for part in like
        ]
        return rooms, self._module.current_stream(self._device).record_event()


def _same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return len(first) == len(second) and all(one is other for one, other in zip(first, second, strict=True))


def _fit(rooms: Rooms, parts: Sequence[Tensor]) -> bool:
    """Whether parts go into rooms that were made for others."""
    wanted = [(part.shape, part.stride(), part.dtype) for part in parts]
    return [(room.shape, room.stride(), room.dtype) for room in rooms if room is not None] == wanted
