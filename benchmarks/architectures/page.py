"""docs/models.md out of the rows of a sweep: `python -m benchmarks.architectures.page SWEEP.jsonl docs/models.md`."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HEAD = """# Models of other libraries

Written by `make models`. Every architecture is built tiny from its default configuration (layer drop off), compiled unchanged
for {ranks} CPU ranks, and compared with eager in float64, losses, gradients and updated parameters to 1e-9, on the chosen plan
and on a random one. What was captured is then planned on 8 and on 64 H100, by a search of at most five seconds each: these
models are tiny, so their plans say what the planner does with the architecture and little of what it would do with large ones.

{summary}

`*`: a branch on data goes the example's way, and a guard checks that every batch does. Seconds are those of capture, and CPU
seconds of `autopar.compile` for 4 ranks as a whole. *Equal*: the largest difference from eager.

"""
COLUMNS = "| architecture | captured | equal | plan on 8 H100 | plan on 64 H100 | s |\n|---|---|---|---|---|---|\n"
Row = dict[str, Any]


def page(rows: Iterable[Row], ranks: int = 4) -> str:
    """The page in Markdown. rows: of `benchmarks.architectures.sweep`."""
    tried = [row for row in rows if row["status"] != "unbuilt"]
    counts = Counter(row["status"] for row in tried)
    seconds = sorted(row["compile_cpu_s"] for row in tried if "compile_cpu_s" in row)
    summary = f"Of {len(tried)} architectures " + ", ".join(f"{n} {status}" for status, n in counts.most_common())
    if seconds:
        ninth = seconds[int(0.9 * (len(seconds) - 1))]
        summary += (
            f"; seconds: median {statistics.median(seconds):.1f}, ninth decile {ninth:.1f}, most {seconds[-1]:.1f}."
        )
    parts = [HEAD.format(ranks=ranks, summary=summary)]
    for family in dict.fromkeys(row["family"] for row in tried):
        equal = [row for row in tried if row["family"] == family and row["status"] == "equal"]
        parts.append(f"## {family}: {len(equal)} equal\n\n{COLUMNS}")
        for row in sorted(equal, key=lambda row: row["name"]):
            star = " *" if row.get("followed") or row.get("options") else ""
            worst = max(row["chosen"], row["random"])
            plans = row.get("plans", {})
            cells = [f"{row['name']}{star}", f"{row['capture_s']:.1f} s", f"{worst:.0e}"]
            cells += [plans.get(gpus, "") for gpus in ("8", "64")]
            parts.append(f"| {' | '.join(cells)} | {row['compile_cpu_s']:.1f} |\n")
        parts.append("\n")
    rest = [row for row in tried if row["status"] != "equal"]
    if rest:
        parts.append("## Not yet\n\n| architecture | | why |\n|---|---|---|\n")
        parts += [f"| {row['name']} | {row['status']} | {_line(row.get('why', ''))} |\n" for row in rest]
    return "".join(parts)


def _line(text: str) -> str:
    """An error's first words, without the folder of a library, as a cell."""
    words = " ".join(text.split()).replace("|", "\\|")
    for folder in ("site-packages/", "transformers/models/", "transformers/", "diffusers/models/"):
        while folder in words:
            at = words.index(folder)
            start = words.rfind(" ", 0, at) + 1
            words = words[:start].rstrip("(") + ("" if words[start] != "(" else "(") + words[at + len(folder) :]
    return words[:220]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("page", type=Path)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.sweep.read_text().splitlines()]
    args.page.write_text(page(rows))


if __name__ == "__main__":
    main()
