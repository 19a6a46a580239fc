"""Named errors. Each message says what was wrong, where in the user's code, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.passes.search.refused.changes import Change
    from autopar.passes.search.refused.shortage import MemoryShortage


class AutoparError(Exception):
    """Base of every error that a user of autopar can cause."""


class InputError(AutoparError):
    """The arguments of `compile` do not fit together (model, example inputs, loss, options)."""


class CaptureError(AutoparError):
    """The model cannot be captured as a graph; the message names the source line and the usual fix."""


class ClusterError(AutoparError):
    """A cluster description is incomplete, inconsistent, or too small for what is asked."""


class PlanError(AutoparError):
    """A plan is corrupt, or belongs to another model or cluster."""


class ConstraintError(AutoparError):
    """A constraint matches nothing, or cannot be met on this mesh."""


class InfeasibleError(AutoparError):
    """Nothing fits: the message says what is short, by how much, and what would fit.

    shortage: the smallest plan's bytes per rank, by kind, against the limit; None where what is short is not memory.
    alternatives: the nearest changes under which a plan was found, each with its predicted step time and peak.
    """

    shortage: MemoryShortage | None = None
    alternatives: tuple[Change, ...] = ()


class NoRoomError(InfeasibleError):
    """It is memory that is short: on the device, or in the tiers that a plan is to use."""


class MemoryLimitError(AutoparError):
    """A running program asked for more memory than the limit that it is held to; the message says who, and how much."""


class ShardingError(AutoparError):
    """A spec or strategy is not valid for a tensor or an op."""


class CheckError(AutoparError):
    """The checker found a lowered program that does not compute what the plan says (a bug in autopar)."""


class EmitError(AutoparError):
    """A program cannot be written to files (for example an optimizer that has no importable name)."""
