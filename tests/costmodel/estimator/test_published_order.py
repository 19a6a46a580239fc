"""Plans of one model are compared by device-seconds per token, and pairs that measured alike have no order."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.published_order import Timed, order_in_series, ordered_otherwise, pairs_apart


def row(name: str, series: str = "s", gpus: int = 8, batch: int = 16) -> dict[str, Any]:
    return {
        "id": name,
        "series": series,
        "hardware": {"gpus": gpus},
        "batch": {"global": batch},
        "model": {"seq_len": 128},
    }


def test_runs_on_more_devices_and_tokens_compare_per_token() -> None:
    small, large = Timed(row("a"), 1.0, 1.1), Timed(row("b", gpus=32, batch=64), 1.0, 1.2)
    assert small.measured == pytest.approx(8 / (16 * 128))
    assert large.measured == pytest.approx(small.measured)
    assert list(pairs_apart([small, large])) == []


def test_pairs_are_of_one_series_and_the_faster_comes_first() -> None:
    a, b, c = Timed(row("a"), 2.0, 0.0), Timed(row("b"), 1.0, 0.0), Timed(row("c", "other"), 3.0, 0.0)
    assert list(pairs_apart([a, b, c])) == [(b, a)]


def test_a_pair_that_two_predictions_order_differently_is_named() -> None:
    rows, measured = [row("a"), row("b"), row("c")], [1.0, 2.0, 2.05]
    one = [Timed(r, m, p) for r, m, p in zip(rows, measured, [1.0, 2.0, 3.0], strict=True)]
    other = [Timed(r, m, p) for r, m, p in zip(rows, measured, [1.0, 0.9, 2.5], strict=True)]
    assert ordered_otherwise(one, other) == (2, [("a", "b")])
    assert ordered_otherwise(one, one) == (2, [])


def test_the_rank_correlation_of_a_series_is_spearmans() -> None:
    timed = [Timed(row(str(i)), m, p) for i, (m, p) in enumerate(zip([1, 2, 3, 4], [1, 3, 2, 4], strict=True))]
    series = order_in_series(timed)
    assert series["s"]["rank_correlation"] == pytest.approx(0.8)
    assert series["s"]["rows"] == 4
    assert order_in_series(timed[:3]) == {}
