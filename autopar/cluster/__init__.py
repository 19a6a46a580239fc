"""The machine: devices with their memory and tiers, links between them, presets and cluster files."""

from autopar.cluster.spec import ClusterSpec, scaled

__all__ = ["ClusterSpec", "scaled"]
