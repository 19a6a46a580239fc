"""The default device of who calls is no part of what is computed: `with torch.device("meta")` around a model that is
too large to make tends to stand around `compile` as well.

Models are traced on the CPU, optimizers are tried and programs proven there, so every door that makes tensors of its own
opens with the CPU as the default device. What a model makes in forward without naming a device lies where the program runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def with_cpu_as_default(function: Callable[P, R]) -> Callable[P, R]:
    """The function under `torch.device("cpu")`, where another device is the default."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.get_default_device().type == "cpu":
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return run
