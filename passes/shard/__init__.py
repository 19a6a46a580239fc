"""Sharding: specs, their conversions, and the solver that chooses them."""
