"""What the solvers of several rooms share about OR-Tools."""
