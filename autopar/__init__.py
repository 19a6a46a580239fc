"""autopar: a plain PyTorch model and a cluster in, one readable parallel PyTorch program per rank out."""

from autopar.api import compile
from autopar.cluster import ClusterSpec
from autopar.compiled import ParallelProgram, Prediction, RunResult
from autopar.compiled import ParallelProgram as Program
from autopar.errors import (
    AutoparError,
    CaptureError,
    CheckError,
    ClusterError,
    ConstraintError,
    EmitError,
    InfeasibleError,
    InputError,
    MemoryLimitError,
    PlanError,
    ShardingError,
)
from autopar.fuzz import random_plan
from autopar.ops.custom import register_op
from autopar.options import Options
from autopar.plan import Plan
from autopar.runtime.launch import load
from autopar.runtime.update_rule import ClipNorm, LossScaling, UpdateRule
from autopar.verify import Verification, verify

__version__ = "0.1.0"
__all__ = [
    "AutoparError", "CaptureError", "CheckError", "ClipNorm", "ClusterError", "ClusterSpec", "ConstraintError", "EmitError",
    "InfeasibleError", "InputError", "LossScaling", "MemoryLimitError", "Options", "ParallelProgram", "Plan", "PlanError",
    "Prediction", "Program", "RunResult", "ShardingError", "UpdateRule", "Verification", "compile", "load", "random_plan",
    "register_op", "verify",
]  # fmt: skip
