"""A hash of everything that a compiled program follows from, part by part: two requests that have it in common have one program.

Values are known by what they hold, functions by their bytecode and by what that refers to (globals, closures, defaults, modules
that are imported inside), objects by class and state, classes by their functions. So a comment changes nothing, and a number that
a loss closes over does. Of parameters, of buffers that a state dict has and of example inputs shape and dtype count, and not the
numbers; of all other tensors, which become constants of a program, the numbers do. An object that is met again is known by where
it was met first, so parameters that are tied are not those that are equal.

What is installed is known by version and by the files' sizes and times, and not looked into; Python, torch and autopar by theirs.
Whatever shows no state (a lock, an open file) raises Unknowable, and nothing is kept of such a request.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
import importlib
import importlib.util
import os
import platform
import site
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.examples.trees import flatten
from autopar.capture.known.known_blocks import all_known
from autopar.ir.schedules import SCHEDULES
from autopar.ops.custom import USER_FUNCTIONS
from autopar.ops.registry import OPS
from autopar.request import Request
from autopar.runtime.data.origin import codes_of, module_of, name_of, package_of

OWN = "autopar"
_UNSEEN = ("_abc_impl",)
_BY_NAME = frozenset({"globals", "eval", "exec", "__import__", "import_module"})
"""Names by which code finds what its names do not say: its whole file counts then."""
_READS_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented))


_OF_ENVIRONMENT = frozenset({"environ", "getenv"})
"""Names by which code reads variables of the environment: those that it names count then."""


class Unknowable(Exception):
    """A value whose state cannot be seen; the message says where it is."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request as hashes by argument of `compile`. unknown: what of it cannot be seen; empty where all can."""

    parts: Mapping[str, str]
    unknown: str = ""

    @property
    def key(self) -> str:
        """The hash of all."""
        return _hash(*(one for pair in self.parts.items() for one in pair))


def fingerprint(request: Request) -> Asked:
    """The hashes of a request, and of what is the same for every one."""
    one = _Reader(_by_shape(request))
    values = _state(request)
    values["registered ops"] = _registered()
    values["torch's defaults"] = [torch.get_default_dtype(), torch.is_autocast_enabled("cpu")]
    told, unknown = {"versions": versions()}, ""
    for name, value in values.items():
        try:
            told[name] = one.digest(value, name)
        except Unknowable as error:
            unknown = unknown or str(error)
    return Asked(told, unknown)


def key_of_batches(request: Request, asked: Asked) -> str:
    """The hash of a request where the numbers of its example batches count too: a program that goes the example's way through
    branches on data is one for examples that go it. Raises Unknowable."""
    one = _Reader(set())
    leaves = [leaf for batch in _batches(request) for leaf in flatten(batch)[0]]
    return _hash(asked.key, *(one.digest(leaf, f"example input {i}") for i, leaf in enumerate(leaves)))


def _batches(request: Request) -> list[Any]:
    return [batch for one in (request, *request.entries.values()) for batch in (one.inputs, *one.buckets)]


@functools.cache
def versions() -> str:
    """A hash of the versions of Python, torch and autopar, the latter by its files."""
    root = Path(sys.modules[OWN].__path__[0])
    files = sorted(path for folder in sys.modules[OWN].__path__ for path in _sources(Path(folder), root))
    said = [".".join(platform.python_version_tuple()[:2]), torch.__version__, *map(_stated, files)]
    return _hash(*said)


def _sources(folder: Path, root: Path) -> Iterator[Path]:
    wings = [folder] if folder == root else [folder / name for name in ("passes", "costmodel", "codegen")]
    for wing in wings:
        yield from (path for path in wing.rglob("*") if path.suffix in (".py", ".json", ".j2"))


def _state(record: Any) -> dict[str, Any]:
    """The fields of a record of autopar's. What a request trains is known by names, as identities are of one process."""
    state = {one.name: getattr(record, one.name) for one in dataclasses.fields(record)}
    return state | ({"trains": record.trained} if isinstance(record, Request) else {})


