"""user_ops.py of an emitted directory: the source of the user's registered ops that a program uses."""

from __future__ import annotations

import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any

from autopar.codegen.stage import registered_ops
from autopar.errors import EmitError
from autopar.ir.lowered import LoweredProgram
from autopar.ops.custom import USER_FUNCTIONS

IMPORTS = ("import math", "", "import torch", "import torch.nn.functional as F", "from torch import Tensor", "")


def used_ops(lowered: LoweredProgram) -> list[str]:
    """Names of the registered ops that a program uses."""
    return sorted(frozenset[str]().union(*map(registered_ops, lowered.stages)))


def user_ops_source(names: list[str]) -> str:
    """The file. Raises EmitError where the source of an op is not available."""
    sources = (USER_FUNCTIONS[name].source or _source(USER_FUNCTIONS[name].function, name) for name in names)
    return "\n".join([*IMPORTS, *sources]) + "\n"


def user_ops_module(names: list[str]) -> types.ModuleType:
    """The same ops as a module of this process."""
    module = types.ModuleType("user_ops")
    for name in names:
        setattr(module, name, USER_FUNCTIONS[name].function)
    return module


def _source(function: Callable[..., Any], name: str) -> str:
    try:
        lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    except (OSError, TypeError) as error:
        raise EmitError(f"the source of the registered op {name} is not available; define it in a file") from error
    start = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))
    return "\n\n" + "\n".join(lines[start:])
