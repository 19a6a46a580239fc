"""What the runtime does with bytes, found by running its own code over tensors without data."""
