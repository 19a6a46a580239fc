"""Which plans to try, and why none fits."""
