"""Ops that work along one dim and send a few rows of it themselves, where that dim is in blocks: their choices and messages.

Their rules call the dims of the first operand d0, d1, …; what they carry is one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from autopar.ir.rule import Carried
from autopar.ir.sent import Sent
from autopar.ops.registry import Block, Sending

Sends = Callable[[Sending], list[Sent]]


def carry(dims: Collection[int]) -> list[Carried]:
    """The choice of one dim along which an op works; where there are none or several nothing is carried."""
    return [Carried((f"d{dim}",)) for dim in dims] if len(dims) == 1 else []


def carried_dim(choice: str) -> int:
    """`+d2` is dim 2."""
    return int(choice.removeprefix("+d"))


def told_dim(block: Block) -> dict[str, object]:
    """The keywords of an implementation that cannot read off its arguments which dim is in blocks."""
    told: dict[str, object] = dict(block.told())
    for _, choice in block.carried:
        told["dim"] = carried_dim(choice)
    return told


def row_bytes(sending: Sending, operand: int = 0) -> float:
    """Bytes of one row of an operand on a rank: one entry of the dim that is in blocks."""
    size = sending.call.shapes[operand][carried_dim(sending.choice)]
    return sending.operand_bytes[operand] * sending.ranks / size


def gathers(rows: int = 0, places: int = 0, operand: int = 0) -> Sends:
    """Every rank's so many rows of an operand, and the int64 places of so many."""

    def sends(sending: Sending) -> list[Sent]:
        row = row_bytes(sending, operand)
        place = row / sending.call.operands[operand].dtype.itemsize * 8
        return [Sent("all_gather", sending.axis, n * sending.ranks) for n in (rows * row, places * place) if n]

    return sends


def adds(sending: Sending) -> list[Sent]:
    """One row is added up over the ranks."""
    return [Sent("all_reduce", sending.axis, row_bytes(sending))]


def whole_block(sending: Sending) -> list[Sent]:
    """The block itself goes to another rank."""
    return [Sent("shift", sending.axis, sending.operand_bytes[0])]
