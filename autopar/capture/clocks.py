"""Clocks and the operating system's randomness in the code of a model: what they give would become a constant.

They leave no state behind that could be compared, so they are looked for in what functions name. A model that names one
is traced twice, and is refused only where the two traces differ: timing one's own forward changes no value.
"""

from __future__ import annotations

import types
from collections.abc import Sequence

from torch import fx

from autopar.capture.state import names_of

_READS = {
    "time": {"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time"},
    "datetime": {"now", "utcnow", "today"},
    "uuid": {"uuid1", "uuid4"},
    "secrets": {"token_bytes", "token_hex", "randbits", "randbelow", "choice"},
    "os": {"urandom", "getrandom", "times", "getloadavg"},
    "posix": {"urandom", "getrandom", "times", "getloadavg"},
}


def clocks_read(functions: Sequence[types.FunctionType]) -> list[str]:
    """What of the kind the functions name, each as `time.time in forward`."""
    found = []
    for function in functions:
        names = names_of(function.__code__)
        for name in names:
            value = function.__globals__.get(name)
            home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            reads = _READS.get(str(home), set())
            if isinstance(value, (types.ModuleType, type)):
                found += [f"{home}.{n} in {function.__qualname__}" for n in names if n in reads]
            elif getattr(value, "__name__", None) in reads:
                found.append(f"{home}.{name} in {function.__qualname__}")
    return list(dict.fromkeys(found))


def same_graph(one: fx.Graph, other: fx.Graph) -> bool:
    """Whether two traces compute the same: ops, arguments and numbers."""
    return [_described(n) for n in one.nodes] == [_described(n) for n in other.nodes]


def _described(node: fx.Node) -> tuple[str, ...]:
    return node.op, str(node.target), str(node.args), str(node.kwargs)
