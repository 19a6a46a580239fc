"""Local implementations of the ops that emitted programs call beyond plain torch."""
