"""From an nn.Module and example inputs to a Program: export, fold, differentiate."""

from autopar.capture import (  # noqa: F401  imported for the modules that they know
    known_recurrences,
    known_torch,
    known_transformers,
)
from autopar.capture.build import capture_program

__all__ = ["capture_program"]
