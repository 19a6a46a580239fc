"""One end of a transfer on one rank: what to send of a value, what to receive and where it goes.

The blocks are planned once, when the session starts. A message per peer and microbatch: a block that is contiguous in
the value is sent as it lies there, one that is contiguous in the received tensor arrives in place; what is on this rank
already is not sent (and when it is all there is, not even copied).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.calls import Message, Posted
from ..comm.comm import Comm
from ..errors import RuntimeProgramError
from ..program.transfer import Piece, Placed, pieces

Slices = tuple[slice, ...]


@dataclass(slots=True)
class Arrival:
    """A tensor on its way: the messages that fill it. blocks: those that need a copy into the tensor."""

    tensor: Tensor
    posted: list[Posted]
    blocks: list[tuple[Slices, Tensor]]

    def wait(self) -> Tensor:
        for posted in self.posted:
            posted.wait()
        for slices, block in self.blocks:
            self.tensor[slices].copy_(block)
        return self.tensor


class Channel:
    """A tensor that goes from one stage to another, seen from one rank. tag: that of microbatch 0."""

    def __init__(
        self, what: str, shape: Sequence[int], dtype: torch.dtype, source: Placed, target: Placed, tag: int, comm: Comm
    ) -> None:
        every, rank = pieces(shape, source, target, what), comm.rank
        self.what = what
        self.dtype = dtype
        self.device = comm.device
        self.tag = tag
        self._source_shape = _local(shape, source, rank, what)
        self._target_shape = _local(shape, target, rank, what)
        self._out = [
            (p.target, _part(p.source_slices, self._source_shape)) for p in every if p.source == rank != p.target
        ]
        self._in = [
            (p.source, p.target_slices, _rows(p.target_slices, self._target_shape))
            for p in every
            if p.target == rank != p.source
        ]
        self._kept: Piece | None = next((p for p in every if p.source == rank == p.target), None)

    @property
    def keeps(self) -> bool:
        """Whether a part of what this rank sends is for itself."""
        return self._kept is not None

    @property
    def stays(self) -> bool:
        """Whether what this rank sends is exactly what it receives."""
        return self._kept is not None and not self._in and self._source_shape == self._target_shape

    def outgoing(self, value: Tensor, microbatch: int = 0) -> list[Message]:
        """The messages that take a value to the other ranks."""
        if value.dtype is not self.dtype or value.shape != self._source_shape:
            raise RuntimeProgramError(
                f"{self.what}: {self.dtype}{list(self._source_shape or ())} is to be sent, the stage gave "
                f"{value.dtype}{list(value.shape)}"
            )
        messages = []
        for peer, slices in self._out:
            block = value if slices is None else value[slices]
            messages.append(Message("send", block.contiguous(), peer, self.tag + microbatch, self._site(microbatch)))
        return messages

    def incoming(self, microbatch: int = 0) -> tuple[Arrival, list[Message]]:
        """A tensor to receive, and the messages that fill it (to be started by the caller)."""
        assert self._target_shape is not None
        tensor = torch.empty(self._target_shape, dtype=self.dtype, device=self.device)
        messages, blocks = [], []
        for peer, slices, in_place in self._in:
            block = tensor[slices] if slices else tensor
            if not in_place:
                block = torch.empty_like(block, memory_format=torch.contiguous_format)
                blocks.append((slices, block))
            messages.append(Message("recv", block, peer, self.tag + microbatch, self._site(microbatch)))
        return Arrival(tensor, [], blocks), messages

    def keep(self, value: Tensor, tensor: Tensor) -> None:
        """Copy what this rank has itself of a value into the received tensor."""
        assert self._kept is not None
        tensor[self._kept.target_slices].copy_(value[self._kept.source_slices])

    def _site(self, microbatch: int) -> str:
        return f"{self.what}, microbatch {microbatch}"


def exchange(comm: Comm, routes: Sequence[tuple[Channel, Tensor | None, bool]]) -> list[Tensor | None]:
    """Run (channel, value to send or None, whether to receive) for all channels at once; what is received, in order."""
    messages: list[Message] = []
    arrivals: list[Arrival | None] = []
    ends = []
    for channel, value, _ in routes:
        messages += channel.outgoing(value) if value is not None else []
    sends = len(messages)
    for channel, value, receives in routes:
        arrival, incoming = channel.incoming() if receives else (None, [])
        if arrival is not None and value is not None and channel.keeps:
            channel.keep(value, arrival.tensor)
        arrivals.append(arrival)
        messages += incoming
        ends.append(len(messages))
    posted, begin = comm.start_messages(messages), sends
    received: list[Tensor | None] = []
    for arrival, end in zip(arrivals, ends, strict=True):
        if arrival is not None:
            arrival.posted = posted[begin:end]
        begin = end
        received.append(arrival.wait() if arrival is not None else None)
    for one in posted[:sends]:
        one.wait()
    return received


def _local(shape: Sequence[int], placed: Placed, rank: int, what: str) -> tuple[int, ...] | None:
    for box, holders in placed.boxes(shape, what).items():
        if rank in holders:
            return tuple(stop - start for start, stop in box)
    return None


def _part(slices: Slices, shape: tuple[int, ...] | None) -> Slices | None:
    """None for all of a tensor."""
    assert shape is not None
    return None if all(s.stop - s.start == n for s, n in zip(slices, shape, strict=True)) else slices


def _rows(slices: Slices, shape: tuple[int, ...] | None) -> bool:
    """Whether a block of a contiguous tensor is contiguous: whole behind its first dim that is more than one long."""
    assert shape is not None
    sizes = [s.stop - s.start for s in slices]
    first = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes))
    return sizes[first + 1 :] == list(shape[first + 1 :])
