"""Dims of an image in the rules of ops over windows of rows (rows stand for columns and planes too).

h2, y2     dim 2 of the image and of what is made of it: two factors of one choice `+h2+y2`, since a block of results
           reads rows of other blocks, which the op's implementation gets (`runtime/kernels/images/halos.py`)
s2, r2     where blocks of the result read their own rows alone (kernels of one row, patches): a plain factor
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

from autopar.ir.call import OpCall
from autopar.ir.rule import Carried, Labels, factors_of
from autopar.ir.sent import Sent
from autopar.ops.labels import Maker
from autopar.ops.registry import AlongAxis, Block, Sending
from autopar.runtime.kernels.images.halos import Window, most_rows

Dim = tuple[str, ...]
Pair = Callable[[Maker, int, int, int], tuple[Dim, Dim]]
Wide = tuple[Window, int, int | Literal["result"]]
"""The window along a dim: what ranks want, rows of the whole, and the operand (or the result) that has them."""


def paired(make: Maker, dim: int, image: int, made: int) -> tuple[Dim, Dim]:
    """Labels of a dim of the image and of what is made of it, both in blocks of one axis if in any."""
    return make.add(f"h{dim}", image, whole=True), make.add(f"y{dim}", made, whole=True)


def aligned(make: Maker, dim: int, image: int, made: int) -> tuple[Dim, Dim]:
    """The same where a block of one side is made of the block of the other."""
    common = math.gcd(image, made)
    lead = make.add(f"s{dim}", common)
    rest = [make.add(f"{name}{dim}", size // common, whole=True) for name, size in (("r", image), ("q", made))]
    return (*lead, *rest[0]), (*lead, *rest[1])


def in_blocks(make: Maker, dims: Iterable[int], owed: tuple[int, ...] = ()) -> list[Carried]:
    """The choices of the dims that are paired."""
    pairs = ((f"h{dim}", f"y{dim}") for dim in dims)
    return [Carried(pair, owed) for pair in pairs if all(name in make.factors for name in pair)]


def labelled(lead: Labels, pairs: list[tuple[Dim, Dim]]) -> tuple[Labels, Labels]:
    """Labels of the image and of what is made of it. lead: of their dims before those of the image."""
    return (*lead, *(image for image, _ in pairs)), (*lead, *(made for _, made in pairs))


def told(block: Block) -> dict[str, Any]:
    """Which dims of the image are in blocks, and along which axis: `along2=rt.along('sp')`."""
    return {_name(choice): AlongAxis((axis,)) for axis, choice in block.carried}


def _name(choice: str) -> str:
    return f"along{_dim(choice)}"


def _dim(choice: str) -> int:
    return int(factors_of(choice)[0][1:])


def sends_rows(wide: Callable[[OpCall, int, int], Wide]) -> Callable[[Sending], list[Sent]]:
    """The rows that others have, one exchange. wide(call, dim, ranks); rows that come for another dim's halo are not counted."""

    def sends(sending: Sending) -> list[Sent]:
        window, size, of = wide(sending.call, _dim(sending.choice), sending.ranks)
        block = size // sending.ranks
        nbytes = sending.result_bytes[0] if of == "result" else sending.operand_bytes[of]
        rows = most_rows(window, sending.ranks, block)
        return [Sent("shift", sending.axis, rows * nbytes / block)] if rows else []

    return sends
