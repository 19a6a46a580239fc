"""Checkpoints and weights: what every rank writes and reads of them, and the numbered steps of a run's directory."""
