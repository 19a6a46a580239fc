"""From an nn.Module and example inputs to a Program: export, fold, differentiate."""

from autopar.capture import known_recurrences, known_torch, known_transformers  # noqa: F401  imported for the modules that they know
from autopar.capture.build import capture_program

__all__ = ["capture_program"]
