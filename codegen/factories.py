"""Optimizer and scheduler factories as a program's directory has them: by module and name, or by source.

A class or function of a module that can be imported is named in the manifest. One of the user's script, which cannot (`__main__`,
a lambda, a function inside another), goes into `user_factories.py` as it is written, with all that it refers to:

    WARMUP = 10                                           plain data, as they are now
    from torch.optim import AdamW                         what modules have that can be imported
    def decayed(params): …                                functions of the script, which take the same along
    optimizer = lambda params: AdamW(decayed(params))

Anything else that it refers to is refused, by name.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import functools
import inspect
import json
import types
from collections.abc import Iterator, Mapping
from typing import Any

from autopar.errors import EmitError
from autopar.runtime.data.origin import codes_of
from autopar.runtime.data.schema import is_identifier
from autopar.runtime.program.factories import USER_FACTORIES, NamedFactory, NamedRule, is_of_script
from autopar.runtime.update.update_rule import UpdateRule

EXAMPLES = {"optimizer": "torch.optim.AdamW, lr=…", "scheduler": "torch.optim.lr_scheduler.StepLR, step_size=…"}
_KINDS = (ast.FunctionDef, ast.ClassDef, ast.Lambda)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def named_rule(rule: UpdateRule | None, entry: str = "") -> NamedRule | None:
    """An update rule, of an entry or of the program's own step, as a manifest has it. Raises EmitError when a factory has no
    importable name, and no source that could travel."""
    if rule is None or rule == UpdateRule():
        return None
    return NamedRule(
        named_factory(rule.optimizer, _of("optimizer", entry)),
        named_factory(rule.scheduler, _of("scheduler", entry)),
        rule.clip_norm,
        rule.clip_value,
        rule.loss_scaling,
        rule.compensated,
    )


def named_factory(factory: Any, what: str) -> NamedFactory | None:
    """Module, name and keyword arguments of a class or a function. Raises EmitError when it has no importable name, and no source
    that could travel."""
    if factory is None:
        return None
    factory, kwargs = _bare(factory, what)
    try:
        json.dumps(kwargs, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise EmitError(
            f"an argument of the {what} cannot be written to a program ({error}); use plain numbers"
        ) from error
    if not is_of_script(factory):
        return NamedFactory(factory.__module__, factory.__qualname__, kwargs)
    _Source(what).add(what, factory)
    return NamedFactory(USER_FACTORIES, _name(factory, what), kwargs)


def factories_source(rules: Mapping[str, UpdateRule | None]) -> str:
    """The text of user_factories.py; empty where no factory needs it. rules: by entry. Raises EmitError."""
    source = _Source("")
    for entry, rule in rules.items():
        factories = {"optimizer": rule.optimizer, "scheduler": rule.scheduler} if rule is not None else {}
        for name, factory in factories.items():
            what = _of(name, entry)
            own = None if factory is None else _bare(factory, what)[0]
            if own is not None and is_of_script(own):
                source.what = what
                source.add(what, own)
    return source.text()


def _of(what: str, entry: str) -> str:
    return f"{what}_of_{entry}" if entry else what


def _bare(factory: Any, what: str) -> tuple[Any, dict[str, Any]]:
    """A factory without the keyword arguments that functools.partial gives it, and these. Raises EmitError."""
    kwargs: dict[str, Any] = {}
    while isinstance(factory, functools.partial):
        if factory.args:
            raise EmitError(f"the {what} factory has positional arguments; give them by keyword in functools.partial")
        kwargs = {**factory.keywords, **kwargs}
        factory = factory.func
    return factory, kwargs


def _name(factory: Any, what: str) -> str:
    """The name of a factory in user_factories.py."""
    name = getattr(factory, "__name__", "")
    return name if is_identifier(name) else what


class _Source:
    """The text of user_factories.py as it grows. what: the factory that is written, for errors."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._values: dict[str, Any] = {}
        self._lines: list[str] = []

    def text(self) -> str:
        """The file; empty where nothing was added."""
        head = ['"""The functions of the script that this program was compiled in which make its optimizer."""', ""]
        return "\n".join([*head, *self._lines]) + "\n" if self._lines else ""

    def add(self, what: str, factory: Any) -> None:
        """Add a factory. Raises EmitError."""
        if not isinstance(factory, (types.FunctionType, type)):
            raise self._refused(f"it is a {type(factory).__name__}")
        self._define(_name(factory, what), factory)

    def _refused(self, why: str) -> EmitError:
        return EmitError(
            f"the {self.what} factory cannot be written to a program: {why}; use functools.partial({EXAMPLES[self.what]}), or "
            "put it, with what it uses, into a module that can be imported where the program runs"
        )

    def _define(self, name: str, value: Any) -> None:
        """Have a name stand for a value in the file. Raises EmitError."""
        if name in self._values:
            if self._values[name] is not value:
                raise self._refused(f"it uses two things that are called {name}")
            return
        self._values[name] = value
        if isinstance(value, types.ModuleType):
            if value.__name__ == "__main__":
                raise self._refused(f"it uses {name}, which is the script itself")
            self._lines.append(f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}"))
        elif _is_plain(value):
            self._lines.append(f"{name} = {value!r}")
        elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)) and not is_of_script(value):
            self._lines.append(f"from {value.__module__} import {value.__qualname__} as {name}")
        elif isinstance(value, (types.FunctionType, type)):
            self._lines += self._written(name, value)
        else:
            raise self._refused(f"it uses {name}, which is a {type(value).__name__}")

    def _written(self, name: str, value: Any) -> list[str]:
        """The lines of a function or class of the script, after those of all that it refers to."""
        node = self._node(name, value)
        for used in sorted(_names(node, value)):
            found, other = _looked_up(used, value)
            if found and other is not value:
                self._define(used, other)
        if isinstance(node, ast.Lambda):
            return [f"{name} = {ast.unparse(node)}"]
        return ["", "", *ast.unparse(node).splitlines(), ""]

    def _node(self, name: str, value: Any) -> Any:
        """A function's or class's own part of its file. Raises EmitError where it cannot be told."""
        try:
            lines, start = inspect.findsource(value)
            tree = ast.parse("".join(lines))
        except (OSError, TypeError, SyntaxError):
            raise self._refused(f"the source of {name} is not at hand") from None
        nodes = [node for node in ast.walk(tree) if isinstance(node, _KINDS) and _is(node, value)]
        if not nodes or len({ast.dump(node) for node in nodes}) > 1:
            raise self._refused(f"{name} is not what its file says near line {start + 1}")
        node: Any = nodes[0]
        if getattr(node, "decorator_list", None):
            raise self._refused(f"{name} has decorators")
        return _Unannotated().visit(node)


