"""Errors of running programs. They name the rank, the group, the collective and the place in the emitted code."""

from __future__ import annotations

from collections.abc import Sequence


class RuntimeProgramError(RuntimeError):
    """A running program was used wrongly or cannot continue; the message says what to change."""


class GuardError(RuntimeProgramError):
    """The data are not what the program was compiled for: another shape or dtype, an index outside its table, or a
    condition that goes another way than in the example."""


class ExpertOverflow(RuntimeProgramError):
    """A rank is to compute more rows for its experts than memory is promised for. Every rank of the axis raises it; on a device
    that the host runs ahead of every rank, before the update."""


class CollectiveMismatch(RuntimeProgramError):
    """Ranks of one group called different collectives, or in different order, or with different shapes."""


class CollectiveTimeout(RuntimeProgramError):
    """A rank waited for others that did not come in time, or that can never come."""


class RankError(RuntimeProgramError):
    """Some ranks are not as the others are. ranks: which."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class TooManySkips(RuntimeProgramError):
    """The updates of too many steps in a row were left out. Every rank raises it, after the same step."""


class CheckpointError(RuntimeProgramError):
    """A checkpoint does not fit the program that loads it."""
