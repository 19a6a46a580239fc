"""Why a program keeps its natural order."""

from __future__ import annotations


class NotOrdered(Exception):
    """The message says why, as a clause about the program."""
