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
from ..comm.mesh import run_axes
from ..errors import RuntimeProgramError
from ..program.transfer import Placed, Within, pieces


@dataclass(slots=True)
class Arrival:
    """A tensor on its way: the messages that fill it. blocks: those that need a copy into the tensor."""

    tensor: Tensor
    posted: list[Posted]
    blocks: list[tuple[Within, Tensor]]

    def wait(self) -> Tensor:
        for posted in self.posted:
            posted.wait()
        for place, block in self.blocks:
            place.of(self.tensor).copy_(block)
        return self.tensor


class Channel:
    """A tensor that goes from one stage to another, seen from one rank. tag: that of microbatch 0. stays: whether what this rank
    sends is exactly what it receives."""

    def __init__(
        self, what: str, shape: Sequence[int], dtype: torch.dtype, source: Placed, target: Placed, tag: int, comm: Comm
    ) -> None:
        every, rank = pieces(shape, source, target, what), comm.rank
        self.what = what
        self.dtype = dtype
        self.device = comm.device
        self.tag = tag
        self._source_shape = source.local_shape(shape, rank, what)
        self._target_shape = target.local_shape(shape, rank, what)
        self._out = [p for p in every if p.source == rank != p.target]
        self._in = [p for p in every if p.target == rank != p.source]
        self._kept = [p for p in every if p.source == rank == p.target]
        self._filled_up = bool(run_axes(shape, target.spec))
        self.stays = bool(self._kept) and source.held(shape, rank, what) == target.held(shape, rank, what)

    @property
    def keeps(self) -> bool:
        """Whether a part of what this rank sends is for itself."""
        return bool(self._kept)

    def outgoing(self, value: Tensor, microbatch: int = 0) -> list[Message]:
        """The messages that take a value to the other ranks."""
        if value.dtype is not self.dtype or value.shape != self._source_shape:
            raise RuntimeProgramError(
                f"{self.what}: {self.dtype}{list(self._source_shape or ())} is to be sent, the stage gave "
                f"{value.dtype}{list(value.shape)}"
            )
        messages = []
        for piece in self._out:
            block = piece.sent.of(value).contiguous()
            messages.append(Message("send", block, piece.target, self.tag + microbatch, self._site(microbatch)))
        return messages

    def incoming(self, microbatch: int = 0) -> tuple[Arrival, list[Message]]:
        """A tensor to receive, and the messages that fill it (to be started by the caller)."""
        assert self._target_shape is not None
        make = torch.zeros if self._filled_up else torch.empty
        tensor = make(self._target_shape, dtype=self.dtype, device=self.device)
        messages, blocks = [], []
        for piece in self._in:
            block = piece.arrives.of(tensor)
            if not block.is_contiguous():
                block = torch.empty_like(block, memory_format=torch.contiguous_format)
                blocks.append((piece.arrives, block))
            messages.append(Message("recv", block, piece.source, self.tag + microbatch, self._site(microbatch)))
        return Arrival(tensor, [], blocks), messages

    def keep(self, value: Tensor, tensor: Tensor) -> None:
        """Copy what this rank has itself of a value into the received tensor."""
        for piece in self._kept:
            piece.arrives.of(tensor).copy_(piece.sent.of(value))

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
