"""From an nn.Module and example inputs to a Program: export, fold, differentiate."""

from autopar.capture.build import capture_program

__all__ = ["capture_program"]
