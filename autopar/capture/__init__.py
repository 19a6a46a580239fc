"""From an nn.Module and example inputs to a Program: export, fold, differentiate."""

from autopar.capture.build import capture_program
from autopar.capture.known import known_recurrences, known_torch, known_transformers  # noqa: F401  imported for the modules that they know

__all__ = ["capture_program"]
