"""Plans with stages: the program is cut, and groups of ranks run a part each, one after another or side by side."""
