"""Functions about OR-Tools that the solvers of several rooms share."""
