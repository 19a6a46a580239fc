"""Hostile copies of data files: values, keys, nesting and text changed at random, with payloads that would leave a canary.

Every mutation is a function of a seed. A payload that is executed, as Python, as a template or by unpickling, sets an
environment variable.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

CANARY = "AUTOPAR_CANARY"
_SET = f"__import__('os').environ.__setitem__('{CANARY}', '1')"

PAYLOADS = (
    f"dp\n{_SET}\n",
    f"dp\r{_SET}\r#",
    f"dp\u2028{_SET}",
    f"x\x0c{_SET}",
    f'"""\n{_SET}\n"""',
    f"'''\n{_SET}\n'''",
    f"') or {_SET} or ('",
    f'") or {_SET} or ("',
    f"\\\n{_SET}",
    f"{{{{ {_SET} }}}}",
    f"{{% for x in [1] %}}{{{{ {_SET} }}}}{{% endfor %}}",
    f"${{{_SET}}}",
    f"$({_SET})",
    f"[@dp\n{_SET}, .]",
    f"dp={_SET}",
    "[@dp, @dp]",
    "[@lambda, .]",
    "~sum(dp)",
    "F0.0 F99999999999999999999.0",
    "F\u0663.0",
    "# coding: utf-7",
    "../../../etc/passwd",
    "/etc/passwd",
    "weights/../../escape",
    "C:\\autoexec.bat",
    "os",
    "subprocess",
    "torch.hub",
    "__builtins__",
    "__class__",
    "class",
    "\x00",
    "\x1b[2J",
    "\ud800",
    "\u202e",
    "dp tp",
    "",
    " ",
    "x" * 100_000,
)
NUMBERS = (0, 1, 2, 3, -1, 7, 2**31, 2**63, 2**64, 10**18, 10**30, 10**5000, 0.5, -0.0, 1e30, 1e300, 1e-320, -1e308)
NOT_NUMBERS = (float("inf"), float("-inf"), float("nan"))


def deep(depth: int) -> Any:
    """Lists in lists."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def hostile(pick: random.Random) -> Any:
    """A value of any type."""
    return pick.choice(
        (
            lambda: pick.choice(PAYLOADS),
            lambda: pick.choice(PAYLOADS),
            lambda: pick.choice(NUMBERS),
            lambda: pick.choice(NOT_NUMBERS),
            lambda: pick.choice((True, False, None)),
            lambda: pick.choice(([], {}, [[]], [{}], {"": {}}, [None], [1, "two", 3.0])),
            lambda: {pick.choice(PAYLOADS): pick.choice(PAYLOADS)},
            lambda: [pick.choice(PAYLOADS)] * pick.choice((1, 2, 5)),
            lambda: deep(pick.choice((3, 20, 90))),
            lambda: list(range(20_000)),
        )
    )()


def _places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


def mutated_data(data: Any, pick: random.Random) -> Any:
    """The data with one to three changes."""
    data = copy.deepcopy(data)
    for _ in range(pick.choice((1, 1, 1, 2, 3))):
        places = list(_places(data))
        if not places:
            return hostile(pick)
        *path, key = pick.choice(places)
        holder = data
        for step in path:
            holder = holder[step]
        change = pick.choice(("set", "set", "set", "delete", "rename", "add", "swap", "negate", "repeat", "stretch"))
        value = holder[key]
        if change == "delete":
            del holder[key]
        elif change == "rename" and isinstance(holder, dict):
            holder[str(pick.choice(PAYLOADS))] = holder.pop(key)
        elif change == "add" and isinstance(holder, dict):
            holder[str(pick.choice(PAYLOADS))] = hostile(pick)
        elif change == "swap":
            other: Any = data
            for step in (*(chosen := pick.choice(places)),):
                other = other[step]
            holder[key] = copy.deepcopy(other) if chosen else value
        elif change == "negate" and isinstance(value, (int, float)):
            holder[key] = pick.choice((-value, value * 2 + 1, value + 1, not value))
        elif change == "repeat" and isinstance(value, list):
            holder[key] = value * pick.choice((2, 3, 1000))
        elif change == "stretch" and isinstance(value, str):
            at = pick.randrange(len(value) + 1)
            holder[key] = value[:at] + pick.choice(PAYLOADS) + value[at:]
        else:
            holder[key] = hostile(pick)
    return data


