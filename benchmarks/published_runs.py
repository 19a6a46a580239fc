"""Scores the cost model against measured training runs.

`python -m benchmarks.published_runs --file published_runs.json [--out DIR]` prints the median and mean absolute
percentage error of step time and memory, by group, GPU, architecture and scale, the rank correlation within each series
(does the model order the plans of one model rightly?), the out-of-memory rows, and the ten worst rows with what the
model thinks their step is made of. It writes `published_runs_score.json` and a scatter plot (`.svg`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from math import log10
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Template

from autopar.costmodel import Estimate, estimate_row
from autopar.errors import AutoparError

Row = Mapping[str, Any]
GB = 1e9


def measured_step_s(row: Row) -> float | None:
    """What the source measured, as a step time."""
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


def ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks, ties averaged."""
    v = np.asarray(values)
    return np.array([(v < x).sum() + ((v == x).sum() - 1) / 2 for x in v])


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's."""
    x, y = ranks(a), ranks(b)
    return float(np.corrcoef(x, y)[0, 1]) if x.std() and y.std() else float("nan")


def per_token(row: Row, seconds: float) -> float:
    """Device-seconds per token: what plans of one model compete on."""
    return seconds * row["hardware"]["gpus"] / (row["batch"]["global"] * row["model"]["seq_len"])


def score(rows: Sequence[Row]) -> dict[str, Any]:
    """Everything the report says, as plain data."""
    scored: list[tuple[Row, Estimate, float]] = []
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
            scored.append((row, e, e.step_time_s / step - 1))
        if held := measured_memory_bytes(row):
            memory.append((row, e.memory_bytes["total"] / held - 1))

    def by(key: Callable[[Row], str], items: Sequence[tuple[Row, float]]) -> dict[str, Any]:
        groups: dict[str, list[float]] = {}
        for row, error in items:
            groups.setdefault(key(row), []).append(error)
        return {name: summary(errors) for name, errors in sorted(groups.items())}

    steps = [(row, error) for row, _, error in scored]
    keys: dict[str, Callable[[Row], str]] = {
        "arch": lambda r: str(r["category"]["arch"]),
        "group": lambda r: str(r["group"]),
        "gpu": lambda r: str(r["hardware"]["gpu"]),
        "scale": scale_of,
    }
    series: dict[str, list[tuple[Row, Estimate]]] = {}
    for row, e, _ in scored:
        series.setdefault(str(row["series"]), []).append((row, e))
    correlation = {
        name: {
            "rows": len(items),
            "rank_correlation": rank_correlation(
                [per_token(r, measured_step_s(r) or 0.0) for r, _ in items],
                [per_token(r, e.step_time_s) for r, e in items],
            ),
            "rank_correlation_step_time": rank_correlation(
                [measured_step_s(r) or 0.0 for r, _ in items], [e.step_time_s for _, e in items]
            ),
            "spread": float(np.ptp(np.log([per_token(r, measured_step_s(r) or 1.0) for r, _ in items]))),
        }
        for name, items in sorted(series.items())
        if len(items) >= 4
    }
    worst = sorted(scored, key=lambda item: -abs(item[2]))[:10]
    return {
        "step_time": {what: by(key, steps) for what, key in keys.items()},
        "memory": {what: by(key, memory) for what, key in keys.items()}
        | ({"all": summary([e for _, e in memory])} if memory else {}),
        "series": correlation,
        "oom": oom,
        "failed": failed,
        "worst": [
            {
                "id": row["id"],
                "measured_s": measured_step_s(row),
                "predicted_s": e.step_time_s,
                "error": error,
                "breakdown_s": e.breakdown,
            }
            for row, e, error in worst
        ],
        "points": [
            {
                "id": r["id"],
                "arch": r["category"]["arch"],
                "measured_s": measured_step_s(r),
                "predicted_s": e.step_time_s,
            }
            for r, e, _ in scored
        ],
    }


