"""Whether plans of one model are ordered as they were measured: rank correlations, and pairs that two predictions order
differently. Plans compete on device-seconds per token, so runs on different numbers of devices and tokens compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from benchmarks.published_rows import Row

APART = 0.05
"""Pairs that measured closer than this, relative, have no order."""


@dataclass(frozen=True)
class Timed:
    """A row with the seconds of a step that were measured and predicted."""

    row: Row
    measured_s: float
    predicted_s: float

    def per_token(self, seconds: float) -> float:
        """Device-seconds per token of a step that takes so many seconds."""
        tokens = self.row["batch"]["global"] * self.row["model"]["seq_len"]
        return float(seconds * self.row["hardware"]["gpus"] / tokens)

    @property
    def measured(self) -> float:
        """Device-seconds per token, as measured."""
        return self.per_token(self.measured_s)

    @property
    def predicted(self) -> float:
        """Device-seconds per token, as predicted."""
        return self.per_token(self.predicted_s)


def order_in_series(timed: Sequence[Timed]) -> dict[str, dict[str, float]]:
    """Rank correlations of the series that have at least four rows."""
    correlations = {}
    for name, items in sorted(_by_series(timed).items()):
        if len(items) >= 4:
            measured = [t.measured for t in items]
            correlations[name] = {
                "rows": len(items),
                "rank_correlation": rank_correlation(measured, [t.predicted for t in items]),
                "rank_correlation_step_time": rank_correlation(
                    [t.measured_s for t in items], [t.predicted_s for t in items]
                ),
                "spread": float(np.ptp(np.log(measured))),
            }
    return correlations


def report_order(series: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The rank correlations of series as text."""
    return ["rank correlation within series (device-seconds per token; step time)"] + [
        f"  {name:34s} {s['rows']:4d} {s['rank_correlation']:6.2f} {s['rank_correlation_step_time']:6.2f}"
        f"  (measured spread {s['spread']:.0%})"
        for name, s in series.items()
    ]


def pairs_apart(timed: Sequence[Timed]) -> Iterator[tuple[Timed, Timed]]:
    """Pairs of one series that measured clearly apart, the faster one first."""
    for items in _by_series(timed).values():
        for pair in combinations(items, 2):
            faster, slower = sorted(pair, key=lambda t: t.measured)
            if slower.measured >= (1 + APART) * faster.measured:
                yield faster, slower


def ordered_otherwise(one: Sequence[Timed], other: Sequence[Timed]) -> tuple[int, list[tuple[str, str]]]:
    """How many pairs measured clearly apart, and those (by id) that two predictions of the same rows order differently."""
    second = {str(t.row["id"]): t for t in other}
    pairs, differ = 0, []
    for a, b in pairs_apart(one):
        names = str(a.row["id"]), str(b.row["id"])
        pairs += 1
        if (a.predicted < b.predicted) != (second[names[0]].predicted < second[names[1]].predicted):
            differ.append(names)
    return pairs, differ


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation."""
    x, y = ranks(a), ranks(b)
    return float(np.corrcoef(x, y)[0, 1]) if x.std() and y.std() else float("nan")


def ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks, ties averaged."""
    v = np.asarray(values)
    return np.array([(v < x).sum() + ((v == x).sum() - 1) / 2 for x in v])


def _by_series(timed: Sequence[Timed]) -> dict[str, list[Timed]]:
    series: dict[str, list[Timed]] = {}
    for t in timed:
        series.setdefault(str(t.row["series"]), []).append(t)
    return series
