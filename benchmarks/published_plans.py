"""Compares the plans of published training runs with what the search prefers under the same cost model.

`python -m benchmarks.published_plans --file published_runs.json [--out DIR]` prints, for the space with every schedule
and for the one with the schedules that all frameworks have, in how many rows the search agrees, the distribution of the
predicted gains, and the plans that differ most (one row per series), and writes `published_plans.json` with every row.
It returns 1 when the claim fails: when a published plan is predicted to be faster than the one preferred.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from autopar.costmodel.estimator.compare import Answers, Comparison, compare_all, describe
from autopar.costmodel.estimator.rows import row_workload
from autopar.costmodel.estimator.step import estimate_workload
from benchmarks.published_runs import measured_step_s

Row = Mapping[str, Any]
EDGES = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5)


def plain_data(c: Comparison, row: Row) -> dict[str, Any]:
    """One comparison for JSON."""
    return {
        "id": c.id,
        "series": row.get("series"),
        "complete": bool(row.get("complete", True)),
        "quality": row.get("quality"),
        "gpus": row["hardware"]["gpus"],
        "gpu": row["hardware"]["gpu"],
        "model": row["model"].get("name"),
        "ran": c.ran,
        "fits": c.fits,
        "published": describe(c.published),
        "published_s": c.published.estimate.step_time_s,
        "preferred": describe(c.best),
        "preferred_s": c.best.estimate.step_time_s,
        "strict_s": c.strict.estimate.step_time_s if c.strict else None,
        "gain": c.gain,
        "why": c.why,
        "measured_s": row.get("derived", {}).get("step_time_s") or row.get("measured", {}).get("step_time_s"),
    }


def compare_rows(rows: Sequence[Row], plain: bool, answers: Answers) -> dict[str, Any]:
    """Every row, and what can be said of all of them."""
    began = time.process_time()
    refused: list[tuple[str, str]] = []
    by_id = {str(r["id"]): r for r in rows}
    found = [plain_data(c, by_id[c.id]) for c in compare_all(rows, plain=plain, refused=refused, answers=answers)]
    return {
        "seconds": time.process_time() - began,
        "refused": refused,
        "all": totals(found),
        "complete": totals([f for f in found if f["complete"]]),
        "rows": found,
    }


def totals(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts and the distribution of gains of the runs that ran."""
    ran = [f for f in found if f["ran"]]
    gains = [f["gain"] for f in ran]
    over = [f for f in ran if not f["fits"]]
    return {
        "rows": len(found),
        "ran": len(ran),
        "worse": [f["id"] for f in ran if f["gain"] < -1e-9],
        "agrees": sum(abs(g) <= EDGES[0] for g in gains),
        "gains": dict(zip(labels(), np.histogram(gains, (-np.inf, *EDGES, np.inf))[0].tolist(), strict=True)),
        "quantiles": {str(q): float(np.quantile(gains, q)) for q in (0.25, 0.5, 0.75, 0.9)} if gains else {},
        "over_memory": len(over),
        "over_memory_strict_as_fast": sum(
            f["strict_s"] is not None and f["strict_s"] <= f["published_s"] for f in over
        ),
        "out_of_memory_rows": len(found) - len(ran),
        "out_of_memory_predicted": sum(not f["ran"] and not f["fits"] for f in found),
        "saves_most": Counter(first_saving(f["why"]) for f in ran if f["gain"] > EDGES[0]).most_common(),
    }


def labels() -> list[str]:
    """Names of the intervals of gains."""
    marks = [f"{e:.0%}" for e in EDGES]
    return [f"at most {marks[0]}", *(f"{a} to {b}" for a, b in pairwise(marks)), f"over {marks[-1]}"]


def first_saving(why: str) -> str:
    """The largest saving's name: "saves 3.1% bubble, ..." gives "bubble"."""
    found = re.search(r"saves [\d.]+% ([^,;]+)", why)
    return found[1] if found else "nothing"


def most_different(found: Sequence[Mapping[str, Any]], n: int = 10) -> list[Mapping[str, Any]]:
    """The largest gains among complete runs of quality A that ran and fit, one of each series and model."""
    seen: set[Any] = set()
    chosen = []
    for f in sorted(found, key=lambda f: -f["gain"]):
        key = f["series"]
        if f["ran"] and f["fits"] and f["complete"] and f["quality"] == "A" and key not in seen:
            seen.add(key)
            chosen.append(f)
    return chosen[:n]


