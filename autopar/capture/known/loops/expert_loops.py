"""Modules of the user's that loop over the experts which a batch chose, traced as one mixture.

No class is known by its name. A module that cannot be captured and has a container of like modules is run on numbers; what it
computes is concluded from that run (`routing.py`), and while it is traced its own forward is repeated along the record, with one
mixture in the place of the loop: the router, shared experts, and what is computed beside and behind stay the user's own code.
Like any known forward it is proven equal before it is used, in values, gradients, and in which gradients there are.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.examples.trees import flatten
from autopar.capture.known.equal_forwards import Given, RandomModule, divisor_of
from autopar.capture.known.known_blocks import Known, below, facts_of, forward_class
from autopar.capture.known.loops.like_experts import Form, can_be_grouped, form_of, like_ones, mixture_of
from autopar.capture.known.loops.recorded import NotThisWay, Repeating, Stopped, along, only_tensors
from autopar.capture.known.loops.routing import Place, Routing, concluded

ALL, LITTLE = 1 << 62, 0.25


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop that is understood. form: of its experts; None: any Linears."""

    routing: Routing
    form: Form | None


class Loops:
    """The loops that were understood, by what they depend on: class, sizes and shapes."""

    def __init__(self) -> None:
        self._found: dict[str, Loop | None] = {}

    def of(self, module: nn.Module, args: Any, kwargs: Any) -> Loop | None:
        """The loop in the forward of a module that is given these arguments, None where none is understood."""
        tensors, _, structure = flatten((args, kwargs))
        given = Given(tuple(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors), structure)
        key = repr((forward_class(module), module.training, facts_of(module, given)))
        if key not in self._found:
            with ThreadPoolExecutor(1) as alone:  # in a thread of its own no mode of the trace is seen
                self._found[key] = alone.submit(_understood, module, given).result()
        return self._found[key]


def _understood(module: nn.Module, given: Given) -> Loop | None:
    number = len(like_ones(module))
    try:
        random = RandomModule(module, given, below(number), divisor_of(module), most_rows=ALL)
        own = forward_class(module).forward

        def run() -> Any:
            copied, tensors, forward = random.on_numbers(own, uneven)
            return like_ones(copied), tensors, forward

        uneven = [_uneven(t, i) for i, t in enumerate(random.first)]
        routing = concluded(run, number)
        if routing is None:
            return None
        form = form_of(like_ones(random.module)[0])
    except Exception:  # a forward that does not run on numbers, or whose own code notices that it is recorded
        return None
    return Loop(routing, form) if form is not None or can_be_grouped(like_ones(module)[0]) else None


def _uneven(t: Tensor, seed: int) -> Tensor:
    """Rows of which three in four are much alike, so that some experts have more than they may take."""
    if not t.is_floating_point() or t.ndim < 2:
        return t
    generator = torch.Generator().manual_seed(seed)
    rows = t.reshape(-1, t.shape[-1]).clone()
    alike = rows[: 3 * len(rows) // 4]
    alike.mul_(LITTLE).add_(torch.randn(t.shape[-1], generator=generator, dtype=t.dtype))
    return rows.view_as(t)


_LOOPS = Loops()


def has_experts(module: nn.Module) -> bool:
    """Whether a module that has a forward, and none below it that has one, has a container of like modules."""
    parts = [part for part in module.modules() if part is module or _has_forward(part)]
    return _has_forward(module) and [part for part in parts if like_ones(part)] == [module]


def _has_forward(module: nn.Module) -> bool:
    plain = (nn.Module, nn.ModuleList, nn.ModuleDict)
    return forward_class(module) not in plain


def applies(self: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """Whether the forward of a module that is given these arguments is a loop over experts that is understood."""
    return _LOOPS.of(self, args, kwargs) is not None


def experts_of_a_loop(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward, with one mixture in the place of its loop."""
    return _repeated(self, args, kwargs, to_choices=False)


def chosen_experts(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """(…, choices): which expert takes each row."""
    return _repeated(self, args, kwargs, to_choices=True)


def _repeated(module: nn.Module, args: Any, kwargs: Any, to_choices: bool) -> Any:
    loop = _LOOPS.of(module, args, kwargs)
    assert loop is not None
    given, experts, routing = flatten((args, kwargs))[0], like_ones(module), loop.routing
    places = [place for place in (routing.rows, routing.chosen, routing.weights.place) if place is not None]

    def of(place: Place) -> Tensor:
        at, i = place
        return given[i] if at < 0 else only_tensors(mode.results[at])[i]

    def total(like: Tensor | int) -> Tensor:
        chosen = routing.choices(of, len(experts))
        y = mixture_of(experts, loop.form, of(routing.rows), chosen, routing.shares(of, chosen, len(experts)))
        if isinstance(like, Tensor):
            return y.reshape(like.shape)
        if like in (2, y.ndim):
            return y if like == y.ndim else y.flatten(0, -2)
        lead = next((t.shape[:-1] for t in given if t.ndim == like), None)
        if lead is None:
            raise NotThisWay
        return y.reshape(*lead, -1)

    stop = max(routing.rows[0], routing.chosen[0]) + 1 if to_choices else len(routing.entries)
    mode = Repeating(routing.entries, [at for at, _ in places], total, stop)
    try:
        with along(mode, experts):
            result = forward_class(module).forward(module, *args, **kwargs)
    except Stopped:
        return routing.choices(of, len(experts))
    return routing.choices(of, len(experts)) if to_choices else result


def _numbers(module: nn.Module, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return below(len(like_ones(module)))(module, shape, generator)


LOOPS = (Known(has_experts, experts_of_a_loop, _numbers, chosen=chosen_experts, applies=applies),)
"""The known forwards that stand for modules that loop over experts."""