SVG = Template(
    """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 640" font-family="sans-serif" font-size="13">
<rect width="640" height="640" fill="white"/>
<g stroke="#ddd">{% for t in ticks %}
<line x1="{{ t.at }}" y1="40" x2="{{ t.at }}" y2="580"/>
<line x1="60" y1="{{ 640 - t.at }}" x2="600" y2="{{ 640 - t.at }}"/>
{% endfor %}</g>
<line x1="60" y1="580" x2="600" y2="40" stroke="#888"/>
<line x1="60" y1="{{ 580 - band }}" x2="{{ 600 - band }}" y2="40" stroke="#bbb" stroke-dasharray="4 4"/>
<line x1="{{ 60 + band }}" y1="580" x2="600" y2="{{ 40 + band }}" stroke="#bbb" stroke-dasharray="4 4"/>
{% for t in ticks %}
<text x="{{ t.at }}" y="598" text-anchor="middle">{{ t.label }}</text>
<text x="52" y="{{ 644 - t.at }}" text-anchor="end">{{ t.label }}</text>
{% endfor %}
{% for p in points %}
<circle cx="{{ p.x }}" cy="{{ p.y }}" r="3" fill="{{ p.color }}" fill-opacity="0.6"><title>{{ p.id }}</title></circle>
{% endfor %}
<text x="330" y="628" text-anchor="middle">measured step (s)</text>
<text x="16" y="310" text-anchor="middle" transform="rotate(-90 16 310)">predicted step (s)</text>
<text x="330" y="24" text-anchor="middle">{{ points | length }} published runs
(dashed: 20 % off; blue: dense, orange: mixture of experts)</text>
</svg>
"""
)


def scatter(points: Sequence[Mapping[str, Any]]) -> str:
    """Predicted against measured, both logarithmic, as SVG."""
    values = [p[k] for p in points for k in ("measured_s", "predicted_s")]
    low, high = log10(min(values)) - 0.05, log10(max(values)) + 0.05

    def at(seconds: float) -> float:
        return 60 + 540 * (log10(seconds) - low) / (high - low)

    ticks = [{"at": at(10**k), "label": f"{10**k:g}"} for k in range(-3, 4) if low <= k <= high]
    dots = [
        {
            "x": f"{at(p['measured_s']):.1f}",
            "y": f"{640 - at(p['predicted_s']):.1f}",
            "color": "#e67e22" if p["arch"] == "moe" else "#2471a3",
            "id": p["id"],
        }
        for p in points
    ]
    return SVG.render(ticks=ticks, points=dots, band=540 * log10(1.2) / (high - low))


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
    lines.append("\nrank correlation within series (device-seconds per token; step time)")
    for name, s in result["series"].items():
        lines.append(
            f"  {name:34s} {s['rows']:4d} {s['rank_correlation']:6.2f} {s['rank_correlation_step_time']:6.2f}"
            f"  (measured spread {s['spread']:.0%})"
        )
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", default="published_runs.json", help="a JSON file of published runs")
    parser.add_argument("--out", default=".", help="folder for the JSON and the plot")
    parser.add_argument("--quality", default="A", help="A (default), or AB for all")
    parser.add_argument("--all-releases", action="store_true", help="count older releases of one configuration too")
    args = parser.parse_args(argv)
    if not Path(args.file).is_file():
        print(f"published_runs: {args.file} does not exist; give --file with a JSON list of rows", file=sys.stderr)
        return 2
    rows = [
        r
        for r in json.loads(Path(args.file).read_text())
        if r.get("complete", True)
        and (r.get("quality", "A") in args.quality or "oom" in r.get("score_on", []))
        and (args.all_releases or r.get("primary", True))
    ]
    result = score(rows)
    print(report(result))
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "published_runs_score.json").write_text(json.dumps(result, indent=1) + "\n")
    if result["points"]:
        (out / "published_runs.svg").write_text(scatter(result["points"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
