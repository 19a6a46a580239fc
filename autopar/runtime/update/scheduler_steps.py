"""One step of a learning-rate scheduler, which some want to be told how well training goes.

    scheduler.step()                 nearly all of torch's
    scheduler.step(metrics=loss)     ReduceLROnPlateau, and any other whose `step` has a parameter of one of METRICS

What is told is the loss of the step, the same number on every rank. A `step` that asks for more cannot be called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..errors import RuntimeProgramError

METRICS = ("metrics", "metric", "loss")


def metric_name(scheduler: Any) -> str | None:
    """The parameter of a scheduler's `step` that takes the loss. Raises RuntimeProgramError where `step` wants something that
    nobody knows."""
    parameters = inspect.signature(scheduler.step).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    metric = next((p.name for p in named if p.name in METRICS), None)
    only_by_place = [p for p in parameters if p.kind is p.POSITIONAL_ONLY]
    unknown = [p.name for p in (*only_by_place, *named) if p.default is p.empty and p.name != metric]
    if unknown:
        raise RuntimeProgramError(
            f"{type(scheduler).__name__}.step wants {', '.join(unknown)}; a scheduler is stepped once after every step of its "
            f"optimizer, with the loss of that step where it has a parameter called {' or '.join(METRICS)}, and with nothing "
            "else: give such a one, or a subclass whose step finds the rest by itself"
        )
    return metric


def step_scheduler(scheduler: Any, loss: Callable[[], float]) -> None:
    """Step it. loss: asked for where the scheduler takes it."""
    name = metric_name(scheduler)
    scheduler.step(**({} if name is None else {name: loss()}))


def steps_taken(scheduler: Any) -> tuple[Any, ...]:
    """The counts of steps that a scheduler and those that it is made of hold; torch's ChainedScheduler has none of its own."""
    inner = getattr(scheduler, "_schedulers", ())
    return getattr(scheduler, "last_epoch", None), *(count for one in inner for count in steps_taken(one))
