"""Optimizers and schedulers as a manifest names them: by module and name, with keyword arguments.

A manifest alone makes nobody import anything: a module other than those of torch.optim has to be imported by a file that the
user runs, the directory's run.py (the compiler writes the import there) or the script that calls `load`.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch

from ..data.datafile import read_text
from ..data.fields import Identifier, Length
from ..data.schema import SchemaError, is_identifier, parsed, positive
from ..errors import RuntimeProgramError
from ..update.update_rule import ClipNorm, LossScaling, UpdateRule
from .batches import module_of


def _module(name: str) -> str:
    if not all(part.isidentifier() for part in name.split(".")):
        raise SchemaError(f"{name!r} is no name of a module")
    return name


USER_FACTORIES = "user_factories"
"""The module of a program's directory with functions of the script that it was compiled in."""


@dataclass(frozen=True)
class NamedFactory:
    """A class or function that makes an optimizer or a scheduler."""

    module: Annotated[str, parsed(_module)]
    name: Identifier
    kwargs: Annotated[Mapping[Identifier, Any], Length(most=256)] = field(default_factory=dict)

    def imported(self, directory: Path) -> functools.partial[Any]:
        """The factory itself. directory: of the program. Raises RuntimeProgramError where nothing that the user runs imports its
        module, or it is not there."""
        own = directory / f"{USER_FACTORIES}.py"
        if self.module == USER_FACTORIES and own.exists():
            module_of(own, USER_FACTORIES)
        by_torch = _is_of(self.module, "torch.optim")
        if not by_torch and not any(_is_of(self.module, known) for known in _imported(directory / "run.py")):
            raise RuntimeProgramError(
                f"{directory / 'manifest.json'} names {self.name} of module {self.module} to train with, which is neither of "
                f"torch.optim nor of a module that the file that is run imports; write `import {self.module}` into that file (or "
                f"into {directory / 'run.py'}) if it is yours"
            )
        try:
            kind = getattr(importlib.import_module(self.module), self.name)
        except (ImportError, AttributeError) as error:
            raise RuntimeProgramError(
                f"{self.name} of module {self.module}, which this program trains with, cannot be imported here ({error}); "
                "install it, or put it on PYTHONPATH"
            ) from error
        if not (callable(kind) and (not by_torch or _is_torch_class(kind))):
            raise RuntimeProgramError(
                f"{self.name} of module {self.module} makes no optimizer and no scheduler; emit the program again"
            )
        return functools.partial(kind, **self.kwargs)


@dataclass(frozen=True)
class NamedRule:
    """An `UpdateRule` in a manifest: the same fields, with factories by name."""

    optimizer: NamedFactory | None = None
    scheduler: NamedFactory | None = None
    clip_norm: ClipNorm | None = None
    clip_value: Annotated[float, positive()] | None = None
    loss_scaling: LossScaling | None = None
    compensated: bool = False

    @property
    def factories(self) -> tuple[NamedFactory, ...]:
        """The factories that there are."""
        return tuple(one for one in (self.optimizer, self.scheduler) if one is not None)

    def imported(self, directory: Path) -> UpdateRule:
        """The rule itself. directory: of the program. Raises RuntimeProgramError."""
        optimizer, scheduler = (
            None if one is None else one.imported(directory) for one in (self.optimizer, self.scheduler)
        )
        _try(optimizer, scheduler)
        return UpdateRule(optimizer, scheduler, self.clip_norm, self.clip_value, self.loss_scaling, self.compensated)


def factory_modules(rule: UpdateRule) -> list[str]:
    """The modules that a program has to import for its update rule."""
    modules = []
    for factory in (rule.optimizer, rule.scheduler):
        while isinstance(factory, functools.partial):
            factory = factory.func
        module = getattr(factory, "__module__", None)
        if factory is not None and isinstance(module, str) and not _is_of(module, "torch.optim"):
            modules.append(USER_FACTORIES if is_of_script(factory) else module)
    return sorted(set(modules))


def is_of_script(factory: Any) -> bool:
    """Whether a class or function has no name under which a program could import it."""
    return not is_identifier(getattr(factory, "__qualname__", "")) or factory.__module__ in (None, "__main__")


def _imported(run: Path) -> Iterator[str]:
    """Names of the modules that run.py and the running script import. Those of Python make no optimizers, and of torch only
    torch.optim does."""
    others = sys.stdlib_module_names | {"torch", "__main__"}
    for name in (*_imports_of(run), *_imports_of_main()):
        if name.partition(".")[0] not in others:
            yield name


def _is_of(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _is_torch_class(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler)


def _imports_of(path: Path) -> Iterator[str]:
    """Modules that a source file imports, read and not run."""
    try:
        tree = ast.parse(read_text(path, 1 << 20))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _imports_of_main() -> Iterator[str]:
    """Modules that the running script has imported, or has something of."""
    for value in list(vars(sys.modules["__main__"]).values()):
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str):
            yield name


def _try(optimizer: functools.partial[Any] | None, scheduler: functools.partial[Any] | None) -> None:
    """Make those of torch once, for a parameter of nobody. Raises RuntimeProgramError where their arguments are wrong."""
    if optimizer is None or not _is_torch_class(optimizer.func):
        return
    try:
        one = optimizer([torch.nn.Parameter(torch.zeros(2, 2))])
        if scheduler is not None and _is_torch_class(scheduler.func):
            scheduler(one)
    except Exception as error:
        raise RuntimeProgramError(
            f"the manifest's optimizer {optimizer.func.__name__} with {json.dumps(optimizer.keywords)[:200]} and its "
            f"scheduler cannot be made: {error}"
        ) from error
