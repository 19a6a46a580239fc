"""A session: stages of a rank, its pipeline, its state, and everything that one training step runs."""
