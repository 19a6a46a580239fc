"""Losses of a run as they come: whether one is far above those before it.

    spike:  loss > factor × median of the last WINDOW losses,  once there are LEAST of them

The median does not follow single outliers, as a mean would. Where it is not positive a factor of it means nothing, and nothing is
a spike.
"""

from __future__ import annotations

import statistics
from collections import deque

WINDOW = 64
"""The number of losses in a window."""
LEAST = 16


class Losses:
    """The last losses that were no spikes."""

    def __init__(self, factor: float) -> None:
        """factor: above 1; 0: nothing is a spike."""
        self.factor = factor
        self._last: deque[float] = deque(maxlen=WINDOW)

    def spike(self, loss: float) -> float | None:
        """The median that a finite loss is so far above; None where it is not, and then it counts for those to come."""
        median = statistics.median(self._last) if self.factor and len(self._last) >= LEAST else 0.0
        if median > 0 and loss > self.factor * median:
            return median
        self._last.append(loss)
        return None
