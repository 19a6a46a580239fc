"""The runtime of emitted programs. It needs torch and nothing else, and is copied next to them as `autopar_runtime`."""

from .comm.calls import Handle
from .comm.comm import Comm, Group
from .comm.threads import run_threads
from .errors import (
    CheckpointError,
    CollectiveMismatch,
    CollectiveTimeout,
    ExpertOverflow,
    GuardError,
    RuntimeProgramError,
)
from .gradients.grads import GradEntry, GradStore
from .rank import Rank
from .step.session import Session

__all__ = [
    "CheckpointError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Comm",
    "ExpertOverflow",
    "GradEntry",
    "GradStore",
    "Group",
    "GuardError",
    "Handle",
    "Rank",
    "RuntimeProgramError",
    "Session",
    "run_threads",
]
