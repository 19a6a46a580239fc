"""Run the statements of an emitted function over tokens: what it does, in order, and which values are alive at each step.

Whatever a statement calls or reads of the runtime is an event; what it assigns are new tokens. Two texts with equal traces
do the same with the same values alive, however they name them and whether or not they loop.
"""

from __future__ import annotations

import ast
import builtins
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from autopar.codegen.marks import fill
from autopar.ir.lines import Function, Line


class Token:
    """A value. Arithmetic with it and its methods are events."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"#{self.number}"

    def __add__(self, other: Any) -> Event:
        return Event(f"{self!r} + {other!r}")

    def __getattr__(self, name: str) -> Event:
        if name.startswith("_"):
            raise AttributeError(name)
        return Event(f"{self!r}.{name}")


class Event:
    """A call or a reading of a value, as text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def __getattr__(self, name: str) -> Event:
        return Event(f"{self.text}.{name}")

    def __getitem__(self, key: Any) -> Event:
        return Event(f"{self.text}[{key!r}]")

    def __call__(self, *args: Any, **kwargs: Any) -> Event:
        return Event(f"{self.text}({', '.join([*map(repr, args), *(f'{k}={v!r}' for k, v in kwargs.items())])})")


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return Event(name)


class _Marked(ast.NodeTransformer):
    """Assigned and bare values go through `_step`, which says how many values they are."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        (target,) = node.targets
        count = len(target.elts) if isinstance(target, ast.Tuple) else -1
        return ast.Assign(node.targets, _step(count, node.value))

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        return ast.Expr(_step(0, node.value))

    def visit_Return(self, node: ast.Return) -> ast.Assign:
        return ast.Assign([ast.Name("_result", ast.Store())], node.value or ast.Constant(None))


def _step(count: int, value: ast.expr) -> ast.Call:
    return ast.Call(ast.Name("_step", ast.Load()), [ast.Constant(count), value], [])


def trace(statements: list[ast.stmt], arguments: Mapping[str, int]) -> list[tuple[str, tuple[int, ...]]]:
    """Every event with the numbers of the tokens alive when it happens, and at the end what is returned. arguments: how many
    values are in each of the lists that the function is given."""
    tokens: weakref.WeakSet[Token] = weakref.WeakSet()
    events: list[tuple[str, tuple[int, ...]]] = []
    numbers = iter(range(10**9))

    def token() -> Token:
        made = Token(next(numbers))
        tokens.add(made)
        return made

    def alive() -> tuple[int, ...]:
        return tuple(sorted(one.number for one in tokens))

    def step(count: int, value: Any) -> Any:
        if not isinstance(value, Event):
            return value
        events.append((value.text, alive()))
        return token() if count < 0 else [token() for _ in range(count)]

    names = _Names({name: [token() for _ in range(count)] for name, count in arguments.items()}, _step=step)
    module = ast.fix_missing_locations(_Marked().visit(ast.Module(statements, [])))
    exec(compile(module, "<traced>", "exec"), names)
    result = repr(names.get("_result"))
    names.clear()
    events.append((result, alive()))
    return events


def unrolled(function: Function, text_of: Callable[[Line], str], returned: Collection[str]) -> list[str]:
    """The lines one after another, a `del` after the last use of each name."""
    statements: list[str] = []
    for i, line in enumerate(function.lines):
        later = {name for after in function.lines[i + 1 :] for name in (*after.reads(), *after.outs)}
        statements += fill(text_of(line), str)
        dead = [
            n for n in dict.fromkeys((*line.reads(), *line.outs)) if n not in later and n not in returned and n != "_"
        ]
        statements += [f"del {', '.join(dead)}"] if dead else []
    return statements
