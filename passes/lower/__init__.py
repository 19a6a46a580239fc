"""Lowering: program and plan in, local lines out. A deterministic function of the two."""

from autopar.passes.lower.pipeline import lower, outline

__all__ = ["lower", "outline"]
