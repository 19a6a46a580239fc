"""Where a class or a function comes from, as far as it says: one that is made while a program runs may not."""

from __future__ import annotations

import types
from collections.abc import Iterator

_HEAP_TYPE = 1 << 9
"""Python's flag of classes that are made while a program runs (Py_TPFLAGS_HEAPTYPE)."""


def module_of(value: object) -> str:
    """The module that a class or function names; none ("") where it names none, or says that it is one of Python's own, which
    Python gives to what is made where no module is."""
    module = getattr(value, "__module__", None)
    if not isinstance(module, str):
        return ""
    return "" if module == "builtins" and _made_in_python(value) else module


def _made_in_python(value: object) -> bool:
    """Whether a class or function was written in Python, and not in the C of the interpreter."""
    return bool(value.__flags__ & _HEAP_TYPE) if isinstance(value, type) else isinstance(value, types.FunctionType)


def package_of(value: object) -> str:
    """The first part of its module's name."""
    return module_of(value).partition(".")[0]


def name_of(value: object) -> str:
    """A class or function in words, as `module.name`; an object without a name by its class."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return ".".join(filter(None, (module_of(named), named.__qualname__)))


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and all that is inside it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from codes_of(one)
