"""Bytes alive in a lowered program at every point of its schedule."""
