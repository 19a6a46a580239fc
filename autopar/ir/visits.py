"""To how many places rows go that choose some of many, each place once."""

from __future__ import annotations


def visits(places: int, choices: int) -> float:
    """How many of so many places one row visits on average, which chooses one of them so many times at random: 1.97 of 2 with
    6 choices, 4.42 of 8."""
    return places * (1 - (1 - 1 / places) ** choices)
