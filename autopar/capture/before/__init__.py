"""The model before it is traced: its Python state, and what no trace carries over."""
