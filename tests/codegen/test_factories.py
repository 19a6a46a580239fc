"""Optimizers and schedulers that a user's script makes, in a program that has no script."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """The script's own words about its factories, which are those of `__main__`."""
    script = types.ModuleType("__main__")
    script.__file__ = str(Path(__file__).with_name("factories_script.py"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "__main__", script)
        exec(compile(Path(script.__file__).read_text(), script.__file__, "exec"), vars(script))
        said: dict[str, Any] = script.told_of_all()
    return said


def called(said: dict[str, Any]) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer that a program makes by what it was told, and the scheduler."""
    scope: dict[str, Any] = {}
    exec(said["text"], scope)
    (module, name, kwargs), *others = said["named"]
    assert module == "user_factories"
    optimizer = scope[name]([torch.nn.Parameter(torch.ones(2))], **kwargs)
    return optimizer, *[scope[one](optimizer, **more) for _, one, more in others]


@pytest.mark.parametrize(
    ("case", "lr"), [("partial", 0.5), ("lambda", 0.25), ("closure", 0.75), ("class", 0.25), ("shadowed", 0.125)]
)
def test_functions_of_the_script_travel_with_what_they_refer_to(told: dict[str, Any], case: str, lr: float) -> None:
    (optimizer,) = called(told[case])
    assert optimizer.param_groups[0]["lr"] == lr


def test_optimizer_and_scheduler_share_what_they_use(told: dict[str, Any]) -> None:
    optimizer, scheduler = called(told["function"])
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [0.0625, 0.125, 0.1875, 0.25, 0.25]
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.75)
    assert optimizer.param_groups[0]["weight_decay"] == 2.0
    assert told["function"]["text"].count("RATE = 0.25") == 1


def test_what_can_be_imported_is_named_and_not_copied(told: dict[str, Any]) -> None:
    assert told["of torch"]["text"] == ""
    assert [module for module, *_ in told["of torch"]["named"]] == ["torch.optim.adamw", "torch.optim.lr_scheduler"]


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (
            "tensor",
            "the optimizer factory cannot be written to a program: it uses HELD, which is a Tensor; use functools.partial",
        ),
        ("decorated", "it is a _lru_cache_wrapper"),
        ("positional", "positional arguments"),
    ],
)
def test_what_cannot_travel_is_named(told: dict[str, Any], case: str, says: str) -> None:

    assert re.search(says, told[case]["error"])
