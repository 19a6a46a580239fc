"""One optimizer step on a rank, in parts and with gradients that others hold."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime import run_threads
from autopar.runtime.comm.calls import Handle
from autopar.runtime.comm.comm import Comm
from autopar.runtime.update.update import Updater
from autopar.runtime.update.update_rule import UpdateRule

ADAM = functools.partial(torch.optim.Adam, lr=0.1)
NAMES = ["a", "b", "c"]


def updater(comm: Comm, rule: UpdateRule) -> Updater:
    own = {name: nn.Parameter(torch.ones(4)) for name in NAMES}
    return Updater(rule, own, dict.fromkeys(NAMES, (1, torch.float32)), NAMES, comm)


def test_settings_are_numbers_wherever_the_host_has_them() -> None:
    """A learning rate that is a tensor may be another one on some rank as any may."""

    def body(comm: Comm) -> list[float]:
        made = updater(comm, UpdateRule(functools.partial(torch.optim.SGD, lr=torch.tensor(0.5), momentum=0.25)))
        made.optimizers[0].param_groups[0]["lr"].fill_(0.75)
        return made.settings()

    assert {0.75, 0.25} <= {*run_threads(1, {"dp": 1}, body)[0]}


def test_every_part_updates_its_own_parameters_once() -> None:
    """A parameter that a part has not brought in has no gradient meanwhile: it would be updated once per part."""

    def body(comm: Comm) -> None:
        one = updater(comm, UpdateRule(ADAM))
        brought: list[dict[str, bool]] = []

        def bring(names: Sequence[str]) -> Any:
            brought.append({name: p.grad is not None for name, p in one.own.items()})
            return nullcontext()

        one.parts, one.bring = [["a"], ["b", "c"]], bring
        grads = {name: torch.full((4,), 2.0) for name in NAMES}
        assert one.step(grads, Handle(None, torch.zeros(())))
        assert brought == [{"a": True, "b": False, "c": False}, {"a": False, "b": True, "c": True}]
        for name, parameter in one.own.items():
            assert one.state_of(name)["step"] == 1
            torch.testing.assert_close(parameter.detach(), torch.full((4,), 0.9))
            assert parameter.grad is grads[name]

    run_threads(1, {"dp": 1}, body, timeout_s=30)


def test_what_is_copied_before_it_is_changed_is_let_go_at_once() -> None:
    """The step needs room for one copy more than there are gradients, not for one of each."""

    def body(comm: Comm) -> None:
        one = updater(comm, UpdateRule(ADAM, clip_value=0.5))
        grads = {name: torch.full((4,), 2.0) for name in NAMES}
        originals = [weakref.ref(grad.untyped_storage()) for grad in grads.values()]
        alive: list[int] = []

        class Counted(dict[str, Tensor]):
            def __setitem__(self, name: str, value: Tensor) -> None:
                super().__setitem__(name, value)
                alive.append(sum(ref() is not None for ref in originals))

        counted = Counted(grads)
        grads.clear()
        assert one.step(counted, Handle(None, torch.zeros(())), borrowed=NAMES)
        assert alive[-1] <= 1
        assert all((grad == 0.5).all() for grad in counted.values())

    run_threads(1, {"dp": 1}, body, timeout_s=30)
