"""Where a class or a function comes from, as far as it says: one that is made while a program runs may not."""

from __future__ import annotations

import builtins


def module_of(value: object) -> str:
    """The module that a class or function names; none ("") where it names none, or says that it is one of Python's own, which
    Python gives to what is made where no module is."""
    module = getattr(value, "__module__", None)
    if not isinstance(module, str):
        return ""
    name = getattr(value, "__name__", "")
    return "" if module == "builtins" and getattr(builtins, name, None) is not value else module


def package_of(value: object) -> str:
    """The first part of its module's name."""
    return module_of(value).partition(".")[0]


def name_of(value: object) -> str:
    """A class or function in words, as `module.name`; an object without a name by its class."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return ".".join(filter(None, (module_of(named), named.__qualname__)))