def _by_shape(request: Request) -> set[int]:
    """The tensors of the model that a state dict has, and those of example inputs, by id."""
    steps = (request, *request.entries.values())
    tensors = [leaf for batch in _batches(request) for leaf in flatten(batch)[0]]
    for layer in (layer for one in steps for layer in one.model.modules()):
        tensors += layer.parameters(recurse=False)
        tensors += [
            t for name, t in layer.named_buffers(recurse=False) if name not in layer._non_persistent_buffers_set
        ]
    return {id(tensor) for tensor in tensors}


def _registered() -> list[Any]:
    """The ops, forwards and schedules that somebody added to autopar's own."""
    added = [
        (name, row)
        for table in (OPS, SCHEDULES)
        for name, row in table.items()
        if name.removeprefix("autopar_ops.") in USER_FUNCTIONS or any(map(_added, vars(row).values()))
    ]
    return [USER_FUNCTIONS, all_known(), added]


def _added(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and _library(value.__globals__.get("__name__", "")) is None


def _hash(*said: str | bytes) -> str:
    digest = hashlib.sha256()
    for one in said:
        content = one.encode() if isinstance(one, str) else one
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _stated(path: Path) -> str:
    """A file that is not read: its size and time."""
    try:
        facts = path.stat()
    except OSError:
        return f"{path.name} unknown"
    return f"{path.name} {facts.st_size} {facts.st_mtime_ns}"


@functools.cache
def _installed() -> tuple[Path, ...]:
    """The folders of installed packages."""
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()}
    return tuple(Path(folder).resolve() for folder in folders)


@functools.cache
def _library(module: str) -> str | None:
    """How a module that is not looked into is known; None for one that is the user's."""
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names and package != "__main__":
        return "python"
    if package in ("torch", OWN):
        return package
    own, first = sys.modules.get(module), sys.modules.get(package)
    file = getattr(own, "__file__", None)
    if file is None:
        return None if own is None or hasattr(own, "__path__") or package == "__main__" else "built in"
    path = Path(file).resolve()
    if not any(path.is_relative_to(folder) for folder in _installed()):
        return None
    top = getattr(first, "__file__", None)
    return _hash(str(getattr(first, "__version__", "")), _stated(path), _stated(Path(top)) if top else "")


def _texts(code: types.CodeType) -> set[str]:
    """The words that code names as they are."""
    return {one for inside in codes_of(code) for one in inside.co_consts if isinstance(one, str) and "\0" not in one}


