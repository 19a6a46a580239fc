"""Fold: cut the captured graph into segments and keep equal ones once.

The graph is in topological order, so any cut into intervals is convex. Nodes that belong to a numbered child of a
repeated container (`layers.0`, `layers.1`, …: read from `nn_module_stack`) form one segment per child; what lies
between forms its own. Two segments are the same template when their ops, constants, shapes and wiring are equal.

A model with few blocks is cut further, so that there is something to make pipeline stages of: its unrepeated intervals
are halved, the heaviest first, between two modules (in a model without modules: between two ops), where the halves
weigh about the same and little crosses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import fx

from autopar.capture.graph.cast_marks import is_cast, may_part, shown
from autopar.capture.source_lines import is_block, module_path, own_path
from autopar.capture.templates.branches import Group, cut_at_branches
from autopar.capture.while_traced import functions
from autopar.ir.program import is_getitem

LEAST_SEGMENTS = 8
MANY_LAYERS = 32
"""So many layers of torch that compute alike in a container are blocks, and are traced once."""


@dataclass(frozen=True)
class Segment:
    """An interval of the captured graph: `nodes` in order, `reads` (outside nodes in first-use order), `writes`.

    path: the module that it is, or that holds it. start: the module that its first op belongs to.
    """

    nodes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    path: str
    start: str


def block_of(node: fx.Node, families: dict[str, int]) -> str:
    """The outermost numbered child of a repeated container that the node belongs to, or ''."""
    stack = node.meta.get("nn_module_stack") or {}
    for key, (path, _) in stack.items():
        own = own_path(path)
        head, _, last = own.rpartition(".")
        if last.isdigit() and families.get(head, 0) > 1:
            use = key.rsplit("@", 1)[1] if "@" in key else ""
            return f"{own}@{use}" if use else own
    return ""


def repeated_containers(nodes: list[fx.Node]) -> dict[str, int]:
    """Container path -> how many of its numbered children are blocks of the most frequent kind: modules of one class, or
    torch's own layers where there are many that compute alike."""
    children: dict[str, dict[str, tuple[str, list[object]]]] = {}
    for node in nodes:
        for path, cls in (node.meta.get("nn_module_stack") or {}).values():
            head, _, last = own_path(path).rpartition(".")
            if last.isdigit():
                _, ops = children.setdefault(head, {}).setdefault(last, (str(cls), []))
                if not is_block(str(cls)):
                    ops.append((node.target, *(_shape(read) for read in (node, *node.all_input_nodes))))
    families: dict[str, int] = {}
    for head, own in children.items():
        kinds = Counter((cls, tuple(ops)) for cls, ops in own.values())
        counts = [count for (cls, _), count in kinds.items() if is_block(cls) or count >= MANY_LAYERS]
        families[head] = max(counts, default=0)
    return families


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(getattr(node.meta.get("val"), "shape", ()))


def cut(
    graph: fx.Graph, outputs: set[fx.Node], parameters: set[fx.Node] | None = None, starts: Sequence[str] = ()
) -> list[Segment]:
    """Segments in order; together they hold every op of the graph.

    parameters: the placeholders that are one. starts: paths of modules at which a segment must start.
    """
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    families = repeated_containers(nodes)
    groups: list[Group] = []
    for node in nodes:
        block = block_of(node.args[0] if is_getitem(node) else node, families)
        if groups and (groups[-1][0] == block or is_getitem(node)):
            groups[-1][1].append(node)
        else:
            groups.append((block, [node]))
    groups = cut_at_branches(groups, module_path, parameters or set())
    for path in starts:
        groups = _split_at(groups, path)
    while len(groups) < LEAST_SEGMENTS:
        heavy = sorted((i for i, g in enumerate(groups) if not g[0]), key=lambda i: -_weight(groups[i][1]))
        place = next(((i, at) for i in heavy if (at := _middle(groups[i][1]))), None)
        if place is None:
            break
        i, at = place
        members = groups[i][1]
        groups[i : i + 1] = [("", members[:at]), ("", members[at:])]
    return [_segment(tuple(members), outputs, block or _common(members)) for block, members in groups]


