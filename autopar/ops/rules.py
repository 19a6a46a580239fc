"""Importing this registers every rule."""

from autopar.ops import rules_basic, rules_index, rules_math, rules_nn, rules_pointwise, rules_spatial

__all__ = ["rules_basic", "rules_index", "rules_math", "rules_nn", "rules_pointwise", "rules_spatial"]
