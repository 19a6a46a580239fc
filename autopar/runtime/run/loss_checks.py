"""Losses that are not as they should be. One that is no number ends the run, takes it back to the last saved step and past the
batches since, or has had its update left out. One far above those before it takes the run back, too:

    spike:  loss > factor × median of the last WINDOW losses,  once there are LEAST of them

The median does not follow single outliers, as a mean would. Where it is not positive a factor of it means nothing, and nothing is
a spike.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from ..data.schema import listed, text
from ..errors import RankError, RuntimeProgramError
from ..step.session import Session
from ..update.skips import spoiled_text
from .rank_consistency import not_finite
from .saving import Saving, last_good_step
from .train_loop import Done, Listener, Loop, tell

WINDOW = 64
"""The number of losses in a window."""
LEAST = 16
MOST_REWINDS = 3
"""The most rewinds in a row, without a new saved step between them."""


class LossChecks(Listener):
    """The answer to such losses, the same on all ranks."""

    def __init__(self, session: Session, saving: Saving, on_nan: str, spike: float) -> None:
        """on_nan: "stop", "rewind" or "skip"; spike: times the median above which a loss is one (0: none is)."""
        self._session, self._saving, self._on_nan = session, saving, on_nan
        self._losses = Losses(spike)
        self._rewinds, self._skipped = 0, 0
        self._saved: int | None = None

    def on_loss(self, loop: Loop, done: Done) -> bool:
        """Whether something was done about a step's loss. Raises RankError, RuntimeProgramError and CheckpointError."""
        step, loss = done.step, done.loss
        assert loss is not None
        if done.not_finite or done.skips == 2:
            self._name_spoiled(step)
        if done.not_finite:
            self._skipped += 1
            tell(self._session.comm, f"{spoiled_text(step, loss)}: its update is skipped, {self._skipped} so far")
        elif not math.isfinite(loss):
            self._not_finite(loop, step, loss)
        elif (median := self._losses.spike(loss)) is not None:
            above = f"above {self._losses.factor:g} times the median {median:.6g} before it"
            self._rewind(loop, step, f"{loss:.6g}, {above}")
        else:
            return False
        return True

    def _not_finite(self, loop: Loop, step: int, loss: float) -> None:
        """Stop, or go back. Nothing is saved of what came of it."""
        if self._on_nan != "stop":
            self._rewind(loop, step, str(loss))
            return
        self._saving.settle()
        self._session.settle("at a loss that is no number")
        good = self._saving.saver.saved
        raise RuntimeProgramError(
            f"the loss of step {step} is {loss}; the last saved step is {'none' if good is None else good}. "
            "--on-nan rewind goes back to it and on with other batches"
        )

    def _name_spoiled(self, step: int) -> None:
        """Raises RankError where the batches or the parameters of a rank are why a loss is no number."""
        self._session.settle("at a loss that is no number")
        everyone = self._session.comm.share(not_finite(self._session), listed(text()))
        ranks = [rank for rank, names in enumerate(everyone) if names]
        if ranks:
            said = "; ".join(f"rank {rank}: {', '.join(everyone[rank][:4])}" for rank in ranks[:4])
            raise RankError(
                f"step {step}: there are parameters with entries that are no numbers ({said}), so no later step can be one; the "
                f"last saved step is {self._saving.saver.saved}, the same command goes on from there",
                ranks,
            )

    def _rewind(self, loop: Loop, step: int, loss: str) -> None:
        """Back to the last saved step, and past the batches since. Raises RuntimeProgramError."""
        self._saving.settle()
        good = self._saving.saver.saved
        self._rewinds = self._rewinds + 1 if good == self._saved else 1
        self._saved = good
        if self._rewinds > MOST_REWINDS:
            raise RuntimeProgramError(
                f"the loss of step {step} is {loss}, after {MOST_REWINDS} rewinds since the last saved step ({good}): other "
                "batches do not mend it"
            )
        found = last_good_step(self._saving.saver.directory, self._session)
        if found is None:
            raise RuntimeProgramError(f"the loss of step {step} is {loss}, and no step is saved yet to go back to")
        tell(self._session.comm, f"step {step}: the loss is {loss}; back to step {found.step}, past the batches since")
        self._saving.resume(found)
        loop.go_to(self._session.rt.step, loop.position)


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
