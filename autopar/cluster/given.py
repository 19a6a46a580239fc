"""The ways to say which cluster: a spec, a file, the name of a preset, or "here"."""

from __future__ import annotations

from pathlib import Path

from autopar.cluster.here import HERE, cluster_here
from autopar.cluster.spec import ClusterSpec
from autopar.errors import InputError


def as_cluster(cluster: ClusterSpec | str | Path) -> ClusterSpec:
    """A ClusterSpec from a spec, a file, a preset's name, or "here" (`autopar.cluster.here`)."""
    if isinstance(cluster, ClusterSpec):
        return cluster
    if cluster == HERE:
        return cluster_here()
    if isinstance(cluster, (str, Path)):
        if Path(cluster).suffix in (".yaml", ".yml", ".json") or Path(cluster).is_file():
            return ClusterSpec.from_file(cluster)
        return ClusterSpec.preset(str(cluster))
    raise InputError(f"cluster must be a ClusterSpec, a preset's name or a file, not {type(cluster).__name__}")