def measured_choices(rows: Sequence[Row]) -> dict[str, Any]:
    """Where several plans of one question were measured: what it costs, as measured, to trust the predicted order.

    loss: measured time of the plan predicted best among the measured ones, over the best measured time, less one.
    """
    groups: dict[tuple[Any, ...], list[tuple[float, float, str]]] = {}
    for row in rows:
        measured = measured_step_s(row)
        if not measured or not row.get("complete", True) or not row.get("primary", True):
            continue
        w = row_workload(row)
        predicted = estimate_workload(w, check=False).step_time_s
        question = (w.model, w.cluster, w.batch, w.software)
        groups.setdefault(question, []).append((predicted, measured, str(row["id"])))
    several = [g for g in groups.values() if len(g) > 1]
    losses = [min(g)[1] / min(m for _, m, _ in g) - 1 for g in several]
    return {
        "questions": len(several),
        "plans": sum(map(len, several)),
        "right": sum(loss == 0 for loss in losses),
        "within_2_percent": sum(loss <= 0.02 for loss in losses),
        "mean_loss": float(np.mean(losses)) if losses else 0.0,
        "worst_loss": max(losses, default=0.0),
        "worst": min(several[int(np.argmax(losses))])[2] if losses else None,
    }


def markdown(result: Mapping[str, Any]) -> str:
    """The result as tables."""
    lines = ["| | all rows | rows with nothing assumed |", "|---|---|---|"]
    a, c = result["all"], result["complete"]
    lines += [
        f"| {what} | {a[key]} | {c[key]} |"
        for what, key in (
            ("rows compared", "rows"),
            ("of these ran", "ran"),
            ("agrees (within 1 %)", "agrees"),
            ("published plan over the predicted memory", "over_memory"),
            ("... of these, preferred plan within memory is as fast", "over_memory_strict_as_fast"),
            ("published as out of memory", "out_of_memory_rows"),
            ("... and predicted so", "out_of_memory_predicted"),
        )
    ]
    lines += [f"| predicted gain {name} | {a['gains'][name]} | {c['gains'][name]} |" for name in labels()]
    for q in a["quantiles"]:
        lines.append(f"| quantile {q} of the gain | {a['quantiles'][q]:.1%} | {c['quantiles'].get(q, 0):.1%} |")
    lines += ["", "| largest saving | rows |", "|---|---|", *(f"| {what} | {n} |" for what, n in a["saves_most"])]
    lines += ["", "| run | published | s | preferred | s | gain | why |", "|---|---|---|---|---|---|---|"]
    for f in most_different(result["rows"]):
        lines.append(
            f"| {f['id']}, {f['gpus']} x {f['gpu']} | {f['published']} | {f['published_s']:.3g} | {f['preferred']} | "
            f"{f['preferred_s']:.3g} | {f['gain']:.0%} | {f['why']} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", default="published_runs.json", help="a JSON file of published runs")
    parser.add_argument("--out", default=".", help="folder for the JSON")
    parser.add_argument("--every", type=int, default=1, help="take every n-th row only")
    args = parser.parse_args(argv)
    if not Path(args.file).is_file():
        print(f"published_plans: {args.file} does not exist; give --file with a JSON list of rows", file=sys.stderr)
        return 2
    rows = [r for r in json.loads(Path(args.file).read_text()) if r.get("plan_known", True)][:: args.every]
    answers = Answers()
    results: dict[str, dict[str, Any]] = {
        name: compare_rows(rows, plain, answers)
        for name, plain in (("any schedule", False), ("common schedules", True))
    }
    for name, result in results.items():
        print(f"\n## {name}: {result['seconds']:.0f} s of one core\n\n{markdown(result)}")
        for row, why in result["refused"]:
            print(f"\nnot compared: {row}: {why}")
    results["measured choices"] = measured_choices(rows)
    print(f"\n## among measured plans of one question\n\n{json.dumps(results['measured choices'], indent=1)}")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "published_plans.json").write_text(json.dumps(results, indent=1) + "\n")
    worse = [row for result in results.values() for row in result.get("all", {}).get("worse", [])]
    print("\nno published plan is predicted to be faster" if not worse else f"\nFASTER AS PUBLISHED: {worse}")
    return 1 if worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