class _Reader:
    """Hashes of values. by_shape: ids of tensors whose numbers do not count."""

    def __init__(self, by_shape: set[int]) -> None:
        self._by_shape = by_shape
        self._met: dict[Any, str] = {}
        self._kept: list[Any] = []

    def digest(self, value: Any, path: str) -> str:
        """The hash of a value. path: how the user would find it. Raises Unknowable."""
        try:
            return self._of(value, path)
        except RecursionError:
            raise Unknowable(f"{path} is nested too deeply") from None

    def _of(self, value: Any, path: str) -> str:
        if isinstance(value, _PLAIN) and type(value) in _PLAIN:
            return _hash(type(value).__name__, repr(value))
        if type(value) is tuple and not value:
            return _hash("tuple")
        key = id(value)
        if key in self._met:
            return _hash("met", self._met[key])
        self._met[key] = path
        self._kept.append(value)  # an id is of one object as long as that is alive
        return self._new(value, path)

    def _new(self, value: Any, path: str) -> str:
        if isinstance(value, Tensor):
            return self._tensor(value, id(value) in self._by_shape)
        if isinstance(value, types.ModuleType):
            return self._module(value, (), path)
        if isinstance(value, type):
            return self._class(value, path)
        if isinstance(value, types.FunctionType):
            return self._function(value, path)
        if isinstance(value, types.MethodType):
            return _hash("method", self._of(value.__func__, path), self._of(value.__self__, f"{path}.__self__"))
        if isinstance(value, functools.partial):
            bound = self._all(value.args, path), self._all(value.keywords, path)
            return _hash("partial", self._of(value.func, path), *bound)
        if isinstance(value, (staticmethod, classmethod)):
            return _hash(type(value).__name__, self._of(value.__func__, path))
        if isinstance(value, property):
            return _hash("property", *(self._of(one, path) for one in (value.fget, value.fset, value.fdel)))
        if isinstance(value, functools.cached_property):
            return _hash("cached_property", self._of(value.func, path))
        if isinstance(value, weakref.ref):
            return _hash("weakref", self._of(value(), path))
        if isinstance(value, nn.Module):
            return self._layer(value, path)
        if type(value) in (list, tuple, dict, set, frozenset, types.MappingProxyType):
            return _hash(type(value).__name__, self._all(value, path))
        if dataclasses.is_dataclass(value) and package_of(type(value)) == OWN:
            return _hash("record", name_of(type(value)), self._all(_state(value), path))
        if hasattr(value, "__wrapped__"):
            return _hash("wrapped", name_of(type(value)), self._of(value.__wrapped__, path))
        return self._object(value, path)

    def _all(self, values: Any, path: str) -> str:
        """The entries of a container; those of a set in no order."""
        if isinstance(values, Mapping):
            pairs = ((self._of(k, path), self._of(v, f"{path}[{k!r:.60}]")) for k, v in values.items())
            return _hash(*(one for pair in pairs for one in pair))
        entries = [self._of(one, f"{path}[{n}]") for n, one in enumerate(values)]
        return _hash(*(sorted(entries) if isinstance(values, (set, frozenset)) else entries))

    def _tensor(self, value: Tensor, by_shape: bool) -> str:
        like = repr((name_of(type(value)), value.dtype, tuple(value.shape), value.requires_grad, value.is_meta))
        if value.is_meta or by_shape:
            return _hash("tensor", like)
        plain = value.detach().to("cpu").contiguous().reshape(-1)
        content = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return _hash("tensor", like, content)

    def _layer(self, layer: nn.Module, path: str) -> str:
        state = vars(layer) | _hooks_in_order(layer)
        own = state.pop("_parameters"), state.pop("_buffers")
        named = [(n, self._of(t, f"{path}.{n}")) for tensors in own for n, t in tensors.items()]
        layers = [(n, self._of(one, f"{path}.{n}")) for n, one in state.pop("_modules").items()]
        rest = [(n, self._of(one, f"{path}.{n}")) for n, one in state.items()]
        return _hash(
            "layer", self._of(type(layer), path), *(said for pair in (*named, *layers, *rest) for said in pair)
        )

    def _object(self, value: Any, path: str) -> str:
        """An object by its class and state, as a copy of it would be made."""
        try:
            made = value.__reduce_ex__(4)
        except Exception:
            raise Unknowable(f"{path} is a {name_of(type(value))}, whose state cannot be seen") from None
        if isinstance(made, str):
            return _hash("global", name_of(type(value)), module_of(value), made)
        made = tuple(list(one) if isinstance(one, Iterator) else one for one in made)
        self._kept.append(made)
        return _hash("object", self._of(type(value), path), *(self._of(one, path) for one in made))

    def _class(self, kind: type, path: str) -> str:
        known = _library(module_of(kind)) if module_of(kind) else None
        said = ["class", name_of(kind), known or "", *(self._of(base, path) for base in kind.__bases__)]
        for name, value in vars(kind).items():
            function = getattr(value, "__func__", value)
            if known is not None and not (isinstance(function, types.FunctionType) and self._is_users(function)):
                continue
            is_code = isinstance(value, (types.FunctionType, staticmethod, classmethod, property))
            slot = isinstance(value, (types.GetSetDescriptorType, types.MemberDescriptorType))
            if slot or name in _UNSEEN or (name.startswith("__") and name.endswith("__") and not is_code):
                continue
            said += [name, self._of(value, f"{path}.{name}" if path else name)]
        return _hash(*said)

    def _is_users(self, function: types.FunctionType) -> bool:
        """Whether somebody else's class was given a function of the user's."""
        module = function.__globals__.get("__name__", "")
        return bool(module) and _library(module) is None and not function.__code__.co_filename.startswith("<")

    def _function(self, function: types.FunctionType, path: str) -> str:
        module = function.__globals__.get("__name__", "")
        known = _library(module) if module else None
        if known is not None:
            closed = [self._of(cell.cell_contents, path) for cell in function.__closure__ or () if _filled(cell)]
            return _hash("function", name_of(function), known, *closed)
        names = {name for code in codes_of(function.__code__) for name in code.co_names}
        read = _globals_read(function.__code__)
        said = ["function", self._code(function.__code__, path)]
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        said += [self._of(cell.cell_contents, f"{path}.{name}") for name, cell in cells if _filled(cell)]
        said += [self._of(function.__defaults__, path), self._of(function.__kwdefaults__, path)]
        for name in sorted(read & function.__globals__.keys()):
            value = function.__globals__[name]
            where = f"{path} -> {name}"
            said += [name, self._module(value, names, where) if _is_module(value) else self._of(value, where)]
        if names & _BY_NAME:
            said.append(_text(Path(function.__code__.co_filename)))
        if names & _OF_ENVIRONMENT:
            said += [os.environ.get(key, "") for key in sorted(_texts(function.__code__))]
        for imported in _imports(function):
            said += [imported.__name__, self._module(imported, names, f"{path} -> {imported.__name__}")]
        if vars(function):
            said.append(self._of({k: v for k, v in vars(function).items() if k != "__wrapped__"}, path))
        return _hash(*said)

    def _code(self, code: types.CodeType, path: str) -> str:
        consts = [
            self._code(one, path) if isinstance(one, types.CodeType) else self._constant(one) for one in code.co_consts
        ]
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        return _hash("code", code.co_code, code.co_exceptiontable, repr((counts, names)), *consts)

    def _constant(self, value: Any) -> str:
        """A constant of code, which is what it is wherever else it is met."""
        if isinstance(value, tuple):
            return _hash("tuple", *map(self._constant, value))
        if isinstance(value, frozenset):
            return _hash("frozenset", *sorted(map(self._constant, value)))
        return _hash(type(value).__name__, repr(value))

    def _module(self, module: types.ModuleType, names: Any, path: str) -> str:
        """A module of which code uses some names; one of the user's also by its text."""
        known = _library(module.__name__)
        if known is not None:
            return _hash("module", module.__name__, known)
        said = ["module", module.__name__]
        file = getattr(module, "__file__", None)
        if (module, "text") not in self._met and file is not None and module.__name__ != "__main__":
            self._met[module, "text"] = path
            said.append(_text(Path(file)))
        for name in sorted(set(names) & vars(module).keys()):
            value = vars(module)[name]
            if (module, name) in self._met:
                said += [name, self._met[module, name]]
                continue
            self._met[module, name] = where = f"{path}.{name}"
            said += [name, self._module(value, names, where) if _is_module(value) else self._of(value, where)]
        return _hash(*said)


