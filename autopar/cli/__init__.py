"""Command lines: autopar, autopar-dump, autopar-estimate, autopar-calibrate, autopar-export."""
