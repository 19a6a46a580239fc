"""A run from start to end: launch, training loop, metrics, owners, machines left out, and ranks that end early."""
