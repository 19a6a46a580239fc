"""Named errors. Each message says what was wrong, where in the user's code, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

OptionsT = TypeVar("OptionsT", covariant=True)
ClusterT = TypeVar("ClusterT", covariant=True)


class AutoparError(Exception):
    """Base of every error that a user of autopar can cause."""


class InputError(AutoparError):
    """The arguments of `compile` do not fit together (model, example inputs, loss, options)."""


class CaptureError(AutoparError):
    """The model cannot be captured as a graph; the message names the source line and the usual fix."""


class DataError(CaptureError):
    """A branch, a number or a size of the model depends on the data of a batch."""


class ClusterError(AutoparError):
    """A cluster description is incomplete, inconsistent, or too small for what is asked."""


class PlanError(AutoparError):
    """A plan is corrupt, or belongs to another model or cluster."""


class CoupledError(AutoparError):
    """Microbatches are asked of a program of which an op must see the whole batch; the message names the op."""


class ConstraintError(AutoparError):
    """A constraint matches nothing, or cannot be met on this mesh."""


@dataclass(frozen=True)
class MemoryShortage:
    """Bytes per rank of the smallest plan against the limit. `str` says all of it in words.

    plan: which it is, in words; empty where kinds are a lower bound of any plan. by_kind: "parameters", "gradients",
    "optimizer", "buffers", "held for backward", "for a moment"; they add up to needed_bytes. in_all: bytes of the whole
    model by kind, once. step_time_s: of the smallest plan, if memory were enough; None for a bound.
    """

    ranks: int
    limit_bytes: float
    needed_bytes: float
    by_kind: Mapping[str, float] = field(default_factory=dict)
    in_all: Mapping[str, float] = field(default_factory=dict)
    plan: str = ""
    step_time_s: float | None = None
    words: str = field(default="", repr=False)

    @property
    def short_bytes(self) -> float:
        """The bytes that are missing on a rank."""
        return self.needed_bytes - self.limit_bytes

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class Change(Generic[OptionsT, ClusterT]):
    """A request that can be met: `autopar.compile` with these Options on this ClusterSpec, and a batch of that size.

    kind: "recompute", "microbatches", "offload", "batch" or "ranks". text: what is changed, in words; `str` adds what the
    plan that was found costs.
    """

    kind: str
    text: str
    options: OptionsT
    cluster: ClusterT
    batch: int
    step_time_s: float
    peak_bytes: float
    words: str = field(default="", repr=False)

    def __str__(self) -> str:
        return self.words


class InfeasibleError(AutoparError):
    """Nothing fits: the message says what is short, by how much, and what would fit.

    shortage: the smallest plan's bytes per rank, by kind, against the limit; None where what is short is not memory.
    alternatives: the nearest changes under which a plan was found, each with its predicted step time and peak. smallest: the
    smallest plan, as the search has it; None where no such plan was found. would_fit_bytes: per rank, with which stages that the
    options ask for were estimated to fit. make_program: gives the program under the smallest plan, or under these stages.
    """

    shortage: MemoryShortage | None = None
    alternatives: tuple[Change[Any, Any], ...] = ()
    smallest: Any = None
    would_fit_bytes: float | None = None
    make_program: Callable[[], Any] | None = None

    def report_html(self, path: str | Path) -> Path:
        """Write what does not fit as a page: the smallest plan, what fills its memory, and what would do. Raises EmitError where
        no such plan was found, or the file cannot be written."""
        if self.make_program is None:
            raise EmitError(
                "there is no page of what does not fit, as no smallest plan is known: leave the stages open (pp=)"
            )
        written: Path = self.make_program().report_html(path, refused=self)
        return written


class NoRoomError(InfeasibleError):
    """Memory is short: on the device, or in the tiers that a plan is to use."""


class MemoryLimitError(AutoparError):
    """A running program asked for more memory than the limit that it is held to; the message says who, and how much."""


class ShardingError(AutoparError):
    """A spec or strategy is not valid for a tensor or an op."""


class CheckError(AutoparError):
    """The checker found a lowered program that does not compute what the plan says (a bug in autopar)."""


class EmitError(AutoparError):
    """A program cannot be written to files (for example an optimizer that has no importable name)."""
