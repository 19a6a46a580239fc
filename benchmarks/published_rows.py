"""A file of published training runs: how it is read, what was measured in a row, where results are written."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
GB = 1e9


def parser_of(description: str | None, what_is_written: str) -> argparse.ArgumentParser:
    """A command line that reads a file of runs and writes into a folder."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", default="published_runs.json", help="a JSON file of published runs")
    parser.add_argument("--out", default=".", help=f"folder for {what_is_written}")
    return parser


def read_rows(path: str) -> list[Row]:
    """Every row. Raises FileNotFoundError, saying what to give instead."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist; give --file with a JSON list of rows")
    rows: list[Row] = json.loads(Path(path).read_text())
    return rows


def write_result(folder: str, name: str, result: Mapping[str, Any]) -> Path:
    """Writes a JSON file; the folder, made where it was missing."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    (out / name).write_text(json.dumps(result, indent=1) + "\n")
    return out


def measured_step_s(row: Row) -> float | None:
    """The measurement of the source, as a step time."""
    if "step_time" not in row.get("score_on", []):
        return None
    value = row.get("derived", {}).get("step_time_s") or row.get("measured", {}).get("step_time_s")
    return float(value) if value else None


def measured_memory_bytes(row: Row) -> float | None:
    """Peak bytes per device: printed in bytes, GB or GiB."""
    if "memory" not in row.get("score_on", []):
        return None
    m = row.get("measured", {})
    if m.get("memory_bytes_max_allocated"):
        return float(m["memory_bytes_max_allocated"])
    if m.get("memory_GB"):
        return float(m["memory_GB"]) * GB
    return float(m["memory_GiB"]) * 2**30 if m.get("memory_GiB") else None
