"""Which meshes are tried for so many ranks: the one that the options force, or a few that keep fast links inside."""

from __future__ import annotations

from autopar.cluster import ClusterSpec
from autopar.ir.mesh import Mesh
from autopar.options import Options


def candidate_meshes(cluster: ClusterSpec, options: Options, ranks: int | None = None) -> list[Mesh]:
    """The forced mesh, or: one axis over all ranks, and two axes with the inner one inside the fast links.

    ranks: of a stage of a pipeline (default: the whole cluster).
    """
    ranks = cluster.size if ranks is None else ranks
    forced = options.forced_mesh(ranks, cluster.size)
    if forced is not None:
        return [forced]
    meshes = [Mesh.of(dp=ranks)]
    fast = cluster.levels[0].group_size if cluster.levels else ranks
    inner = sorted({k for k in (2, 4, 8, fast) if 1 < k < ranks and ranks % k == 0 and k <= fast}, reverse=True)
    for k in inner[:3]:
        meshes.append(Mesh.of(dp=ranks // k, tp=k))
    return meshes
