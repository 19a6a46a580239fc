"""Sums of gradients with fewer bytes on the wire, where `Options(gradient_compression=…)` asks for it.

What n ranks sum are rows (n, m), row i for member i. Each rank encodes its rows, sends each to its member, and adds in full
precision what it gets; an all_reduce then encodes that row again and gathers it. So a value is rounded once where it is
scattered, twice where it is needed whole, however many ranks there are, and all ranks decode the same bytes:

    x (n, m) --encode--> (n, w) --all_to_all--> (n, w) --decode and add--> y (m)          reduce_scatter ends here
                                                y (m) --encode--> (w) --all_gather--> (n, w) --decode--> (n, m)

"bf16" rounds to bfloat16: half of float32's bytes. "int8": blocks of 256 elements share a scale 2^e, which travels as one
byte behind the elements: a quarter. What int8 loses stays with the rank that lost it, `Unsent`, and is added to the gradient of
the next step (error feedback; Seide et al. 2014, Karimireddy et al. 2019); what the second leg loses stays with the owner of
the row. As scales are powers of two, what is sent and what is not are exact parts of what there was, so that

    sum over steps and ranks of gradients = sum over steps of results + sum over ranks of what is unsent.

A block with an element that is no finite number has no finite element when it is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.calls import Handle
from ..comm.comm import Axes, Comm
from ..errors import RuntimeProgramError


@dataclass(frozen=True)
class Codec:
    """How elements become bytes: `block` of them `block_bytes`. feedback: what is lost is sent later.

    encode(x, wire): x (k · block,) floats, wire (k · block_bytes,) int8; with feedback x becomes what was lost.
    decode(wire, x): the inverse, into x.
    """

    block: int
    block_bytes: int
    feedback: bool
    encode: Callable[[Tensor, Tensor], None]
    decode: Callable[[Tensor, Tensor], None]

    def padded(self, numel: int) -> int:
        """Elements of as many blocks as `numel` elements need."""
        return -(-numel // self.block) * self.block

    def wire_bytes(self, numel: int) -> int:
        """Bytes that whole blocks of `numel` elements are sent in."""
        return numel // self.block * self.block_bytes


def _encode_bf16(x: Tensor, wire: Tensor) -> None:
    wire.view(torch.bfloat16).copy_(x)


def _decode_bf16(wire: Tensor, x: Tensor) -> None:
    x.copy_(wire.view(torch.bfloat16))


_BLOCK = 256
_NOT_FINITE = -128
"""The exponent of a block that has no scale: as the bits of a float32 it makes -inf, times which nothing is finite."""


def _encode_int8(x: Tensor, wire: Tensor) -> None:
    blocks = x.view(-1, _BLOCK)
    largest = torch.linalg.vector_norm(blocks, torch.inf, dim=1)
    exponent = torch.frexp(largest / 127).exponent.clamp_(min=-126)  # |x| < 127 · 2^exponent
    exponent.masked_fill_(~(largest < 2.0**126), _NOT_FINITE)
    wire[x.numel() :].copy_(exponent)
    scale = _scales(wire, x)
    whole = (blocks / scale).round_()
    wire[: x.numel()].view(-1, _BLOCK).copy_(whole)
    blocks.addcmul_(whole, scale, value=-1)


def _decode_int8(wire: Tensor, x: Tensor) -> None:
    x.view(-1, _BLOCK).copy_(wire[: x.numel()].view(-1, _BLOCK)).mul_(_scales(wire, x))


def _scales(wire: Tensor, x: Tensor) -> Tensor:
    """2^e of every block, (blocks, 1): its bits are the exponent's."""
    bits = (wire[x.numel() :].to(torch.int32) + 127) << 23
    return bits.view(torch.float32).to(x.dtype).unsqueeze(1)


CODECS = {
    "bf16": Codec(1, 2, False, _encode_bf16, _decode_bf16),
    "int8": Codec(_BLOCK, _BLOCK + 1, True, _encode_int8, _decode_int8),
}
"""The codecs by the name that Options.gradient_compression and the tables of emitted programs have."""


def start_scattered_sum(comm: Comm, codec: Codec, rows: Tensor, out: Tensor, axes: Axes, site: str) -> Handle[Tensor]:
    """Sum rows (n, m) over axes; the result is this member's row, in `out`. With feedback rows become what was lost."""
    n, m = rows.shape
    wire = rows.new_empty(n, codec.wire_bytes(m), dtype=torch.int8)
    for row, message in zip(rows, wire, strict=True):
        codec.encode(row, message)
    handle = comm.start_all_to_all(wire, 0, 0, axes, site=site)

    def add(received: Tensor) -> Tensor:
        first, *others = received.view(n, -1)
        codec.decode(first, out)
        term = torch.empty_like(out)
        for message in others:
            codec.decode(message, term)
            out.add_(term)
        return out

    return handle.then(add)


def start_gathered_rows(comm: Comm, codec: Codec, row: Tensor, rows: Tensor, axes: Axes, site: str) -> Handle[Tensor]:
    """Every member's row (m,) in `rows` (n, m), which may hold other things until the wait. With feedback row becomes what was
    lost."""
    wire = row.new_empty(1, codec.wire_bytes(row.numel()), dtype=torch.int8)
    codec.encode(row, wire[0])

    def decode(received: Tensor) -> Tensor:
        for message, place in zip(received, rows, strict=True):
            codec.decode(message, place)
        return rows

    return comm.start_all_gather(wire, 0, axes, site=site).then(decode)


Lost = Sequence[tuple[str, int, Tensor]]
"""The parts of a bucket that lost something: per value its name, how many steps it has left, and its part of the bucket."""


class Unsent:
    """The error of this rank so far from compressing with feedback, by value and steps left.

    A part of a bucket has the value's elements in the order in which that bucket always has them, so it is kept as it lies there.
    """

    def __init__(self) -> None:
        self.values: dict[tuple[str, int], Tensor] = {}

    def add_to(self, lost: Lost, codec: Codec) -> None:
        """Add what was lost before to parts that are about to be encoded. Raises RuntimeProgramError where what was
        lost before was of another shape."""
        for name, left, part in lost if codec.feedback else ():
            before = self.values.get((name, left))
            if before is None:
                self.values[name, left] = torch.empty_like(part, memory_format=torch.contiguous_format)
            elif before.shape != part.shape:
                raise RuntimeProgramError(
                    f"gradient of {name!r}: what compression has not sent has shape {tuple(before.shape)}, the gradient "
                    f"{tuple(part.shape)}; load a checkpoint of this program"
                )
            else:
                part.add_(before)

    def keep(self, lost: Lost, codec: Codec) -> None:
        """Keep what parts hold now that they lost."""
        for name, left, part in lost if codec.feedback else ():
            self.values[name, left].copy_(part)

    def forget(self) -> None:
        """Nothing is owed any more: what was sent last was not used, and what it left may be no number."""
        self.values.clear()