def json_text(data: Any) -> str:
    """JSON as Python writes it, numbers of any length included."""
    huge = 10**5000
    words = str(huge // 10**4000)

    def plain(value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**100:
            return "@huge@"
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list) else value

    return json.dumps(plain(data), indent=1).replace('"@huge@"', words)


def mutated_text(text: str, pick: random.Random) -> str:
    """The text of a JSON file, changed as text."""
    at = pick.randrange(len(text))
    return pick.choice(
        (
            lambda: text[:at],
            lambda: text[:at] + text[at + pick.choice((1, 5, 50)) :],
            lambda: text[:at] + pick.choice(PAYLOADS) + text[at:],
            lambda: text[:at] + pick.choice('{}[],:"\\\0\n0') + text[at + 1 :],
            lambda: text.replace(":", ": 1e999 ,", 1),
            lambda: text.replace(": ", ": Infinity, ", 1),
            lambda: "[" * 100_000,
            lambda: '{"a":' * 100_000,
            lambda: text * 2,
            lambda: "",
            lambda: "null",
            lambda: pick.choice(PAYLOADS),
        )
    )()


def mutants(data: Any, seeds: range) -> Iterator[tuple[int, str]]:
    """(seed, text of a JSON file): three in four changed as data, the others as text."""
    text = json.dumps(data, indent=1)
    for seed in seeds:
        pick = random.Random(seed)
        yield seed, mutated_text(text, pick) if seed % 4 == 3 else json_text(mutated_data(data, pick))


class _Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.row = function, arguments

    def __reduce__(self) -> Any:
        return self.row


def pickles() -> list[bytes]:
    """Pickles that set the canary when they are loaded as such, in every way that a pickle may call something."""
    touch = f"{_SET}"
    calls = [
        _Call(eval, touch),
        _Call(exec, touch),
        _Call(os.system, f"export {CANARY}=1"),
        _Call(os.putenv, CANARY, "1"),
    ]
    whole = [pickle.dumps(call, protocol) for call in calls for protocol in (0, 2, 4)]
    held = [pickle.dumps({"state_dict_metadata": call, "storage_data": [call]}) for call in calls]
    words = touch.encode()
    opcodes = [
        b"cbuiltins\neval\n(V" + words + b"\ntR.",
        b"(V" + words + b"\nibuiltins\neval\n.",
        b"(cbuiltins\neval\nV" + words + b"\no.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c" + bytes([len(words)]) + words + b"\x85R.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}Vstate_dict_metadata\ncbuiltins\neval\nstb.",
        b"ctorch.serialization\nload\n(V/etc/passwd\ntR.",
        b"ctorch.distributed.checkpoint.metadata\npickle.loads\n(V\ntR.",
        b"cos\nsystem\n.",
        b"\x80\x04\x95" + b"\xff" * 8 + b".",
        b"\x80\x04r\xff\xff\xff\x7fN.",
        b"\x80\x05\x96" + b"\xff" * 7 + b"\x0f.",
        b"(" * 100_000 + b".",
        b"]" * 50_000 + b"a" * 49_999 + b".",
    ]
    return [*whole, *held, *opcodes]


def mutated_bytes(data: bytes, pick: random.Random) -> bytes:
    """A binary file with bytes changed, cut, doubled, or with a payload in it."""
    at = pick.randrange(len(data))
    flipped = bytearray(data)
    for _ in range(pick.choice((1, 2, 8))):
        flipped[pick.randrange(len(data))] = pick.randrange(256)
    return pick.choice(
        (
            lambda: bytes(flipped),
            lambda: bytes(flipped),
            lambda: bytes(flipped),
            lambda: data[:at],
            lambda: data[:at] + data[at + pick.choice((1, 4, 100)) :],
            lambda: data[:at] + bytes(pick.randrange(256) for _ in range(8)) + data[at:],
            lambda: data[:at] + pick.choice(pickles()) + data[at:],
            lambda: pick.choice(pickles()),
            lambda: b"",
        )
    )()
