"""Before a run: what is wrong with its machines, and what to set. `main.py` shows the flow."""
