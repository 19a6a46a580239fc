"""Transformers by closed formula: seconds and bytes of published runs and of plans without a graph."""
