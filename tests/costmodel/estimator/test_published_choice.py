"""The search finds a plan that is no slower than a published layout, on a small mixture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.published_choice import main

ROW = {
    "id": "small",
    "model": {
        "layers": 2, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1024, "vocab": 1024, "seq_len": 256,
        "dtype": "fp8", "gated_mlp": True, "experts": 8, "topk": 2,
    },
    "hardware": {"gpu": "H100-SXM5-80GB", "gpus": 8, "gpus_per_node": 8},
    "parallel": {"dp": 4, "tp": 2, "ep": 4, "zero": 1},
    "batch": {"global": 64, "micro": 1},
}  # fmt: skip


@pytest.mark.slow
def test_the_search_finds_a_plan_that_is_no_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([ROW, {**ROW, "id": "other"}]))
    assert main(["--file", str(file), "small"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("small: -")
    assert "dp=1×ep=4×tp=2, 16 microbatches, experts -/+t0+e/f" in said
    assert "other" not in said


def test_layouts_that_cannot_be_compiled_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{**ROW, "parallel": {**ROW["parallel"], "ep": 8}}]))
    assert main(["--file", str(file), "small"]) == 0
    assert "experts apart over ep=8 of dp=4" in capsys.readouterr().out
