"""The fit of the cost model reads rows under any parameters, and what it starts from is all that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from autopar.costmodel.software import default_constants
from benchmarks.fit_cost_model import FITTED, PRIOR, START, predict

SAMPLE = Path(__file__).parent / "published_sample.json"


def test_rows_are_predicted_from_the_start_of_the_fit() -> None:
    rows = json.loads(SAMPLE.read_text())
    rows = [
        row for row in (rows["runs"] if isinstance(rows, dict) else rows) if "step_time" in row.get("score_on", ())
    ][:3]
    assert rows
    predicted = predict(rows, START)
    assert np.isfinite(predicted).all()
    assert (predicted > 0).all()
    slower = predict(rows, START | {"step_overhead_s": PRIOR["step_overhead_s"] + 1.0})
    assert (slower > predicted + 0.9).all()


def test_constants_that_no_published_run_tells_are_none_of_frameworks() -> None:
    assert {name for name in vars(default_constants()) if name not in FITTED} == {"once_host_s"}
    assert default_constants().once_host_s == 0.0
