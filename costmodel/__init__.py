"""Seconds and bytes: what an operation, a collective, a schedule and a whole training step cost."""

from autopar.costmodel.estimator.inference import InferenceEstimate, estimate_inference
from autopar.costmodel.estimator.rows import estimate_row
from autopar.costmodel.estimator.shape import ParallelConfig, TransformerShape
from autopar.costmodel.estimator.step import Estimate, estimate
from autopar.costmodel.estimator.workload import StepPlan
from autopar.costmodel.software import Software

__all__ = [
    "Estimate",
    "InferenceEstimate",
    "ParallelConfig",
    "Software",
    "StepPlan",
    "TransformerShape",
    "estimate",
    "estimate_inference",
    "estimate_row",
]
