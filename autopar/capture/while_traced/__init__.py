"""Watchers and stand-ins while `forward` is traced: for decisions, random branches, clocks, constants, casts."""
