"""Command lines: autopar-dump, autopar-estimate, autopar-calibrate."""
