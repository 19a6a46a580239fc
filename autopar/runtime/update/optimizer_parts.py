"""The optimizer's step by parts: a few parameters at a time, what rests in tiers brought before and parked again.

    bring part 0 | bring part 1   | bring part 2   |
                 | step of part 0 | step of part 1 | step of part 2 |
                                  | park part 0    | park part 1    | park part 2

torch optimizers leave parameters without a gradient alone, so a step that sees the gradients of one part updates that
part (update.py), bit for bit as a step over all of them would. Room in the tier is made once, after the first step.
What is parked stays in `optimizer.state` as a tensor of the host, where checkpoints find it. Parameters that rest in a
tier come with their gradients, and what the step makes of them goes back to storage part by part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..memory.tiers import Tiers

PART_BYTES = 64 << 20
"""Bytes of optimizer shards that a part has at most (a larger one is a part of its own)."""
LEAST_PARTS = 8
"""Into so many parts the shards of a stage are divided where they are smaller."""


def divide(sizes: Mapping[str, int]) -> list[list[str]]:
    """Names in parts, in order; sizes: bytes of the optimizer shards."""
    limit = min(PART_BYTES, -(-sum(sizes.values()) // LEAST_PARTS))
    parts: list[list[str]] = []
    room = 0
    for name, nbytes in sizes.items():
        if not parts or nbytes > room:
            parts.append([])
            room = limit
        parts[-1].append(name)
        room -= nbytes
    return parts


class Parts:
    """The parts of one rank's optimizer that rest in tiers. parts: what is updated together, for Updater.parts;
    `bring`: its bring."""

    def __init__(
        self,
        tiers: Tiers,
        where: Sequence[Mapping[str, str]],
        sizes: Mapping[str, int],
        state_of: Callable[[str], dict[str, Any]],
        values: Mapping[str, nn.Parameter] | None = None,
        gradient_of: Callable[[str], Tensor | None] | None = None,
        store: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> None:
        """where: per stage the tier ("": none) of each of its parameters' state, in the optimizer's order; sizes: bytes of
        their shards; state_of: a parameter's entry of `optimizer.state`. values: parameters that rest in a tier, and
        gradient_of their gradients, too; store: takes their new values."""
        self.tiers = tiers
        self.values = dict(values or {})
        self._gradient_of, self._store = gradient_of, store
        self.tier = {name: tier for stage in where for name, tier in stage.items() if tier}
        away = self.tier.keys() | self.values.keys()
        at_home = [name for stage in where for name in stage if name not in away]
        self.parts = [at_home] if at_home else []
        self._next: dict[str, list[str]] = {}
        for stage in where:
            parts = divide({name: sizes[name] for name in stage if name in away})
            self.parts += parts
            self._next |= {part[0]: following for part, following in itertools.pairwise(parts)}
        self._state_of = state_of
        self._room: dict[tuple[str, str], Tensor] = {}
        self._coming: dict[str, dict[str, Tensor]] = {}
        self._marks: dict[str, Any] = {}
        self._arriving: dict[str, tuple[Tensor, Tensor | None]] = {}

    @contextmanager
    def bring(self, names: Sequence[str]) -> Iterator[None]:
        """Inside, the state of these parameters is on the device, and that of the next part is on its way."""
        if not any(name in self.tier or name in self.values for name in names):
            yield
            return
        self._start(names)
        homes: dict[str, Tensor] = {}
        for name in names:
            self._state_of(name).update(self._coming.pop(name, {}))
            if name in self.values:
                parameter, homes[name] = self.values[name], self.values[name].data
                parameter.grad = None
                parameter.data, parameter.grad = self._arriving.pop(name)
        self.tiers.arrived(self._marks.pop(names[0], None))
        self._start(self._next.get(names[0], ()))
        yield
        updated = {name: self.values[name].data for name in homes}
        for name, home in homes.items():
            self.values[name].grad = None
            self.values[name].data = home
        if self._store is not None and updated:
            self._store(updated)
        del updated
        self.park(names)

    def park(self, names: Sequence[str] | None = None) -> None:
        """Move the state of these parameters (default: of all) to its tier, where it is not there already."""
        for name in self.tier if names is None else names:
            state = self._state_of(name)
            for key, value in state.items():
                if name not in self.tier or not isinstance(value, Tensor) or value.dim() == 0:
                    continue
                room = self._room.get((name, key))
                if room is value:
                    continue
                if room is None or room.shape != value.shape or room.dtype != value.dtype:
                    room = self._room[name, key] = self.tiers.empty_like(value, self.tier[name])
                self.tiers.write(room, value)
                state[key] = room

    def _start(self, names: Sequence[str]) -> None:
        """Bring the state of a part, unless it is on its way."""
        if not names or names[0] in self._marks:
            return
        for name in names:
            if name in self.values and self._gradient_of is not None:
                value, grad = self.values[name].data, self._gradient_of(name)
                self._arriving[name] = self.tiers.read(value), None if grad is None else self.tiers.read(grad)
            rooms = {key: self._room.get((name, key)) for key in self._state_of(name)}
            state = self._state_of(name)
            self._coming[name] = {
                k: self.tiers.read(room) for k, room in rooms.items() if room is not None and state[k] is room
            }
        self._marks[names[0]] = self.tiers.mark()
