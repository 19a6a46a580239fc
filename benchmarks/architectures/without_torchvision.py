"""The library timm without torchvision: its models need none of that, but its files import names of it.

While timm is imported, `torchvision` is a package in which every name is a class that nobody uses. Afterwards there is none,
as before, so that other libraries go on without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_PARTS = "datasets models models.feature_extraction ops ops.misc transforms transforms.functional utils"
MODULES = ("torchvision", *(f"torchvision.{part}" for part in _PARTS.split()))


class _Unused(type):
    """A class that stands for a name of torchvision, and whose attributes are such classes too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unused(name, (), {})


class _Package(ModuleType):
    """A module in which every name is such a class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unused(name, (), {})


def timm() -> ModuleType:
    """The library timm, whether torchvision is installed or not."""
    if "timm" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return importlib.import_module("timm")
    sys.modules.update({name: _Package(name) for name in MODULES})
    for name in MODULES[1:]:
        package, _, part = name.rpartition(".")
        setattr(sys.modules[package], part, sys.modules[name])
    try:
        return importlib.import_module("timm")
    finally:
        for name in MODULES:
            del sys.modules[name]
