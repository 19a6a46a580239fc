"""Bytes that the runtime makes, sends and lets go, found by running its own code over tensors without data."""
