"""The differential suite: small models of every kind × sets of options, against an eager loop that shares no code with us.

Every combination must either equal eager (losses of three steps, parameters and buffers after them, float64, 1e-9) or be
refused by a named error. `outcome` runs one.
"""

from __future__ import annotations

import copy
import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import autopar
from tests.differential import layers, losses, terms
from tests.differential.cases import Case
from tests.differential.eager import LR, MOMENTUM, STEPS, difference, trained

TOLERANCE = 1e-9
RANKS = 4
OPTION_SETS: dict[str, dict[str, Any]] = {
    "auto": {},
    "microbatches=4": {"microbatches": 4},
    "pp=2": {"pp": 2},
    "dp2×tp2": {"mesh": {"dp": 2, "tp": 2}},
    "recompute=full": {"recompute": "full"},
    "random plan": {},
}
OPTIMIZER = functools.partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM)


@dataclass(frozen=True)
class Outcome:
    """kind: "equal", "differs" or "refused". what: the difference, or the error."""

    kind: str
    what: str


def all_cases() -> list[Case]:
    """Every case, under a name of its own."""
    cases = [*losses.cases(), *terms.cases(), *layers.cases()]
    assert len({case.name for case in cases}) == len(cases)
    return cases


@functools.cache
def by_name() -> dict[str, Case]:
    return {case.name: case for case in all_cases()}


@functools.lru_cache(maxsize=2)
def eager(name: str, pieces: int = 1) -> dict[str, Tensor]:
    """The losses and parameters of the model after training in eager PyTorch."""
    case = by_name()[name]
    return trained(model_of(name), [case.batch(seed) for seed in range(STEPS)], case.loss, pieces)


def model_of(name: str) -> torch.nn.Module:
    """The case's model, in float64, the same each time."""
    torch.manual_seed(0)
    return by_name()[name].make().double()


def outcome(name: str, options: str) -> Outcome:
    """The outcome of one combination of a case and options."""
    case, model = by_name()[name], model_of(name)
    batches = [case.batch(seed) for seed in range(STEPS)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = autopar.compile(
                copy.deepcopy(model),
                autopar.ClusterSpec.local(RANKS),
                batches[0],
                loss_fn=case.loss,
                optimizer=OPTIMIZER,
                options=autopar.Options(**OPTION_SETS[options]),
            )
            if options == "random plan":
                program = program.with_plan(autopar.random_plan(program, len(name)))
        except autopar.AutoparError as error:
            return Outcome("refused", f"{type(error).__name__}: {error}")
        result = program.run(batches)
    worst = difference(values_of(result), eager(name))
    return Outcome("equal" if worst <= TOLERANCE else "differs", f"{worst:.1e} {program.plan.show_meshes()}")


def values_of(result: autopar.RunResult) -> dict[str, Tensor]:
    """The losses and parameters of a program after its steps, named as `trained` names them."""
    return {f"loss {k}": loss.reshape(()).double() for k, loss in enumerate(result.losses)} | result.state