def _is_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType)


def _filled(cell: types.CellType) -> bool:
    """Whether a variable that a function closes over has a value yet."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _text(path: Path) -> str:
    try:
        return _hash(path.read_bytes())
    except OSError:
        return "unknown"


def _hooks_in_order(layer: nn.Module) -> dict[str, dict[int, Any]]:
    """The hooks of a module by their places in the order of registration, and not by numbers that count those of the process."""
    hooks = {name: value for name, value in vars(layer).items() if "_hooks" in name and isinstance(value, Mapping)}
    place = {number: n for n, number in enumerate(sorted({number for one in hooks.values() for number in one}))}
    return {name: {place[number]: hook for number, hook in one.items()} for name, one in hooks.items()}


@functools.cache
def _globals_read(code: types.CodeType) -> frozenset[str]:
    """The names that code takes from its module; those of attributes alone are not among them."""
    steps = (step for inside in codes_of(code) for step in dis.get_instructions(inside))
    return frozenset(step.argval for step in steps if step.opname in _READS_GLOBAL)


def _imports(function: types.FunctionType) -> list[types.ModuleType]:
    """The modules that a function's code imports when it runs, as far as they can be imported."""
    package, found = function.__globals__.get("__package__") or "", []
    for code in codes_of(function.__code__):
        before: list[Any] = [None, None]
        for step in dis.get_instructions(code):
            if step.opname == "IMPORT_NAME":
                level = before[0] if isinstance(before[0], int) else 0
                try:
                    name = importlib.util.resolve_name("." * level + step.argval, package)
                    found.append(importlib.import_module(name))
                except Exception:  # the code that imports it may do without
                    continue
            before = [before[1], step.argval]
    return found
