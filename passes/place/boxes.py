"""Placements of a grid in boxes: every group of devices runs so many ranks next to each other along each axis.

A mesh of dp=8 and tp=2 in two stages fills nodes of 8 ranks with one of

    dp x tp x stages = 8 x 1 x 1, 4 x 2 x 1, 4 x 1 x 2, 2 x 2 x 2;

groups of the levels above are boxes of these boxes. Boxes are where the bound by lines is reached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

import numpy as np

from autopar.passes.place.traffic import Traffic, Tree

MOST = 256
"""Boxes of a cluster that are looked at."""


def cheapest_boxes(traffic: Traffic, tree: Tree) -> np.ndarray | None:
    """(P,) device of each logical rank in the cheapest boxes; None where ranks are no grid, or groups of a level not alike."""
    grid = _grid(traffic)
    counts = [np.bincount(row) for row in tree.groups]
    if grid is None or tree.kinds.any() or any(len(set(count.tolist())) > 1 for count in counts):
        return None
    coordinates, sizes = grid
    devices = np.lexsort(tree.groups)
    best: tuple[float, np.ndarray] | None = None
    groups = [1, *(int(count[0]) for count in counts)]
    for boxes in islice(_boxes(sizes, [after // before for before, after in pairwise(groups)]), MOST):
        keys, inside = [], np.ones(len(sizes), int)
        for box in boxes:
            keys += list(coordinates // inside[:, None] % np.array(box)[:, None])
            inside = inside * box
        position = np.empty(len(devices), int)
        position[np.lexsort(keys)] = devices
        cost = tree.cost(traffic, position)
        if best is None or cost < best[0]:
            best = cost, position
    return None if best is None else best[1]


def _grid(traffic: Traffic) -> tuple[np.ndarray, list[int]] | None:
    """(axes, P) coordinates of ranks by their places on their lines, and the sizes of the axes; None where these are no grid."""
    if not traffic.lines:
        return None
    places = np.array([traffic.place_on_line(axis) for axis in range(len(traffic.lines))])
    sizes = [int(place.max()) + 1 for place in places]
    whole = int(np.prod(sizes)) == traffic.ranks
    return (places, sizes) if whole and len(np.unique(places, axis=1).T) == traffic.ranks else None


def _boxes(sizes: Sequence[int], counts: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Per level, innermost first, the sizes of boxes of so many boxes of the level below that fill a grid."""
    if not counts:
        yield []
        return
    for box in _factors(sizes, counts[0]):
        left = [size // part for size, part in zip(sizes, box, strict=True)]
        yield from ([box, *others] for others in _boxes(left, counts[1:]))


def _factors(sizes: Sequence[int], count: int) -> Iterator[tuple[int, ...]]:
    """Divisors of the sizes with this product."""
    if not sizes:
        yield from [()] if count == 1 else []
        return
    for part in range(1, min(sizes[0], count) + 1):
        if sizes[0] % part == 0 and count % part == 0:
            yield from ((part, *others) for others in _factors(sizes[1:], count // part))
