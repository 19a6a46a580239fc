"""The argument `--cluster` of command lines."""

from __future__ import annotations

from pathlib import Path

from autopar.cluster import ClusterSpec
from autopar.cluster.here import HERE, cluster_here


def read_cluster(name: str, nodes: int) -> ClusterSpec:
    """A preset with so many nodes, a file, or this machine ("here"). Raises ClusterError, LaunchError."""
    if name == HERE:
        return cluster_here()
    if Path(name).suffix in (".json", ".yaml", ".yml"):
        return ClusterSpec.from_file(name)
    return ClusterSpec.preset(name, nodes=nodes)
