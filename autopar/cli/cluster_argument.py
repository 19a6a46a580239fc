"""The argument `--cluster` of command lines."""

from __future__ import annotations

from pathlib import Path

from autopar.cluster import ClusterSpec


def read_cluster(name: str, nodes: int) -> ClusterSpec:
    """A preset with so many nodes, or a file. Raises ClusterError."""
    if Path(name).suffix in (".json", ".yaml", ".yml"):
        return ClusterSpec.from_file(name)
    return ClusterSpec.preset(name, nodes=nodes)
