"""The machine: devices with their memory and tiers, links between them, presets and cluster files."""

from autopar.cluster.spec import ClusterSpec, resized, scaled, with_slower

__all__ = ["ClusterSpec", "resized", "scaled", "with_slower"]