def _split_at(groups: list[Group], path: str) -> list[Group]:
    """The groups with a border before the first op of a module (none, where no op belongs to it)."""
    for g, (block, members) in enumerate(groups):
        for i, node in enumerate(members):
            if (module_path(node) + ".").startswith(path + "."):
                while i and is_getitem(members[i]):
                    i -= 1
                parts = [(block, members[:i]), (block, members[i:])] if i else [(block, members)]
                return [*groups[:g], *parts, *groups[g + 1 :]]
    return groups


def _common(nodes: list[fx.Node]) -> str:
    """The module path that all nodes share."""
    paths = [module_path(n).split(".") for n in nodes]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _numel(node: fx.Node) -> int:
    value: Any = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return sum(math.prod(v.shape) for v in values if hasattr(v, "shape"))


def _weight(nodes: list[fx.Node]) -> float:
    """About the multiplications in an interval: products with a parameter count its inner size."""
    total = 0.0
    for node in nodes:
        if is_cast(node):
            continue
        inner = 1
        for read in map(shown, node.all_input_nodes):
            value: Any = read.meta.get("val")
            if read.op == "placeholder" and hasattr(value, "shape") and len(value.shape) > 1:
                inner = max(inner, math.prod(value.shape[1:]))
        total += _numel(node) * inner
    return total


def _middle(nodes: list[fx.Node]) -> int:
    """Where to halve an interval; 0 where it cannot be."""
    paths = [module_path(n) for n in nodes]
    inner = [i for i in range(1, len(nodes)) if paths[i] != paths[i - 1] and not _tied(nodes, i)]
    places = inner or ([i for i in range(1, len(nodes)) if not _tied(nodes, i)] if not any(paths) else [])
    weights = [0.0, *accumulate(_weight([n]) for n in nodes)]
    whole = weights[-1]
    number = {n: i for i, n in enumerate(nodes)}
    last_use = {r: number[n] for n in nodes for r in n.all_input_nodes if r in number}
    starts, ends = [0] * len(nodes), [0] * len(nodes)  # elements that cross a border from here on, and to here
    for read, last in last_use.items():
        starts[number[read]], ends[last] = _numel(read), ends[last] + _numel(read)
    crossing = list(accumulate((s - e for s, e in zip(starts, ends, strict=True)), initial=0))
    best, least = 0, float("inf")
    for at in places:
        cost = abs(2 * weights[at] - whole) / max(whole, 1.0) + 0.1 * crossing[at] / max(whole, 1.0)
        if 0 < weights[at] < whole and crossing[at] and cost < least:
            best, least = at, cost
    return best


def _tied(nodes: list[fx.Node], i: int) -> bool:
    """Whether no border may be before node i."""
    return is_getitem(nodes[i]) or not may_part(nodes[i - 1], nodes[i])


def _segment(nodes: tuple[fx.Node, ...], outputs: set[fx.Node], block: str) -> Segment:
    inside = set(nodes)
    reads: dict[fx.Node, None] = {}
    for node in nodes:
        for read in node.all_input_nodes:
            if read not in inside:
                reads[read] = None
    writes = tuple(n for n in nodes if n in outputs or any(u not in inside for u in n.users if u.op != "output"))
    return Segment(nodes, tuple(reads), writes, block, next((p for n in nodes if (p := module_path(n))), ""))


def signature(segment: Segment, describe: Callable[[fx.Node], Any]) -> tuple[Any, ...]:
    """Equal for segments that compute the same; `describe(read)` says what a read value is (type, kind, gradient)."""
    number: dict[fx.Node, str] = {}
    for i, read in enumerate(segment.reads):
        number[read] = f"r{i}"
    for i, node in enumerate(segment.nodes):
        number[node] = f"n{i}"

    def freeze(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return number[arg]
        if isinstance(arg, (list, tuple)):
            return tuple(freeze(a) for a in arg)
        if isinstance(arg, dict):
            return tuple(sorted((k, freeze(v)) for k, v in arg.items()))
        return arg if isinstance(arg, (int, float, str, bool, type(None))) else str(arg)

    def op(node: fx.Node) -> Any:
        args = node.args
        if node.target is functions.OP:
            assert isinstance(args[0], int)
            return str(node.target), functions.identity(args[0]), freeze(args[1:])
        return str(node.target), freeze(args), freeze(node.kwargs), tuple(type(a).__name__ for a in args)

    return (
        tuple(describe(r) for r in segment.reads),
        tuple(op(n) for n in segment.nodes),
        tuple(number[w] for w in segment.writes),
    )
