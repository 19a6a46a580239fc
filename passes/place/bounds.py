"""A lower bound of what placements cost: at every level of links, how much of the traffic groups of its sizes can hold at most.

The cost of a placement is d_0 W + sum over levels l of (d_l+1 - d_l) (W - inside_l), of which inside_l, the traffic within the
groups of level l, is all that placements differ in. Two bounds hold for it, and the smaller one counts:

- by rank: half of the heaviest pairs that a rank can have in one group, summed over ranks;
- by lines: ranks of a grid talk along its lines. Say that a group has m_a(i) ranks on rank i's line along axis a. For
  i drawn from the s ranks of a group, entropy says (H(x_a | the other coordinates), summed over a, is at most H(x))

      average over i of sum over a of log m_a(i)  <=  log s,

  and what lies inside a line is shared by its ranks as f_ia(m), so with a price y >= 0 of that budget

      inside_l  <=  y * sum over groups of s log s  +  sum over i of max over m of sum over a of (f_ia(m_a) - y log m_a).

  A box that fills a group reaches it, so a mesh whose inner axes fill nodes is proven to lie well on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.passes.place.traffic import Traffic, Tree

JOINT = 64
"""In groups of up to so many ranks the ranks on the lines of one rank are counted together: m_1 + m_2 + ... <= s + axes - 1."""


def least_cost(traffic: Traffic, tree: Tree) -> float:
    """A lower bound of `Tree.cost` over all placements in which ranks run on devices of their kind."""
    total = float(traffic.weight.sum())
    cost = total * float(tree.distance[0])
    if not total:
        return cost
    lines = Lines.of(traffic)
    for row, step in zip(tree.groups, np.diff(tree.distance), strict=False):
        if step > 0:
            inside = min(_by_rank(traffic, row, tree.kinds), float(_by_lines(lines, np.bincount(row))))
            cost += float(step) * max(0.0, total - inside)
    return cost


def _by_rank(traffic: Traffic, row: np.ndarray, kinds: np.ndarray) -> float:
    """Half of the heaviest pairs of every rank with as many ranks, kind by kind, as some group with its kind has."""
    here, there, weight = traffic.ends
    order = np.lexsort((-weight, kinds[there], here))
    here, there, weight = here[order], kinds[there[order]], weight[order]
    fresh = np.concatenate([[True], (here[1:] != here[:-1]) | (there[1:] != there[:-1])])
    place = np.arange(len(here)) - np.flatnonzero(fresh)[np.cumsum(fresh) - 1]
    counts = np.zeros((int(row.max()) + 1, int(kinds.max()) + 1), int)
    np.add.at(counts, (row, kinds), 1)
    most = np.zeros(traffic.ranks)
    for group in np.unique(counts, axis=0):
        near = place < group[there] - (there == kinds[here])
        inside = np.bincount(here, weight * near, traffic.ranks)
        most = np.where(group[kinds] > 0, np.maximum(most, inside), most)
    return float(most.sum()) / 2


@dataclass(frozen=True, eq=False)
class Lines:
    """Traffic along the lines of its axes, ranks with equal shares of it counted together. off: weight of the pairs on no line.

    count: (classes,) ranks. Of a rank's line along each axis, (classes, axes): length, the ranks on it; all: weight of its pairs
    with every rank of the line where each has as much; first >= second: weights of its two pairs along the ring; closed:
    what the ring is cut through once for less; rest: weight of what else it sends on the line.
    """

    count: np.ndarray
    length: np.ndarray
    all: np.ndarray
    first: np.ndarray
    second: np.ndarray
    closed: np.ndarray
    rest: np.ndarray
    off: float

    @staticmethod
    def of(traffic: Traffic) -> Lines:
        """The traffic of a grid, split by its axes: a pair counts to the first axis along which both are on one line."""
        left = np.ones(len(traffic.weight), bool)
        columns = []
        for axis, label in enumerate(traffic.lines):
            on = left & (label[traffic.first] == label[traffic.second])
            left &= ~on
            columns.append(_along(traffic, axis, on))
        rows = np.concatenate(columns, 1) if columns else np.zeros((traffic.ranks, 0))
        unique, count = (
            np.unique(rows, axis=0, return_counts=True) if columns else (rows[:1], np.array([traffic.ranks]))
        )
        parts = unique.reshape(len(unique), -1, 6).transpose(2, 0, 1)
        length, every, first, second, closed, rest = parts
        off = float(traffic.weight[left].sum())
        return Lines(count, length.astype(int), every, first, second, closed, rest, off)

    def shares(self, axis: int, most: int) -> np.ndarray:
        """(classes, most) f(m) for m = 1 … most: a rank's share of what m ranks of its line can have among them, -inf where
        the line has not so many."""
        length, m = self.length[:, [axis]], np.arange(1, most + 1)
        first, second, closed = (part[:, [axis]] for part in (self.first, self.second, self.closed))
        raised = np.maximum(first, closed) + np.maximum(second, closed)
        part = np.minimum(
            np.maximum(first, closed) / 2 + (m > 2) * np.maximum(second, closed) / 2, raised / 2 - closed / m
        )
        ring = np.where(m < length, part, (first + second) / 2)
        share = (m > 1) * (ring + self.rest[:, [axis]] / 2) + (m - 1) / 2 * self.all[:, [axis]]
        return np.where(m <= length, share, -np.inf)


def _along(traffic: Traffic, axis: int, on: np.ndarray) -> np.ndarray:
    """(ranks, 6) what `Lines` has of an axis, of every rank. on: (E,) which pairs count to it."""
    a, b, weight = traffic.first[on], traffic.second[on], traffic.weight[on]
    _, line, lengths = np.unique(traffic.lines[axis], return_inverse=True, return_counts=True)
    order, starts = np.argsort(line, kind="stable"), np.cumsum(lengths) - lengths
    place, P = traffic.place_on_line(axis), traffic.ranks
    least = np.full(len(lengths), np.inf)
    np.minimum.at(least, line[a], weight)
    full = (np.bincount(line[a], minlength=len(lengths)) == lengths * (lengths - 1) // 2) & (lengths > 2)
    least = np.where(full, least, 0.0)
    weight = weight - least[line[a]]
    hop, length = place[b] - place[a], lengths[line[a]]
    on_ring = (hop == 1) | (hop == length - 1)
    ring, rest = np.zeros(P), np.zeros(P)  # ring: the pair with the next rank of the line
    start = np.where(hop == 1, a, b)[on_ring]
    ring[start] = weight[on_ring]
    for end in (a, b):
        np.add.at(rest, end[~on_ring], weight[~on_ring])
    before = order[starts[line] + (place - 1) % lengths[line]]
    first, second = np.maximum(ring, ring[before]), np.minimum(ring, ring[before])
    rings = np.lexsort((ring, line))
    closed = np.where(lengths > 2, ring[rings[np.minimum(starts + 1, P - 1)]], 0.0)
    return np.stack([lengths[line], least[line], first, second, closed[line], rest], 1)


def _by_lines(lines: Lines, sizes: np.ndarray) -> float:
    """The least of the bounds over all prices y, by the lines that touch it from below."""
    budget, most = float((sizes * np.log(sizes)).sum()), int(sizes.max())
    shares = [lines.shares(axis, min(most, int(lines.length[:, axis].max()))) for axis in range(lines.length.shape[1])]
    logs = np.log(np.arange(1, most + 1))

    def at(price: float) -> tuple[float, float]:
        """(the bound at a price, what it grows by per price)."""
        value, spent = _best(shares, logs, price, most)
        return price * budget + float(lines.count @ value), budget - float(lines.count @ spent)

    low, (low_value, low_slope) = 0.0, at(0.0)
    if low_slope >= 0:
        return lines.off + low_value
    high = 2 * max(float(np.where(share > -np.inf, share, 0.0).max(initial=0.0)) for share in shares) / logs[1]
    high_value, high_slope = at(high)
    best = min(low_value, high_value)
    while high_slope > 0:
        price = (low_value - high_value + high_slope * high - low_slope * low) / (high_slope - low_slope)
        under = low_value + low_slope * (price - low)
        value, slope = at(price)
        best = min(best, value)
        if value <= under + 1e-12 * abs(value) or not low < price < high:
            break
        if slope < 0:
            low, low_value, low_slope = price, value, slope
        else:
            high, high_value, high_slope = price, value, slope
    return lines.off + best


def _best(shares: list[np.ndarray], logs: np.ndarray, price: float, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(value, logs taken) of the best counts of ranks along each axis, class by class."""
    classes = len(shares[0]) if shares else 1
    value, spent = np.zeros((classes, 1)), np.zeros((classes, 1))
    for share in shares:
        m = share.shape[1]
        net = share - price * logs[:m]
        if most > JOINT:
            pick = net.argmax(1)
            value = value + np.take_along_axis(net, pick[:, None], 1)
            spent = spent + logs[pick][:, None]
            continue
        # value[:, k]: the best with k ranks beside the first one, over the axes so far
        width = min(most, value.shape[1] + m - 1)
        every = np.full((classes, m, width), -np.inf)
        taken = np.zeros((classes, m, width))
        for extra in range(m):
            span = min(value.shape[1], width - extra)
            every[:, extra, extra : extra + span] = value[:, :span] + net[:, [extra]]
            taken[:, extra, extra : extra + span] = spent[:, :span] + logs[extra]
        pick = every.argmax(1)[:, None]
        value, spent = (np.take_along_axis(part, pick, 1)[:, 0] for part in (every, taken))
    pick = value.argmax(1)[:, None]
    return np.take_along_axis(value, pick, 1)[:, 0], np.take_along_axis(spent, pick, 1)[:, 0]
