"""How parameters follow from their gradients, as the user says it: optimizer, scheduler, clipping, loss scaling.

An optimizer factory is called on every rank with *all* trained parameters of the program (those that get a gradient), in
the model's order: this rank's shards, and for the parameters of other stages stand-ins without elements that never get a
gradient. So the factory sees the same names everywhere, parameter groups have the same members on every rank and under
every plan, and none is ever empty.

    params ->            functools.partial(torch.optim.AdamW, lr=1e-3)          a list of parameters
    named_parameters ->  def groups(named_parameters): …                        a list of (name, parameter)

A factory takes names when its first parameter is called `named_parameters` (or `named`). It returns an optimizer, or
several (Muon for the matrices, AdamW for the rest). Shards keep their number of dims, not their sizes: choose groups by
name or `p.ndim`. What no optimizer takes stays as it is, as in a training loop of one's own.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import nn

from ..data.fields import Form
from ..data.origin import package_of
from ..data.schema import choice, either, integer, is_number, parsed, positive, where
from ..errors import RuntimeProgramError

OptimizerFactory = Callable[..., Any]
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]
Named = list[tuple[str, nn.Parameter]]
NAMED = ("named_parameters", "named")
WHOLE_TENSOR_OPTIMIZERS = ("Adafactor", "Muon")
"""Names of torch's optimizers whose update of a parameter needs all of it."""
REFUSED_OPTIMIZERS = {
    "LBFGS": "it evaluates the model several times per step through a closure, which a compiled step cannot",
    "SparseAdam": "it takes sparse gradients, those of a compiled program are dense; use Adam",
}
"""Names of torch's optimizers that cannot train a compiled program, and why."""

_INFINITE = parsed(lambda _: math.inf, choice(("inf",)))
_NORM_TYPE = Form(
    either((str, _INFINITE), (object, positive()), what="a number or inf"), lambda p: "inf" if math.isinf(p) else p
)
"""The p of a norm; JSON has no infinity."""
_ABOVE_ONE = where(lambda x: is_number(x, 1, 1e30) and x > 1, "a number above 1")
_BETWEEN = where(lambda x: is_number(x, 0, 1) and 0 < x < 1, "a number between 0 and 1")


@dataclass(frozen=True)
class ClipNorm:
    """Scale all gradients so that their global norm is at most max_norm (as torch.nn.utils.clip_grad_norm_).

    norm_type: the p of the norm, math.inf for the largest absolute value.
    """

    max_norm: Annotated[float, positive()]
    norm_type: Annotated[float, _NORM_TYPE] = 2.0


@dataclass(frozen=True)
class LossScaling:
    """Dynamic loss scaling as torch.amp.GradScaler does it: backward starts from `initial` instead of 1; a step in which
    a gradient overflows on any rank is skipped on all and multiplies the scale by `backoff` (down to 2**-24, which torch has
    not), `interval` steps without one by `growth`. The 20th such step in a row ends the run."""

    initial: Annotated[float, positive(3.4e38)] = 65536.0
    growth: Annotated[float, _ABOVE_ONE] = 2.0
    backoff: Annotated[float, _BETWEEN] = 0.5
    interval: Annotated[int, integer(1, 1 << 53)] = 2000


@dataclass(frozen=True)
class UpdateRule:
    """Everything between reduced gradients and updated parameters.

    scheduler(optimizer) is stepped once after every step that was not skipped (with the loss, where it takes one).
    clip_value: gradients are clamped to ±clip_value. compensated: gradients of many microbatches are added with a
    compensation of what rounding loses (one more buffer per gradient while they are added).
    """

    optimizer: OptimizerFactory | None = None
    scheduler: SchedulerFactory | None = None
    clip_norm: ClipNorm | None = None
    clip_value: float | None = None
    loss_scaling: LossScaling | None = None
    compensated: bool = False

    @property
    def changes_gradients(self) -> bool:
        """Whether gradients are written to before the optimizer sees them: those that others may hold are copied first."""
        return self.clip_norm is not None or self.clip_value is not None or self.loss_scaling is not None


def as_rule(rule: UpdateRule | OptimizerFactory | None) -> UpdateRule:
    """A rule, or the rule of a bare optimizer factory."""
    return rule if isinstance(rule, UpdateRule) else UpdateRule(rule)


def takes_names(factory: OptimizerFactory) -> bool:
    """Whether an optimizer factory wants (name, parameter) pairs."""
    try:
        first = next(iter(inspect.signature(factory).parameters), "")
    except (TypeError, ValueError):
        return False
    return first in NAMED


def make_optimizers(factory: OptimizerFactory, named: Named) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that a factory makes of the program's trained parameters. Raises RuntimeProgramError when it is no
    optimizer."""
    result = factory(list(named) if takes_names(factory) else [parameter for _, parameter in named])
    optimizers = tuple(result) if isinstance(result, Sequence) else (result,)
    wrong = [one for one in optimizers if not isinstance(one, torch.optim.Optimizer)]
    if wrong or not optimizers:
        kind = type(wrong[0]).__name__ if wrong else "an empty list"
        raise RuntimeProgramError(f"the optimizer factory must return a torch.optim.Optimizer or several, not {kind}")
    names = {id(parameter): name for name, parameter in named}
    seen: set[int] = set()
    for one in optimizers:
        for parameter in (p for group in one.param_groups for p in group["params"]):
            if id(parameter) not in names:
                raise RuntimeProgramError(
                    f"the optimizer factory gave {type(one).__name__} a parameter of shape {tuple(parameter.shape)} that it "
                    "did not get: use the parameters that it is called with (they are this rank's shards), not the model's"
                )
            if id(parameter) in seen:
                raise RuntimeProgramError(f"{names[id(parameter)]} is in two optimizers; give it to one")
            seen.add(id(parameter))
    return optimizers


def stand_in(ndim: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter of another rank: as many dims, no elements (one where there is no dim), never a gradient."""
    return nn.Parameter(torch.zeros((0,) * ndim, dtype=dtype, device=device))


def norm_power(norm_type: float) -> tuple[str, float]:
    """How norms of parts add up to that of the whole: the reduction, and the power that they are added in."""
    return ("max", 1.0) if math.isinf(norm_type) else ("sum", norm_type)


def check_sharded(optimizer: torch.optim.Optimizer, cut: Sequence[str]) -> None:
    """Whether an optimizer updates these parameters rightly, of which a rank has shards. Raises RuntimeProgramError for one of
    torch that needs whole tensors; warns of one that is not torch's."""
    kind = type(optimizer).__name__
    if cut and kind in (*WHOLE_TENSOR_OPTIMIZERS, *REFUSED_OPTIMIZERS):
        raise RuntimeProgramError(
            f"{kind} needs whole tensors, but the plan shards {len(cut)} of them ({cut[0]}, …); use an elementwise "
            "optimizer such as AdamW, or a plan with replicated parameters"
        )
    if cut and package_of(type(optimizer)) != "torch":
        warnings.warn(f"{kind} runs on shards of parameters: correct only if it is elementwise", stacklevel=5)
