"""Which meshes are tried for so many ranks: the one that the options force, or a few that keep fast links inside.

A number of ranks with an odd part, such as 96 = 3 · 32, is rarely a divisor of tensor dims, most of which are multiples of
powers of two. There two more axes are tried, as in hybrid sharded data parallelism: `dp` over the power of two, which
parameters can be sharded over, and `replica` over the odd part, which they may be replicated over.

Where a microbatch has so few rows that the ranks which share one do not fit into the fast links, there are three axes: `dp` takes
the rows, `cp` shares them, `tp` is inside.

A third axis may be faster (`finer_meshes`): experts, sequences, or shards of what is replicated
across nodes then have an axis between those of the rows and of the fast links, of any size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from autopar.cluster import ClusterSpec
from autopar.ir.mesh import Mesh
from autopar.options import MEGATRON, MESH_AXES, Options
from autopar.passes.shard.uneven import for_rows

REPLICA = "replica"
"""The axis over the odd part of a number of ranks."""


CONTEXT = "cp"
"""The axis whose ranks share sequences."""


def odd_part(n: int) -> int:
    """The odd part of n: n without its factors of two (3 of 96)."""
    return n // (n & -n)


def sharing_rows(mesh: Mesh, rows: int | None, options: Options) -> Mesh:
    """The mesh with shares of rows where these do not divide (`for_rows`), along axes that take them. The last axis, whatever its
    name, takes weights where the strategy is Megatron's. rows: of a microbatch, where they are known."""
    if options.strategy not in MEGATRON or mesh.axes[-1][1] == 1:
        return for_rows(mesh, rows, options.rebalance)
    return Mesh((*for_rows(Mesh(mesh.axes[:-1]), rows, options.rebalance).axes, mesh.axes[-1]), mesh.offset)


def candidate_meshes(
    cluster: ClusterSpec, options: Options, ranks: int | None = None, rows: int | None = None
) -> list[Mesh]:
    """The forced mesh, or those with the sizes of axes that are asked for, or: one axis over all ranks, two axes with the inner
    one inside the fast links, the odd part apart, and three axes where a microbatch has fewer rows than there are ranks to take
    them.

    ranks: of a stage of a pipeline (default: the whole cluster). rows: of a microbatch, where they are known.
    """
    whole, ranks = ranks is None, cluster.size if ranks is None else ranks
    forced = options.forced_mesh(ranks, cluster.size)
    if forced is not None:
        return [sharing_rows(forced, rows, options)]
    fast, inner = _fast(cluster, ranks), _inner(cluster, ranks)
    if options.axes is not None:
        return [sharing_rows(mesh, rows, options) for mesh in _with_axes(options.axes, ranks, [1, *inner])]
    meshes = [Mesh.of(dp=ranks)]
    for k in inner[:3]:
        meshes.append(Mesh.of(dp=ranks // k, tp=k))
    if rows is not None:
        meshes += _context_meshes(ranks, rows, fast, inner[:2] if whole else inner[:1])
    odd = odd_part(ranks)
    if 1 < odd < ranks and (odd, ranks // odd) not in {tuple(mesh.sizes.values()) for mesh in meshes}:
        meshes.append(Mesh.of(**{REPLICA: odd, "dp": ranks // odd}))
    return [sharing_rows(mesh, rows, options) for mesh in meshes]


def finer_meshes(
    cluster: ClusterSpec, options: Options, middle: str, ranks: int, rows: int | None = None
) -> list[Mesh]:
    """Meshes of so many ranks with an axis `middle`, a power of two of them, inside `dp`: around an axis `tp` inside the fast
    links, or by itself and across these. None where the options say axes. rows: as of `candidate_meshes`."""
    if options.mesh is not None or options.axes is not None:
        return []
    meshes, fast = [], _fast(cluster, ranks)
    for k in (*_inner(cluster, ranks)[:3], 1):
        rest, between = ranks // k, 2
        while rest % between == 0 and rest > between:
            if k > 1 or between > fast:
                meshes.append(Mesh.of(**{"dp": rest // between, middle: between, **({"tp": k} if k > 1 else {})}))
            between *= 2
    return [sharing_rows(mesh, rows, options) for mesh in meshes]


def _inner(cluster: ClusterSpec, ranks: int) -> list[int]:
    """Sizes of an inner axis of so many ranks, the largest first."""
    fast = _fast(cluster, ranks)
    return sorted({k for k in (2, 4, 8, fast) if 1 < k < ranks and ranks % k == 0 and k <= fast}, reverse=True)


def _fast(cluster: ClusterSpec, ranks: int) -> int:
    """How many ranks the fast links join."""
    return cluster.levels[0].group_size if cluster.levels else ranks


def _with_axes(axes: Mapping[str, int], ranks: int, inner: Sequence[int]) -> Iterator[Mesh]:
    """The meshes of so many ranks whose axes have these sizes; where they are not named `tp` takes one of `inner`, or all that
    is left of a `dp` that is, and `dp` the rest. None where that leaves ranks over."""
    rest, over = divmod(ranks, math.prod(axes.values()))
    if over or not rest:
        return
    for k in (1,) if "tp" in axes else (rest,) if "dp" in axes else inner:
        free = {"dp": rest // k, "tp": k}
        sizes = {name: axes.get(name, free.get(name, 1)) for name in MESH_AXES}
        if math.prod(sizes.values()) == ranks:
            yield Mesh.of(**({name: n for name, n in sizes.items() if n > 1} or {"dp": 1}))


def _context_meshes(ranks: int, rows: int, fast: int, inner: Sequence[int]) -> list[Mesh]:
    """`dp` over as many ranks as there are rows for, `cp` over the rest, which share sequences, and `tp` inside the fast links;
    none where all that share a row fit into these, as two axes do then."""
    meshes = []
    for k in inner:
        data = math.gcd(rows, ranks // k)
        if 1 < data < ranks // k and ranks // data > fast:
            meshes.append(Mesh.of(**{"dp": data, CONTEXT: ranks // k // data, "tp": k}))
    return meshes
