"""Formulas of the reference texts, kept as oracles."""
