"""Where a repetition ends is found from what an earlier start found, and is what looking at every item anew finds."""

from __future__ import annotations

import random

from autopar.codegen.marks import Shape
from autopar.codegen.repeats import _growth, _repeats_until


def looked_at_anew(shapes: list[Shape], start: int, period: int) -> int:
    i = start + period
    while i < len(shapes) and shapes[i][0] == shapes[i - period][0]:
        if i >= start + 2 * period and _growth(shapes, i, period) != _growth(shapes, i - period, period):
            break
        i += 1
    return i


def test_ends_are_those_of_looking_at_every_item() -> None:
    for seed in range(400):
        pick = random.Random(seed)
        count = pick.randint(1, 40)
        shapes: list[Shape] = [
            (pick.choice("aab"), (pick.choice((i, i // 2, 0, pick.randint(0, 3))),)) for i in range(count)
        ]
        ends: dict[int, int] = {}
        for start in sorted(pick.sample(range(count), pick.randint(1, count))):
            for period in range(1, count - start):
                if shapes[start + period][0] == shapes[start][0]:
                    assert _repeats_until(shapes, start, period, ends) == looked_at_anew(shapes, start, period)
