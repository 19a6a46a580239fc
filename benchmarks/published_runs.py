"""Scores the cost model against measured training runs.

`python -m benchmarks.published_runs --file published_runs.json [--out DIR]` prints the median and mean absolute
percentage error of step time and memory, by group, GPU, architecture and scale, the rank correlation within each series
(does the model order the plans of one model rightly?), the out-of-memory rows, and the ten worst rows with what the
model thinks their step is made of. It writes `published_runs_score.json` and a scatter plot (`.svg`).

With `--compiled` the models are compiled under the published plans (`benchmarks.published_compiled`) and what `compile`
predicts is scored instead, of at most `--limit` rows; `--json` prints the score as JSON. It writes nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autopar.costmodel import Estimate, estimate_row
from autopar.errors import AutoparError
from benchmarks.published_compiled import report_compiled, score_compiled
from benchmarks.published_order import Timed, order_in_series, report_order
from benchmarks.published_rows import (
    GB,
    Row,
    measured_memory_bytes,
    measured_step_s,
    parser_of,
    read_rows,
    write_result,
)


def scale_of(row: Row) -> str:
    """A bucket of device counts."""
    n = int(row["hardware"]["gpus"])
    for top in (8, 64, 512, 4096):
        if n <= top:
            return f"<= {top} devices"
    return "> 4096 devices"


def summary(errors: Sequence[float]) -> dict[str, float]:
    """Median and mean absolute error, and the median of the signed one."""
    e = np.array(errors)
    return {
        "rows": len(e),
        "median": float(np.median(np.abs(e))),
        "mean": float(np.mean(np.abs(e))),
        "bias": float(np.median(e)),
    }


def by_category(items: Sequence[tuple[Row, float]]) -> dict[str, dict[str, Any]]:
    """Summaries of errors, by what a row can be grouped by."""
    tables: dict[str, dict[str, Any]] = {}
    for category, key in CATEGORIES.items():
        groups: dict[str, list[float]] = {}
        for row, error in items:
            groups.setdefault(key(row), []).append(error)
        tables[category] = {name: summary(errors) for name, errors in sorted(groups.items())}
    return tables


CATEGORIES: dict[str, Callable[[Row], str]] = {
    "arch": lambda r: str(r["category"]["arch"]),
    "group": lambda r: str(r["group"]),
    "gpu": lambda r: str(r["hardware"]["gpu"]),
    "scale": scale_of,
}


@dataclass(frozen=True)
class Scored:
    """A row with a measured step time, and what the cost model says of it."""

    timed: Timed
    estimate: Estimate

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.timed.predicted_s / self.timed.measured_s - 1

    def to_dict(self) -> dict[str, Any]:
        """The row's name and both times."""
        t = self.timed
        return {"id": t.row["id"], "measured_s": t.measured_s, "predicted_s": t.predicted_s}


def score(rows: Sequence[Row]) -> dict[str, Any]:
    """Everything the report says, as plain data."""
    scored: list[Scored] = []
    memory: list[tuple[Row, float]] = []
    oom: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []
    for row in rows:
        try:
            e = estimate_row(row)
        except AutoparError as err:
            failed.append({"id": row["id"], "error": str(err)})
            continue
        if "oom" in row.get("score_on", []):
            oom.append({"id": row["id"], "fits": e.fits, "reserved_GB": e.memory_bytes["reserved"] / GB})
        if step := measured_step_s(row):
            scored.append(Scored(Timed(row, step, e.step_time_s), e))
        if held := measured_memory_bytes(row):
            memory.append((row, e.memory_bytes["total"] / held - 1))
    worst = sorted(scored, key=lambda s: -abs(s.error))[:10]
    return {
        "step_time": by_category([(s.timed.row, s.error) for s in scored]),
        "memory": by_category(memory) | ({"all": summary([e for _, e in memory])} if memory else {}),
        "series": order_in_series([s.timed for s in scored]),
        "oom": oom,
        "failed": failed,
        "worst": [{**s.to_dict(), "error": s.error, "breakdown_s": s.estimate.breakdown} for s in worst],
        "points": [{**s.to_dict(), "arch": s.timed.row["category"]["arch"]} for s in scored],
    }


