"""Seconds of ops, messages and moves to memory tiers."""
