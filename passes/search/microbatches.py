"""How many microbatches to try, and the task of one microbatch for each count.

Capturing a model takes seconds, so other counts are priced with programs that are derived from the captured one by
cutting its batch dims. A plan that wins is carried over to the program as captured (`autopar.passes.search.adopted`).
"""

from __future__ import annotations

from autopar.errors import InputError
from autopar.passes.batch.microbatch import in_microbatches
from autopar.passes.batch.rebatch import NoRebatch, rebatch
from autopar.passes.search.task import Capture, Task

MOST_GROUPS = 64
"""Groups of ranks that a pipeline has at most."""
_PER_GROUP = 16
"""Microbatches per group of ranks that are tried at most: more hardly make the bubble smaller."""


class TasksByCount:
    """The tasks of one request by microbatch count.

    task: of the request as it stands: the whole batch, or one microbatch where the options fix their number. batch: size
    of the whole batch. captured(M): the task of the program as captured in M microbatches.
    """

    def __init__(self, task: Task, batch: int, captured: Capture) -> None:
        self.task, self.batch, self.captured = task, batch, captured
        self._priced: dict[int, Task | None] = {}

    def copy(self) -> TasksByCount:
        """The same tasks; which of them are replaced in the copy does not matter to the original."""
        copy = TasksByCount(self.task, self.batch, self.captured)
        copy._priced = dict(self._priced)
        return copy

    def priced(self, M: int) -> Task | None:
        """The task for M microbatches that plans are priced with; None where the batch cannot be cut so."""
        if M not in self._priced:
            self._priced[M] = derived(self.task, M, self.captured)
        return self._priced[M]

    def replace(self, M: int, task: Task) -> bool:
        """Price with this task for M microbatches from here on. Whether it was another one before."""
        changed = self._priced.get(M) is not task
        self._priced[M] = task
        return changed

    def counts(self) -> list[int]:
        """The microbatch counts to try, without those that the batch cannot be cut into."""
        return [M for M in microbatch_counts(self.task, self.batch) if self.priced(M) is not None]


def microbatch_counts(task: Task, batch: int) -> list[int]:
    """Counts to try: the forced one, or divisors of the batch from 2 on, at most one per doubling."""
    if task.options.microbatches is not None:
        return [task.options.microbatches]
    most = min(batch, _PER_GROUP * (task.options.pp or min(task.cluster.size, MOST_GROUPS)))
    counts: list[int] = []
    for divisor in (d for d in range(2, most + 1) if batch % d == 0):
        if not counts or divisor >= 2 * counts[-1]:
            counts.append(divisor)
    return counts or [1]


def derived(task: Task, M: int, captured: Capture) -> Task | None:
    """The task for M microbatches, from the whole batch's program where that is possible; None where the batch cannot be
    cut so. What cannot be derived is captured again only where the options ask for stages."""
    if task.options.microbatches is not None or M == 1:
        return task
    try:
        program = in_microbatches(rebatch(task.program, M, task.rules), task.rules, task.program)
    except NoRebatch:
        try:
            return captured(M) if task.options.pp or task.options.stage_boundaries else None
        except InputError:
            return None
    return task.smaller(program, M)
