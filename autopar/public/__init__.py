"""The names that users of autopar write, each imported from where it is made."""

from autopar.api import compile, pareto
from autopar.capture.known.known_blocks import forward_of
from autopar.cluster import ClusterSpec
from autopar.compiled import Prediction
from autopar.errors import (
    AutoparError,
    CaptureError,
    CheckError,
    ClusterError,
    ConstraintError,
    CoupledError,
    EmitError,
    InfeasibleError,
    InputError,
    MemoryLimitError,
    PlanError,
    ShardingError,
)
from autopar.ops.custom import register_op
from autopar.ops.experts import experts
from autopar.ops.grouped import grouped_mm
from autopar.ops.scan import linear_scan
from autopar.options import Entry, Options
from autopar.plan import Plan
from autopar.program import ParallelProgram
from autopar.program import ParallelProgram as Program
from autopar.proof.check import Check, check
from autopar.proof.random_plans import random_plan
from autopar.proof.verify import Verification, verify
from autopar.report.run_result import RunResult
from autopar.runtime.errors import ExpertOverflow, GuardError
from autopar.runtime.program.rows import DataShard
from autopar.runtime.run.loaded import load
from autopar.runtime.update.update_rule import ClipNorm, LossScaling, UpdateRule
from autopar.script.parallelize import parallelize
from autopar.script.step import Step

__all__ = [
    "AutoparError",
    "CaptureError",
    "Check",
    "CheckError",
    "ClipNorm",
    "ClusterError",
    "ClusterSpec",
    "ConstraintError",
    "CoupledError",
    "DataShard",
    "EmitError",
    "Entry",
    "ExpertOverflow",
    "GuardError",
    "InfeasibleError",
    "InputError",
    "LossScaling",
    "MemoryLimitError",
    "Options",
    "ParallelProgram",
    "Plan",
    "PlanError",
    "Prediction",
    "Program",
    "RunResult",
    "ShardingError",
    "Step",
    "UpdateRule",
    "Verification",
    "check",
    "compile",
    "experts",
    "forward_of",
    "grouped_mm",
    "linear_scan",
    "load",
    "parallelize",
    "pareto",
    "random_plan",
    "register_op",
    "verify",
]
