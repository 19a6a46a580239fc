"""Reports that came back from GPUs, kept for the tests: `python -m benchmarks.gpu_report.truths REPORT.json [NAME]`.

A report becomes a file of `tests/gpu/recorded` with what predictions can be held to without a GPU: the device, its calibration,
and of every step its seconds and its peak; bytes outside of tensors go along. `predictions` compiles the same programs again and
predicts them as the compiler does by then.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import autopar
from autopar.runtime.data.fields import from_data
from benchmarks.gpu_report.machine import Size
from benchmarks.gpu_report.models import timed
from benchmarks.gpu_report.separate import ROOT

RECORDED = ROOT / "tests/gpu/recorded"


class Prediction(NamedTuple):
    """A step's predicted numbers over the measured ones: peak bytes, and seconds by the device's own calibration (None where it
    was not calibrated). measured_bytes: at the peak."""

    name: str
    bytes_share: float
    seconds_share: float | None
    measured_bytes: int


def truths(report: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a report that stays."""
    found = {name: outcome["found"] for name, outcome in report["parts"].items()}
    steps = {name: one for name, one in found["steps"].items() if "median_ms" in one}
    return {
        "devices": found["facts"]["devices"],
        "software": found["facts"]["software"],
        **found["facts"]["described"],
        "profile": found.get("calibration", {}).get("profile"),
        "steps": {
            name: {"seconds": one["measured_s"], "peak_bytes": one["peak"]["allocated"]} for name, one in steps.items()
        },
        "memory": found.get("memory", {}),
    }


def predictions(truth: Mapping[str, Any]) -> Iterator[Prediction]:
    """Every step predicted again."""
    cluster = autopar.ClusterSpec.homogeneous(devices=1, device=truth["device"])
    if truth["profile"] is not None:
        cluster = cluster.with_profile(truth["profile"])
    models = timed(from_data(Size, truth["size"]))
    for name, measured in truth["steps"].items():
        model, _, dtype = name.rpartition(", ")
        precision = None if dtype == "float32" else dtype
        program = models[model].on_meta().compiled(cluster, precision=precision, compiler="none")
        predicted = program.predicted
        seconds = None if truth["profile"] is None else predicted.step_time_s / measured["seconds"]
        yield Prediction(name, predicted.peak_bytes / measured["peak_bytes"], seconds, measured["peak_bytes"])


def main(report: Path, name: str = "") -> None:
    truth = truths(json.loads(report.read_text()))
    name = name or str(truth["devices"][0]["name"]).lower().replace(" ", "-")
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / f"{name}.json").write_text(json.dumps(truth, indent=1) + "\n")
    for one in predictions(truth):
        print(one)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
