"""Loops over experts in code of the user's own: a run of them on numbers tells what they compute."""
