"""Messages that an op sends itself, beside the conversions of its operands and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from autopar.runtime.data.fields import Bytes
from autopar.runtime.data.schema import number


@dataclass(frozen=True)
class Sent:
    """Messages that an op sends itself, each after the one before.

    kind: as `autopar.costmodel.collective` has them; nbytes: of one, of the full array; times: how many.
    behind: share of the op's own work that one of them is under way behind. after: share of it that is done when an op that
    can be suspended stops for the message (None: it does not). joins: it is under way together with the one before it, so that
    ranks which have met for that one need not meet again.
    """

    kind: str
    axis: str
    nbytes: Bytes
    times: int = 1
    behind: Annotated[float, number(0, 1)] = 0.0
    after: float | None = None
    joins: bool = False
