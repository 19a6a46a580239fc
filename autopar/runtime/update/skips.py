"""Updates that were left out in a row, counted on every rank alike: a run whose steps change nothing ends by name.

An update is left out where a gradient overflows under loss scaling (scaling.py), and on request where the loss or a gradient is
no number. One such step is usual; the second in a row is said, and after too many the run ends, whatever loop it is in. The
count is part of the state: a run that starts again from one of these steps goes on counting.
"""

from __future__ import annotations

import math

from ..data.datafile import parse_json
from ..data.schema import SchemaError, integer
from ..errors import CheckpointError, TooManySkips

MOST_SKIPPED = 10
"""Updates in a row whose loss or gradients are no numbers; with one more a run ends, as it no longer learns."""
MOST_OVERFLOWS = 19
"""The same under loss scaling, where the first steps look for a scale: from 65536 it comes down to 1/8."""
_COUNT = integer(0, 1 << 53)


class Skips:
    """in_a_row: up to the last step; total: since the session was made; overflow: whether the last one was for its gradients
    under loss scaling alone."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self.total = 0
        self.overflow = False

    def count(self, skipped: bool, overflow: bool) -> None:
        """Count a step that is done."""
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        self.total += skipped
        self.overflow = skipped and overflow

    def judge(self, step: int, loss: float, scale: float) -> str:
        """The message after a step whose update was left out; empty where it is the first or a later one. scale: of the
        loss, from now on. Raises TooManySkips."""
        if self.overflow:
            what = f"a gradient of step {step} overflows or is no number, and the loss scale is down to {scale:g}"
        else:
            what = spoiled_text(step, loss)
        most = MOST_OVERFLOWS if self.overflow else MOST_SKIPPED
        if self.in_a_row > most:
            raise TooManySkips(f"{what}, after {self.in_a_row - 1} updates in a row that were skipped for this")
        if self.in_a_row != 2:
            return ""
        return f"{what}: 2 updates in a row are skipped; the run ends where that goes on for {most + 1}"

    def dump(self) -> str:
        return str(self.in_a_row)

    @staticmethod
    def read(saved: object) -> int:
        """The inverse of `dump`. Raises CheckpointError."""
        try:
            return _COUNT(parse_json(saved) if isinstance(saved, str) else saved, "optim_skipped")
        except SchemaError as error:
            raise CheckpointError(
                f"the checkpoint's count of skipped steps is damaged: {error}; take another one"
            ) from error


def spoiled_text(step: int, loss: float) -> str:
    """Why an update was left out."""
    return f"a gradient of step {step} is no number" if math.isfinite(loss) else f"the loss of step {step} is {loss}"
