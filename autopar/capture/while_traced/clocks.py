"""Clocks and the operating system's randomness in the code of a model: what they give would become a constant.

They leave no state behind that could be compared, so while a model is traced, stand-ins take their place under the names by
which its functions know them. A model that reads one is traced twice, and is refused only where the two traces differ:
timing one's own forward changes no value.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx

from autopar.capture.before.state import names_of

_READS = {
    "time": {"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time"},
    "datetime": {"now", "utcnow", "today"},
    "uuid": {"uuid1", "uuid4"},
    "secrets": {"token_bytes", "token_hex", "randbits", "randbelow", "choice"},
    "os": {"urandom", "getrandom", "times", "getloadavg"},
    "posix": {"urandom", "getrandom", "times", "getloadavg"},
}

Note = Callable[[str], None]
"""Called with the name of a clock that is read."""


@contextmanager
def noted_clocks(functions: Sequence[types.FunctionType]) -> Iterator[list[str]]:
    """The clocks that are read meanwhile by code that shares its globals with one of the functions, as `time.time in forward`."""
    read: dict[str, None] = {}
    replaced: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
    for function in functions:
        scope, names = function.__globals__, names_of(function.__code__)
        for name in names:
            value = scope.get(name)
            reads = _READS.get(_home(value), set())
            if reads and (id(scope), name) not in replaced:
                stand_in = _stand_in(name, value, reads, functools.partial(_note, read, _home(value), scope, functions))
                if stand_in is not None:
                    replaced[id(scope), name] = scope, value
                    scope[name] = stand_in
    clocks: list[str] = []
    try:
        yield clocks
    finally:
        for (_, name), (scope, value) in replaced.items():
            scope[name] = value
        clocks += read


def _home(value: object) -> str:
    return value.__name__ if isinstance(value, types.ModuleType) else str(getattr(value, "__module__", None))


def _note(
    read: dict[str, None], home: str, scope: dict[str, Any], functions: Sequence[types.FunctionType], name: str
) -> None:
    """Note a clock with the functions of a scope that name it."""
    for function in functions:
        if function.__globals__ is scope and name in names_of(function.__code__):
            read[f"{home}.{name} in {function.__qualname__}"] = None


def _stand_in(name: str, value: object, reads: set[str], note: Note) -> Any:
    """The stand-in for a value of the user's globals, known there by this name; None where nothing needs one."""
    if isinstance(value, types.ModuleType):
        return _module(value, reads, note)
    if isinstance(value, type):
        return _class(value, reads, note)
    return _function(value, functools.partial(note, name)) if getattr(value, "__name__", None) in reads else None


def _module(module: types.ModuleType, reads: set[str], note: Note) -> types.ModuleType:
    """A module that notes which of some names are read."""

    class Watched(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name in reads:
                note(name)
            return getattr(module, name)

    return Watched(module.__name__)


def _class(cls: type, reads: set[str], note: Note) -> type:
    """A class that notes which of some names are read, and makes and knows instances as the class itself does."""

    class Watched(type):
        def __getattribute__(self, name: str) -> Any:
            if name in reads:
                note(name)
            return getattr(cls, name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return cls(*args, **kwargs)

        def __instancecheck__(self, value: object) -> bool:
            return isinstance(value, cls)

        def __subclasscheck__(self, kind: type) -> bool:
            return issubclass(kind, cls)

    return Watched(cls.__name__, (), {})


def _function(function: Any, note: Callable[[], None]) -> Any:
    """A function that notes that it is called."""

    @functools.wraps(function)
    def watching(*args: Any, **kwargs: Any) -> Any:
        note()
        return function(*args, **kwargs)

    return watching


def same_graph(one: fx.Graph, other: fx.Graph) -> bool:
    """Whether two traces compute the same: ops, arguments and numbers."""
    return [_described(n) for n in one.nodes] == [_described(n) for n in other.nodes]


def _described(node: fx.Node) -> tuple[str, ...]:
    return node.op, str(node.target), str(node.args), str(node.kwargs)
