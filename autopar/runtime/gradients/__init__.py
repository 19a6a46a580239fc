"""Gradients on their way to the optimizer: accumulated, bucketed, compressed; and storage shards gathered for use."""
