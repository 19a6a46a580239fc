"""How many microbatches to try, and the task of one microbatch for each count."""

from __future__ import annotations

from collections.abc import Callable

from autopar.passes.search.task import Task
from autopar.passes.shard.meshes import odd_part

MOST_GROUPS = 64
"""Groups of ranks that a pipeline has at most."""
_PER_GROUP = 16
"""Microbatches per group of ranks that are tried at most: more hardly make the bubble smaller."""

Worth = Callable[[int, int], bool]
"""Whether a number of microbatches is worth a look, by the program of a smaller one; where one is not, no larger one is."""


class TasksByCount:
    """The tasks of one request by microbatch count.

    task: of the request as it stands: the whole batch, or one microbatch where the options fix their number. batch: size
    of the whole batch.
    """

    def __init__(self, task: Task, batch: int) -> None:
        self.task, self.batch = task, batch
        self._tasks: dict[int, Task] = {}

    def copy(self) -> TasksByCount:
        """The same tasks; which of them are replaced in the copy does not matter to the original."""
        copy = TasksByCount(self.task, self.batch)
        copy._tasks = dict(self._tasks)
        return copy

    def at(self, M: int) -> Task:
        """The task for M microbatches. Raises CoupledError, InputError where the batch cannot be cut so."""
        if M not in self._tasks:
            self._tasks[M] = self.task.at(M)
        return self._tasks[M]

    def replace(self, M: int, task: Task) -> bool:
        """Plan this task for M microbatches from here on. Whether it was another one before."""
        changed = self._tasks.get(M) is not task
        self._tasks[M] = task
        return changed

    def counts(self, worth: Worth = lambda smaller, M: True) -> list[int]:
        """The microbatch counts in which stages are tried: one, unless the options fix the number, and several. The program is
        divided for those alone that are worth it, and for the first."""
        several = microbatch_counts(self.task, self.batch, worth)
        return several if self.task.options.microbatches is not None else sorted({1, *several})


def microbatch_counts(task: Task, batch: int, worth: Worth = lambda smaller, M: True) -> list[int]:
    """Counts to try: the forced one, or divisors of the batch from 2 on that it can be cut into, at most one per doubling, as
    long as they are worth it.

    Where the number of ranks has an odd part, multiples of that are tried as well, also one per doubling: of a batch of 96,
    3 microbatches are 32 samples each, which divide among the ranks of a submesh that is a power of two.
    """
    if task.options.microbatches is not None:
        return [task.options.microbatches]
    most = min(batch, _PER_GROUP * (task.options.pp or min(task.cluster.size, MOST_GROUPS)))
    odd = odd_part(task.cluster.size)
    steps = (1, odd) if odd > 1 else (1,)
    counts = {M for step in steps for M in _doubling(task, batch, most, step, worth)}
    return sorted(counts) or [1]


def _doubling(task: Task, batch: int, most: int, step: int, worth: Worth) -> list[int]:
    """Divisors of the batch that are multiples of `step`, from 2 on and up to `most`, at most one per doubling."""
    counts: list[int] = []
    for divisor in (d for d in range(step, most + 1, step) if d > 1 and batch % d == 0):
        if counts and not worth(counts[0], divisor):
            break
        if (not counts or divisor >= 2 * counts[-1]) and task.batches.may_be(divisor):
            counts.append(divisor)
    return counts