def plot(points: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Predicted against measured step seconds, both logarithmic; the dashed lines are 20 % off."""
    from matplotlib.figure import Figure

    values = [p[k] for p in points for k in ("measured_s", "predicted_s")]
    ends = np.array([min(values) * 0.9, max(values) * 1.1])
    figure = Figure(figsize=(6.4, 6.4), layout="constrained")
    axes = figure.subplots()
    for arch, color, label in (("dense", "#2471a3", "dense"), ("moe", "#e67e22", "mixture of experts")):
        picked = [p for p in points if (p["arch"] == "moe") == (arch == "moe")]
        measured, predicted = ([p[k] for p in picked] for k in ("measured_s", "predicted_s"))
        axes.scatter(measured, predicted, s=12, c=color, alpha=0.6, label=label, gid=f"runs-{arch}")
    for off, style in ((1.0, "-"), (1.2, "--"), (1 / 1.2, "--")):
        axes.plot(ends, off * ends, style, color="#888", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    axes.set(xlabel="measured step (s)", ylabel="predicted step (s)", title=f"{len(points)} published runs")
    axes.grid(color="#ddd")
    axes.legend()
    figure.savefig(path)


def report(result: Mapping[str, Any]) -> str:
    """The result as text."""
    lines = []
    for part in ("step_time", "memory"):
        for what, table in result[part].items():
            if what == "all":
                continue
            lines.append(f"\n{part} by {what}: rows, median |error|, mean |error|, bias")
            for name, s in table.items():
                lines.append(f"  {name:34s} {s['rows']:4d} {s['median']:7.1%} {s['mean']:7.1%} {s['bias']:+7.1%}")
    lines += ["", *report_order(result["series"])]
    for row in result["oom"]:
        lines.append(
            f"out of memory: {row['id']}: {row['reserved_GB']:.1f} GB, "
            f"{'WRONG: predicted to fit' if row['fits'] else 'right'}"
        )
    for row in result["failed"]:
        lines.append(f"not predicted: {row['id']}: {row['error']}")
    lines.append("\nworst rows: measured, predicted, error, predicted shares")
    for row in result["worst"]:
        shares = ", ".join(f"{k} {v / row['predicted_s']:.0%}" for k, v in row["breakdown_s"].items())
        lines.append(
            f"  {row['id']:60.60s} {row['measured_s']:9.3f} {row['predicted_s']:9.3f} {row['error']:+6.0%}  {shares}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = parser_of(__doc__, "the JSON and the plot")
    parser.add_argument("--quality", default="A", help="A (default), or AB for all")
    parser.add_argument("--all-releases", action="store_true", help="count older releases of one configuration too")
    parser.add_argument("--compiled", action="store_true", help="score what compile predicts of the published plans")
    parser.add_argument("--limit", type=int, help="most rows that are compiled, evenly from all series")
    parser.add_argument("--json", action="store_true", help="print the score of compiled rows as JSON")
    args = parser.parse_args(argv)
    try:
        rows = read_rows(args.file)
    except FileNotFoundError as err:
        print(f"published_runs: {err}", file=sys.stderr)
        return 2
    scored = [
        r
        for r in rows
        if r.get("complete", True)
        and (r.get("quality", "A") in args.quality or "oom" in r.get("score_on", []))
        and (args.all_releases or r.get("primary", True))
    ]
    if args.compiled:
        compiled = score_compiled(scored, args.limit)
        print(json.dumps(compiled, indent=1) if args.json else report_compiled(compiled))
        return 0
    result = score(scored)
    print(report(result))
    out = write_result(args.out, "published_runs_score.json", result)
    if result["points"]:
        plot(result["points"], out / "published_runs.svg")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
