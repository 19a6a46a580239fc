"""The plans that are predicted to beat a layout: the nearest to it, and the best.

Candidates are answers of the search: with one decision of the layout left to it and the others held, and with all of them left to
it. All are met by the same request under other options, so that one capture serves them. The nearest is the one that changes the
fewest decisions, and of these the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.compiled import Compiled
from autopar.errors import AutoparError
from autopar.exchange.from_plan import layout_of
from autopar.exchange.layout import Layout
from autopar.exchange.to_options import options_of
from autopar.options import Options
from autopar.report.answer import over_bytes
from autopar.request import Request

FASTER = 0.01
"""Relative; plans that are faster by less are as good."""
DECISIONS = ("tp", "cp", "ep", "pp", "virtual_stages", "schedule", "zero", "sequence_parallel", "recompute", "offload")
"""Fields of a layout that are decided, beside the number of microbatches."""
LEFT = ("dp", "replicas", "micro_batch")
"""Fields that follow from these."""


@dataclass(frozen=True)
class Better:
    """A plan that beats a layout. degrees: ranks by kind of parallelism; changes: fields of the layout, as they were priced and
    as the plan has them; also: what the plan does beside, which no field says."""

    program: Compiled
    degrees: Mapping[str, int]
    changes: Mapping[str, tuple[Any, Any]]
    also: tuple[str, ...]

    @property
    def decisions(self) -> int:
        """The number of decisions that are others."""
        return sum(name not in LEFT for name in self.changes) + len(self.also)

    @property
    def step_s(self) -> float:
        """The predicted seconds of a step."""
        return self.program.predicted.step_time_s


def better_plans(
    program: Compiled, layout: Layout, given: Options, compile_again: Callable[[Request], Compiled]
) -> tuple[Better, Better] | None:
    """(the nearest, the best) of the plans that beat a layout; None where there is none.

    program: compiled under the layout; given: the options of the model beside it, whose memory the plans keep to; compile_again:
    meets a request.
    """
    candidates = _candidates(program.request, layout, given, compile_again)
    found = [_compared(other, program) for other in candidates if _beats(other, program, given)]
    if not found:
        return None
    return min(found, key=lambda one: (one.decisions, one.step_s)), min(found, key=lambda one: one.step_s)


def _candidates(
    request: Request, layout: Layout, given: Options, compile_again: Callable[[Request], Compiled]
) -> Iterator[Compiled]:
    """The programs of all options under which there is a plan."""
    for options in (*_one_decision_free(layout, given), _all_free(layout, given)):
        try:
            yield compile_again(replace(request, options=options))
        except AutoparError:  # nothing fits so
            continue


def _one_decision_free(layout: Layout, given: Options) -> tuple[Options, ...]:
    """The options of a layout in which the search decides one thing."""
    held = replace(options_of(layout, given), memory_bytes=given.memory_bytes)
    free = [
        replace(held, recompute="auto"),
        replace(held, offload="auto"),
        replace(held, microbatches=None),
        replace(held, strategy="auto"),
    ]
    return (*free, *([replace(held, schedule="auto", chunks=None)] if layout.pp > 1 else []))


def _all_free(layout: Layout, given: Options) -> Options:
    return replace(given, precision=layout.precision or None, explain_s=0.0)


def _beats(other: Compiled, program: Compiled, given: Options) -> bool:
    """Whether a plan fits, and is faster or has what it beats not fit."""
    faster = other.predicted.step_time_s < program.predicted.step_time_s * (1 - FASTER)
    return over_bytes(other, given) <= 0 and (faster or over_bytes(program, given) > 0)


def _compared(other: Compiled, program: Compiled) -> Better:
    """A plan against the one that the layout was priced with."""
    (own, beside), (priced, beside_priced) = layout_of(other), layout_of(program)
    both = {name: (getattr(priced, name), getattr(own, name)) for name in (*DECISIONS, *LEFT)}
    both["microbatches"] = program.plan.microbatches, other.plan.microbatches
    changes = {name: (before, after) for name, (before, after) in both.items() if before != after}
    said = {one.what for one in beside_priced}
    degrees = {
        name: size for name in ("dp", "tp", "pp", "cp", "ep") if (size := getattr(own, name)) > 1 or name == "dp"
    }
    return Better(other, degrees, changes, tuple(one.what for one in beside if one.what not in said))
