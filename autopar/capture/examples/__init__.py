"""Example inputs: trees of tensors, batch dims, buckets of shapes."""
