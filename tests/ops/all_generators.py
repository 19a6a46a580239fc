"""GENERATORS with the entries of every family: each of these modules adds its own when it is imported."""

from __future__ import annotations

from tests.ops import (
    generators_bags,
    generators_experts,
    generators_images,
    generators_index,
    generators_losses,
    generators_nn,
    generators_scans,
    generators_views,
)
from tests.ops.generators import GENERATORS, Draw

FAMILIES = (
    generators_bags,
    generators_experts,
    generators_images,
    generators_index,
    generators_losses,
    generators_nn,
    generators_scans,
    generators_views,
)
__all__ = ["FAMILIES", "GENERATORS", "Draw"]
