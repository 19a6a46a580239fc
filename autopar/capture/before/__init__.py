"""What a model has and holds before it is traced: its Python state, and what no trace carries over."""
