"""Branches of the captured graph: what lies between blocks is cut where one branch ends and another begins.

Three encoders are captured one after another, and without care the end of one and the start of the next would share a
segment: a knot where the model has none. So intervals between blocks are looked at as pieces of one module each. Pieces
and blocks are compared (`autopar.ir.unordered`); where the model branches, a cut goes wherever the set of what is unordered
changes. Models that are a
chain are left as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import fx

from autopar.capture.graph.cast_marks import is_cast, may_part, shown
from autopar.ir.program import is_getitem
from autopar.ir.unordered import branch, unordered

Group = tuple[str, list[fx.Node]]
"""A block's path ("" between blocks) and its nodes in order."""


def cut_at_branches(
    groups: Sequence[Group], path_of: Callable[[fx.Node], str], parameters: set[fx.Node]
) -> list[Group]:
    """The groups ("" in front of those between blocks), those between blocks cut where branches meet."""
    weight = {n: _work(n, parameters) for _, members in groups for n in members}
    total = sum(weight.values())
    if not total:
        return list(groups)
    module = _modules({n: path_of(n) for n in weight}, weight)
    pieces = [
        (g, part)
        for g, (block, members) in enumerate(groups)
        for part in ([members] if block else _by_module(members, module))
    ]
    share = [sum(weight[n] for n in part) / total for _, part in pieces]
    concurrent = unordered(_edges([part for _, part in pieces]), share)
    if not branch(share, concurrent):
        return list(groups)
    merged: list[tuple[int, frozenset[int], list[fx.Node]]] = []
    for (g, part), others in zip(pieces, concurrent, strict=True):
        if merged and merged[-1][:2] == (g, others):
            merged[-1][2].extend(part)
        else:
            merged.append((g, others, list(part)))
    return [(groups[g][0], members) for g, _, members in merged]


def _work(node: fx.Node, parameters: set[fx.Node]) -> float:
    """About the multiplications of products with a parameter; a look-up has none."""
    if "embedding" in str(node.target) or is_cast(node):
        return 0.0
    inner = [
        math.prod(r.meta["val"].shape[1:])
        for r in map(shown, node.all_input_nodes)
        if r in parameters and len(r.meta["val"].shape) > 1
    ]
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    sizes = [math.prod(v.shape) for v in values if v is not None and hasattr(v, "shape")]
    return float(max(inner, default=0) * sum(sizes))


def _modules(paths: dict[fx.Node, str], weight: dict[fx.Node, float]) -> dict[fx.Node, str]:
    """The module of every node at the level where no single one does almost all the work (four levels at most)."""
    for depth in range(1, 5):
        modules = {n: ".".join(p.split(".")[:depth]) for n, p in paths.items()}
        sums: dict[str, float] = {}
        for n, name in modules.items():
            sums[name] = sums.get(name, 0.0) + weight[n]
        if max(sums.values()) < 0.9 * sum(sums.values()):
            break
    return modules


def _by_module(members: list[fx.Node], module: dict[fx.Node, str]) -> list[list[fx.Node]]:
    borders = enumerate(pairwise(members), 1)
    starts = [i for i, (a, b) in borders if module[a] != module[b] and not is_getitem(b) and may_part(a, b)]
    return [members[i:j] for i, j in pairwise([0, *starts, len(members)])]


def _edges(pieces: Sequence[list[fx.Node]]) -> list[list[int]]:
    home = {n: i for i, members in enumerate(pieces) for n in members}
    return [
        sorted({home[r] for n in members for r in n.all_input_nodes if home.get(r, i) != i})
        for i, members in enumerate(pieces)
    ]