class _Unannotated(ast.NodeTransformer):
    """Annotations away, which nothing here needs."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)


def _is(node: Any, value: Any) -> bool:
    """Whether a part of a file is the source of a function or class."""
    if isinstance(node, ast.ClassDef) or isinstance(value, type):
        return isinstance(value, type) and isinstance(node, ast.ClassDef) and node.name == value.__qualname__
    name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
    if name != value.__name__:
        return False
    flags = value.__code__.co_flags & __future__.annotations.compiler_flag
    alone = ast.Expression(node) if isinstance(node, ast.Lambda) else ast.Module([node], [])
    whole = compile(alone, "alone", "eval" if isinstance(node, ast.Lambda) else "exec", flags, True)
    codes = [one for one in whole.co_consts if isinstance(one, types.CodeType) and one.co_name == name]
    return any(_essence(code) == _essence(value.__code__) for code in codes)


def _essence(code: types.CodeType) -> Any:
    """The part of code that does not depend on where it stands; names that it closes over are names to it."""
    consts = tuple(_essence(one) if isinstance(one, types.CodeType) else (type(one), one) for one in code.co_consts)
    return code.co_varnames, {*code.co_names, *code.co_freevars}, consts


def _names(node: ast.AST, value: Any) -> set[str]:
    """Names that a function or class reads, and does not always bind itself."""
    if not isinstance(value, types.FunctionType):
        return _read(node)
    inside = {name for code in codes_of(value.__code__) for name in (*code.co_names, *code.co_freevars)}
    arguments: ast.arguments = node.args  # type: ignore[attr-defined]
    defaults = [one for one in (*arguments.defaults, *arguments.kw_defaults) if one is not None]
    return (_read(node) & inside) | {name for default in defaults for name in _read(default)}


def _read(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}


def _looked_up(name: str, value: Any) -> tuple[bool, Any]:
    """Whether a name that a function or class reads is anything but one of Python's own, and what it stands for."""
    for function in _functions(value):
        inside = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if name in inside:
            return True, inside[name].cell_contents
        if name in function.__globals__:
            return True, function.__globals__[name]
    if not isinstance(value, types.FunctionType):
        scope: Mapping[str, Any] = vars(inspect.getmodule(value) or builtins)
        return name in scope and not hasattr(builtins, name), scope.get(name)
    return False, None


def _functions(value: Any) -> Iterator[types.FunctionType]:
    if isinstance(value, types.FunctionType):
        yield value
    else:
        yield from (one for one in vars(value).values() if isinstance(one, types.FunctionType))


def _is_plain(value: Any) -> bool:
    """Whether a value is what its text says."""
    if isinstance(value, dict):
        return type(value) is dict and all(_is_plain(one) for pair in value.items() for one in pair)
    if isinstance(value, (tuple, list, set)):
        return type(value) in (tuple, list, set) and all(map(_is_plain, value)) and value != set()
    return type(value) in _PLAIN and value == value and value not in (float("inf"), -float("inf"))
