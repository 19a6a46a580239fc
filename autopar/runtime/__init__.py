"""The runtime of emitted programs. It needs torch and nothing else, and is copied next to them as `autopar_runtime`."""

from .calls import Handle
from .comm import Comm, Group
from .errors import (
    CheckpointError,
    CollectiveMismatch,
    CollectiveTimeout,
    ExpertOverflow,
    GuardError,
    RuntimeProgramError,
)
from .grads import GradEntry, GradStore
from .rank import Rank
from .session import Session
from .threads import run_threads

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
