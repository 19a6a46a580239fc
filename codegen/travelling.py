"""The modules of the runtime that a program needs: those its files import, and what these import in turn.

A program of products alone carries no attention, no mixtures and no halos. Imports are read from the text, those inside
functions included, so what only an option of run.py asks for travels too.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from autopar import runtime

PACKAGE = "autopar_runtime"


def runtime_files(programs: Iterable[Mapping[str, bytes]]) -> dict[str, bytes]:
    """The runtime's files that travel with programs, by name. programs: the own files of each by name."""
    texts = (text.decode() for files in programs for path, text in files.items() if path.endswith(".py"))
    wanted = {name for text in texts for name in _imported(text, "")}
    return {f"{PACKAGE}/{path}": content for path, content in _needed(frozenset(wanted)).items()}


@functools.cache
def _needed(names: frozenset[str]) -> dict[str, bytes]:
    """Files of the runtime by path, from the full names that a program imports."""
    modules = _modules()
    needed: set[str] = set()
    coming = list(names)
    while coming:
        module = _module_of(coming.pop(), modules)
        if module is not None and module not in needed:
            needed.add(module)
            path = modules[module]
            coming += _imported(path.read_text(), module if path.name == "__init__.py" else module.rpartition(".")[0])
            coming.append(module.rpartition(".")[0])
    folder = _folder()
    return {modules[module].relative_to(folder).as_posix(): modules[module].read_bytes() for module in sorted(needed)}


def _folder() -> Path:
    return Path(inspect.getfile(runtime)).parent


@functools.cache
def _modules() -> dict[str, Path]:
    """The runtime's modules by their full names in a program."""
    found = {}
    for path in _folder().rglob("*.py"):
        parts = path.relative_to(_folder()).with_suffix("").parts
        found[".".join((PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


def _module_of(name: str, modules: Iterable[str]) -> str | None:
    """The module that a full name is, or is in; None where it is none of the runtime's."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def _imported(text: str, package: str) -> Iterator[str]:
    """Full names that a file imports. package: the one that its relative imports start from."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)
