"""Imports run one way: every source file belongs to a room, and a room imports only rooms that stand before it.

Imports are read from the source, those for types and those inside functions included, so nothing is left out because it is
not executed.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent

ORDER = """
    errors
    runtime
    counter
    ir
    cluster
    options
    plan
    ops
    costmodel
    optimizer
    capture
    request
    codegen
    passes.rules
    passes.played
    passes.price
    passes.schedule
    passes.lower
    passes.batch
    passes.order
    passes.memory
    passes.check
    passes.account
    passes.solvers
    passes.shard passes.recompute passes.stage passes.branch passes.place
    passes.search
    compiled
    batches
    exchange
    report
    what_if
    program
    forms
    proof
    api
    script
    cli
    integrations
"""
"""Rooms in the order in which they may know each other; rooms in one line do not import each other. A room is a folder or
a module of `autopar/`, the folder beside it of that name, or a folder of `passes/`."""

ROOMS = {
    "runtime": """
        errors
        data
        health
        comm
        memory
        guards
        kernels
        gradients
        rank
        update
        compiled
        program
        step
        checkpoint
        preflight
        run
    """,
    "runtime.kernels": """
        draws fused triton_dropout
        kernels tiles bags random ops softmax scans selection moves losses rnn ctc batch_norm grouped gates convolutions overflow
        attention
        experts
        images
    """,
    "capture": """
        before examples
        source_lines explain dead_code direct_shapes
        while_traced
        exported
        known
        graph
        templates export
        build
    """,
}
"""The same inside large rooms. Modules beside the rooms of one stand in the order too."""
MOST_MODULES = 24
ONE_FAMILY_A_FILE = ("autopar.ops",)
POINTS_ELSEWHERE = ("Of", "That", "Those", "What", "It", "They", "These")

PLACE = {room: place for place, line in enumerate(ORDER.split("\n")) for room in line.split()}
WINGS = ("passes", "costmodel", "codegen")
ENTRANCES = {
    "autopar": "gives the public names when they are asked for",
    "autopar.public": "the public names, which it imports from everywhere",
    "autopar.passes": "imports nothing",
}
"""Packages that are in no room."""
MOST_ROOT_MODULES = 10


def name_of(path: Path) -> str:
    """The module that a file is once autopar is installed."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "autopar" else ("autopar", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {name_of(path): path for folder in ("autopar", *WINGS) for path in (ROOT / folder).rglob("*.py")}


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text())


def imported(module: str) -> Iterator[str]:
    """Full names of what a module imports: modules, or a module and a name in it."""
    package = module if SOURCES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            origin = ".".join(filter(None, (base, node.module)))
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def own_imports(module: str) -> set[str]:
    """The modules of ours that a module imports. `from autopar.ir import spec` imports the module `autopar.ir.spec`."""
    found = set()
    for name in imported(module):
        while name and name not in SOURCES:
            name = name.rpartition(".")[0]
        found |= {name} if name else set()
    return found


def room(module: str) -> str:
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[0] == "passes" else 1])


@functools.cache
def imports() -> dict[str, set[str]]:
    """Per module those of ours that it imports; read when a test asks, as other tests import this file for its paths alone."""
    return {module: own_imports(module) for module in SOURCES}


@functools.cache
def arrows() -> list[tuple[str, str]]:
    """The imports between modules that are in rooms: who, whom."""
    return [(a, b) for a, targets in imports().items() for b in sorted(targets) if {a, b}.isdisjoint(ENTRANCES)]


def test_every_file_belongs_to_a_room() -> None:
    assert len(SOURCES) > 200
    assert {room(module) for module in SOURCES.keys() - ENTRANCES.keys()} == PLACE.keys()


def inner_place(outer: str, module: str) -> int | None:
    """The line of `ROOMS[outer]` that a module belongs to, None where it lies elsewhere or is the package itself."""
    names = module.removeprefix(f"autopar.{outer}.").split(".")
    lines = enumerate(ROOMS[outer].split("\n"))
    return (
        None if not module.startswith(f"autopar.{outer}.") else next(k for k, line in lines if names[0] in line.split())
    )


