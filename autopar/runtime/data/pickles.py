"""Pickles read as data: a list of opcodes, each of which only makes a value, and nothing is called or imported.

A pickle is a program for a small machine. Of its opcodes those are read that Python's and torch's picklers write (protocols
2 to 5) for numbers, text, lists, tuples, mappings and objects of named classes; what a file calls an object becomes a `Made`,
which holds the name and what the file gives. Any other opcode is refused, and so is what takes more than its file is worth:

    lengths         at most what is left of the file
    values at once  16384 on the machine's stack (picklers write items in batches of 1000)
    containers      one per 8 bytes of the file
    nesting         24 levels, none of which holds itself
    shared values   written out, they are at most 8 per byte of the file
    keys            text, numbers or objects, which compare by identity; never tuples, whose hash may take for ever
    numbers         64 bits
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, cast

from .schema import SchemaError, shown

MOST_STACK = 1 << 14
MOST_DEPTH = 24
_SOME = 1024
"""Containers, and values written out, that a file of any size may have."""


class Name:
    """A class or a function as a file names it."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"the name {self.name}"


class Made:
    """An object of a class, or the result of a function, as a file describes it: their name, and what the file gives."""

    __slots__ = ("args", "items", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name = name
        self.args = args
        self.state: Any = None
        self.items: dict[Any, Any] | None = None

    def __repr__(self) -> str:
        return f"a {self.name.rpartition('.')[2]}"


class Stored:
    """A reference to something that lies beside the file (a persistent id)."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key


def read(data: bytes | memoryview, names: frozenset[str]) -> Any:
    """The value of a pickle, read as data. names: those that it may name. Raises SchemaError."""
    value = _Machine(memoryview(data), names).run()
    _check_extent(value, _SOME + 8 * len(data))
    return value


class _Machine:
    """One reading: bytes, the place in them, a stack, marks in it, and the memo."""

    def __init__(self, data: memoryview, names: frozenset[str]) -> None:
        self.data = data
        self.at = 0
        self.names = names
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.containers = 0
        self.most = _SOME + len(data) // 8

    def run(self) -> Any:
        if self.data[:1] != b"\x80":
            raise SchemaError("it does not say its protocol at the start; those from 2 to 5 are read")
        while True:
            code = self.take(1)[0]
            if code == _STOP:
                break
            row = _OPCODES.get(code)
            if row is None:
                raise SchemaError(f"byte {self.at - 1} is opcode {code:#04x}, which no data of a checkpoint needs")
            row(self)
            if len(self.stack) > MOST_STACK:
                raise SchemaError(f"byte {self.at}: more than {MOST_STACK} values at once")
        if len(self.stack) != 1 or self.marks:
            raise SchemaError(f"it ends with {len(self.stack)} values, not with one")
        return self.stack[0]

    def take(self, length: int) -> memoryview:
        piece = self.data[self.at : self.at + length]
        if len(piece) < length:
            raise SchemaError(f"{length} bytes are to follow byte {self.at}, and {len(piece)} do")
        self.at += length
        return piece

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def line(self) -> str:
        rest = bytes(self.data[self.at : self.at + 256])
        line, end, _ = rest.partition(b"\n")
        if not end:
            raise SchemaError(f"no name stands at byte {self.at}")
        self.at += len(line) + 1
        return _text(line)

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def contain(self, value: Any) -> None:
        """Push a container."""
        self.containers += 1
        if self.containers > self.most:
            raise SchemaError(
                f"byte {self.at}: {self.containers} containers are more than its {len(self.data)} bytes can mean"
            )
        self.stack.append(value)

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise SchemaError(f"byte {self.at}: a value is taken where there is none")
        return self.stack.pop()

    def pop_mark(self) -> list[Any]:
        if not self.marks:
            raise SchemaError(f"byte {self.at}: values are taken up to a mark, and there is none")
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def top(self, kind: type | tuple[type, ...]) -> Any:
        value = self.pop()
        if not isinstance(value, kind):
            raise SchemaError(f"byte {self.at}: {shown(value)} is no value that this can be done with")
        self.stack.append(value)
        return value

    def recall(self, place: int) -> None:
        if place >= len(self.memo):
            raise SchemaError(f"byte {self.at}: it recalls value {place} of {len(self.memo)}")
        self.stack.append(self.memo[place])

    def keep(self, place: int | None = None) -> None:
        if place not in (None, len(self.memo)):
            raise SchemaError(f"byte {self.at}: it numbers a value {place}, the next is {len(self.memo)}")
        self.memo.append(self.top(object))

    def name(self, full: str) -> None:
        if full not in self.names:
            raise SchemaError(f"it names {shown(full)}, which is nothing that this file is made of")
        self.push(Name(full))

    def make(self) -> None:
        args, maker = self.pop(), self.pop()
        if not isinstance(maker, Name) or not isinstance(args, tuple):
            raise SchemaError(f"byte {self.at}: {shown(maker)} makes nothing")
        self.contain(Made(maker.name, args))

    def build(self) -> None:
        state = self.pop()
        made = self.top(Made)
        if made.state is not None:
            raise SchemaError(f"byte {self.at}: a {made.name} is given its state twice")
        made.state = state

    def set_items(self, items: list[Any]) -> None:
        holder = self.top((dict, Made))
        target: dict[Any, Any] = (holder.items or {}) if isinstance(holder, Made) else holder
        if isinstance(holder, Made):
            holder.items = target
        if len(items) % 2:
            raise SchemaError(f"byte {self.at}: a key has no value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int | float | Made | None):
                raise SchemaError(f"byte {self.at}: {shown(key)} is no key; keys are text, numbers or objects")
            if key in target:
                raise SchemaError(f"byte {self.at}: the key {shown(key)} is given twice")
            target[key] = value

    def long(self) -> int:
        length = self.take(1)[0]
        if length > 9:
            raise SchemaError(f"byte {self.at}: a number of {length} bytes; numbers have at most 8")
        value = int.from_bytes(self.take(length), "little", signed=True)
        if not -(1 << 63) <= value < 1 << 64:
            raise SchemaError(f"byte {self.at}: a number of more than 64 bits")
        return value

    def global_on_stack(self) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise SchemaError(f"byte {self.at}: a name is text, not {shown(name)}")
        self.name(f"{module}.{name}")


_1, _2, _4, _8 = (struct.Struct(form) for form in ("<B", "<H", "<I", "<Q"))
_SIGNED, _FLOAT = struct.Struct("<i"), struct.Struct(">d")
_STOP = ord(".")


def _text(data: bytes | memoryview) -> str:
    try:
        return bytes(data).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise SchemaError(f"text that is no UTF-8 ({error.reason})") from error


def _protocol(machine: _Machine) -> None:
    protocol = machine.number(_1)
    if not 2 <= protocol <= 5 or machine.at != 2:
        raise SchemaError(
            f"protocol {protocol} at byte {machine.at - 2}; those from 2 to 5 are read, said at the start"
        )


def _frame(machine: _Machine) -> None:
    length, left = machine.number(_8), len(machine.data) - machine.at
    if length > left:
        raise SchemaError(f"a frame of {length} bytes, where {left} are left")


def _mark(machine: _Machine) -> None:
    if len(machine.marks) >= MOST_STACK:
        raise SchemaError(f"byte {machine.at}: more than {MOST_STACK} marks")
    machine.marks.append(len(machine.stack))


def _tuple(count: int) -> Callable[[_Machine], None]:
    return lambda m: m.contain(tuple(reversed([m.pop() for _ in range(count)])))


def _append(machine: _Machine, items: list[Any]) -> None:
    machine.top(list).extend(items)


_OPCODES: dict[int, Callable[[_Machine], None]] = {
    0x80: _protocol,
    0x95: _frame,
    ord("("): _mark,
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("J"): lambda m: m.push(m.number(_SIGNED)),
    ord("K"): lambda m: m.push(m.number(_1)),
    ord("M"): lambda m: m.push(m.number(_2)),
    0x8A: lambda m: m.push(m.long()),
    ord("G"): lambda m: m.push(m.number(_FLOAT)),
    ord("X"): lambda m: m.push(_text(m.take(m.number(_4)))),
    0x8C: lambda m: m.push(_text(m.take(m.number(_1)))),
    0x8D: lambda m: m.push(_text(m.take(m.number(_8)))),
    ord("]"): lambda m: m.contain([]),
    ord("}"): lambda m: m.contain({}),
    ord(")"): lambda m: m.push(()),
    ord("t"): lambda m: m.contain(tuple(m.pop_mark())),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    ord("a"): lambda m: _append(m, [m.pop()]),
    ord("e"): lambda m: _append(m, m.pop_mark()),
    ord("s"): lambda m: m.set_items([m.pop(), m.pop()][::-1]),
    ord("u"): lambda m: m.set_items(m.pop_mark()),
    ord("c"): lambda m: m.name(f"{m.line()}.{m.line()}"),
    0x93: _Machine.global_on_stack,
    ord("R"): _Machine.make,
    0x81: _Machine.make,
    ord("b"): _Machine.build,
    ord("Q"): lambda m: m.contain(Stored(m.pop())),
    ord("h"): lambda m: m.recall(m.number(_1)),
    ord("j"): lambda m: m.recall(m.number(_4)),
    ord("q"): lambda m: m.keep(m.number(_1)),
    ord("r"): lambda m: m.keep(m.number(_4)),
    0x94: lambda m: m.keep(),
}
"""The opcodes that are read, by the names of pickletools: PROTO, FRAME, MARK; NONE, NEWTRUE, NEWFALSE, BININT, BININT1,
BININT2, LONG1, BINFLOAT; BINUNICODE, SHORT_BINUNICODE, BINUNICODE8; EMPTY_LIST, EMPTY_DICT, EMPTY_TUPLE, TUPLE, TUPLE1,
TUPLE2, TUPLE3; APPEND, APPENDS, SETITEM, SETITEMS; GLOBAL, STACK_GLOBAL, REDUCE, NEWOBJ, BUILD, BINPERSID; BINGET,
LONG_BINGET, BINPUT, LONG_BINPUT, MEMOIZE; and STOP."""


def _check_extent(value: Any, most: int) -> None:
    """Raises SchemaError for what holds itself, is nested too deep, or has more than `most` values once shared ones are written
    out. Every container is looked at once."""
    extents: dict[int, tuple[int, int]] = {}
    open_now: set[int] = set()
    ways: list[tuple[Any, Iterator[Any] | None]] = [(value, None)]
    while ways:
        one, rest = ways.pop()
        if id(one) in extents or not isinstance(one, _HOLDERS):
            continue
        if rest is None:
            if id(one) in open_now:
                raise SchemaError("a value holds itself")
            open_now.add(id(one))
            rest = _held(one)
        inner = next((held for held in rest if isinstance(held, _HOLDERS) and id(held) not in extents), None)
        if inner is not None:
            ways += [(one, rest), (inner, None)]
            if len(ways) > MOST_DEPTH + 1:
                raise SchemaError(f"more than {MOST_DEPTH} levels")
            continue
        own = [extents.get(id(held), (0, 1)) for held in _held(one)]
        depth, extent = 1 + max((d for d, _ in own), default=0), 1 + sum(e for _, e in own)
        if depth > MOST_DEPTH:
            raise SchemaError(f"more than {MOST_DEPTH} levels")
        if extent > most:
            raise SchemaError(f"shared values make it {extent} values, more than the file can mean")
        open_now.discard(id(one))
        extents[id(one)] = depth, extent


_HOLDERS = (list, tuple, dict, Made, Stored)


def _held(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, Made):
        yield value.args
        yield value.state
        yield value.items
    elif isinstance(value, Stored):
        yield value.key
    else:
        yield from cast("list[Any]", value)
