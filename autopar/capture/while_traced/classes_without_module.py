"""Classes that name no module get one while they are traced: torch.export writes it beside every node, and adds to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

NOWHERE = "nowhere"


@contextmanager
def classes_named(model: nn.Module) -> Iterator[None]:
    """Within the context every module's class says that it is of some module."""
    nameless = {cls: cls.__module__ for cls in map(type, model.modules()) if not isinstance(cls.__module__, str)}
    for cls in nameless:
        cls.__module__ = NOWHERE
    try:
        yield
    finally:
        for cls, was in nameless.items():
            cls.__module__ = was