@pytest.mark.parametrize("outer", ROOMS)
def test_no_import_goes_up_inside_a_room(outer: str) -> None:
    inner = [m for m in SOURCES if m.startswith(f"autopar.{outer}.")]
    assert {m.removeprefix(f"autopar.{outer}.").split(".")[0] for m in inner} == set(ROOMS[outer].split())
    up = []
    for a, b in arrows():
        above, below = inner_place(outer, a), inner_place(outer, b)
        own = a.removeprefix(f"autopar.{outer}.").split(".")[0] == b.removeprefix(f"autopar.{outer}.").split(".")[0]
        if above is not None and below is not None and not own and above < below:
            up.append(f"{a} imports {b}")
    assert not up, "\n".join(up)


def test_no_folder_is_a_corridor() -> None:
    """Modules of a folder are seen at a glance; what is one family a file is looked up by its name."""
    modules = Counter(module.rpartition(".")[0] for module, path in SOURCES.items() if path.name != "__init__.py")
    assert {folder: n for folder, n in modules.items() if n > MOST_MODULES and folder not in ONE_FAMILY_A_FILE} == {}


def test_only_the_users_names_stand_outside_the_order() -> None:
    assert imports()["autopar.passes"] == set()
    assert [module for module in SOURCES if "autopar" in imports()[module]] == []


def test_no_import_goes_up() -> None:
    up = [f"{a} imports {b}" for a, b in arrows() if room(a) != room(b) and PLACE[room(a)] <= PLACE[room(b)]]
    assert not up, "\n".join(up)


def test_no_circle_of_modules() -> None:
    circles = [sorted(group) for group in nx.strongly_connected_components(nx.DiGraph(arrows())) if len(group) > 1]
    assert circles == []
    assert [a for a, b in arrows() if a == b] == []


def test_the_runtime_imports_torch_and_the_standard_library_alone() -> None:
    """The runtime is copied beside emitted programs, where nothing else may be installed and autopar is not: its own
    modules it imports relatively."""
    for module in filter(in_runtime, SOURCES):
        others = {name.split(".")[0] for name in imported(module) if not name.startswith("autopar.runtime.")}
        allowed = {"triton"} if _is_of_triton(module) else set()
        assert others <= {"torch", *allowed, *sys.stdlib_module_names}, module
        absolute = [n.module for n in ast.walk(tree_of(module)) if isinstance(n, ast.ImportFrom) and not n.level]
        assert not any((name or "").startswith("autopar") for name in absolute), module


def _is_of_triton(module: str) -> bool:
    """Whether a module has kernels of Triton, which torch for CUDA brings along, and its CPU build does not."""
    return module.rpartition(".")[2].startswith("triton_")


def test_what_imports_triton_is_imported_where_a_kernel_is_launched() -> None:
    for module in SOURCES:
        at_start = ast.Module([node for node in tree_of(module).body if isinstance(node, ast.ImportFrom)], [])
        names = {alias.name for node in ast.walk(at_start) if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert _is_of_triton(module) or not any(name.startswith("triton_") for name in names), module


def in_runtime(module: str) -> bool:
    return module not in ENTRANCES and room(module) == "runtime"


def test_errors_import_nothing_of_ours() -> None:
    assert imports()["autopar.errors"] == set()


def test_the_root_of_autopar_is_seen_at_a_glance() -> None:
    modules = sorted(path.name for path in (ROOT / "autopar").glob("*.py"))
    assert len(modules) <= MOST_ROOT_MODULES, modules


def test_no_import_hides_in_a_string() -> None:
    """`importlib.import_module` and `__import__` serve modules of the user alone, never our own."""
    found = []
    for module in sorted(SOURCES):
        for node in ast.walk(tree_of(module)):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "find_spec", "spec_from_file_location"):
                texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                found += [f"{module}:{node.lineno}"] * any(str(text).startswith(("autopar", ".")) for text in texts)
    assert not found, "\n".join(found)


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings of a file, each with its line: of modules, classes and functions, and those under attributes."""
    if path.suffix != ".py":
        text = path.read_text()
        yield from ((text[: m.start()].count("\n") + 1, m[1]) for m in re.finditer(r'^\s*"""(.+)', text, re.MULTILINE))
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


@pytest.mark.parametrize("folder", ["autopar", *WINGS, "tests", "benchmarks", "examples"])
def test_docstrings_have_a_subject(folder: str) -> None:
    """A stranger who reads one alone is told what it is about: none opens with a word that points elsewhere."""
    found = []
    files = {*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.py.j2")}
    for path in sorted(files):
        for line, text in texts_of(path):
            first = (text.split() or ["-"])[0].strip(",:;.")
            found += [f"{path.relative_to(ROOT)}:{line} opens with {first!r}"] if first in POINTS_ELSEWHERE else []
    assert not found, "\n".join(found)
