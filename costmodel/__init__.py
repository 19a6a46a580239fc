"""Seconds and bytes: what an operation, a collective, a schedule and a whole training step cost."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.costmodel.inference import InferenceEstimate, estimate_inference
    from autopar.costmodel.predict import predict
    from autopar.costmodel.rows import estimate_row
    from autopar.costmodel.shape import ParallelConfig, TransformerShape
    from autopar.costmodel.step import Estimate, estimate

__all__ = [
    "Estimate",
    "InferenceEstimate",
    "ParallelConfig",
    "TransformerShape",
    "estimate",
    "estimate_inference",
    "estimate_row",
    "predict",
]

_HOME = {
    "Estimate": "step",
    "estimate": "step",
    "estimate_row": "rows",
    "InferenceEstimate": "inference",
    "estimate_inference": "inference",
    "ParallelConfig": "shape",
    "TransformerShape": "shape",
    "predict": "predict",
}


def __getattr__(name: str) -> Any:
    """Loads the public names on first use: `autopar.cluster` imports this package's devices and links."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
