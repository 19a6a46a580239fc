"""`autopar plan MODEL --cluster C --pareto`: the plans that no other plan beats, as a table, as JSON, and as a picture.

autopar plan my_package.models:step --cluster dgx-h100 --nodes 4 --pareto
autopar plan config.json --cluster dgx-h100 --batch 64 --precision bf16 --pareto --plot plans.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import autopar.api
from autopar.errors import InputError
from autopar.passes.search.frontier import HALVINGS
from autopar.report.table import Block


def add_arguments(plan: argparse.ArgumentParser) -> None:
    """The arguments of the command `plan`."""
    plan.add_argument(
        "--pareto",
        action="store_true",
        help="in place of the best plan all that no other plan beats in seconds, bytes, devices and energy, on parts of the "
        "cluster too",
    )
    plan.add_argument("--plot", type=Path, metavar="PATH", help="of --pareto: draw the plans, as .svg or .png")
    plan.add_argument(
        "--halvings",
        type=int,
        metavar="N",
        help=f"of --pareto: look for plans within the half of the fastest one's memory, N times ({HALVINGS})",
    )


def is_asked(args: argparse.Namespace) -> bool:
    """Whether a command line is for this. Raises InputError for arguments that do not go together."""
    if not args.pareto and (args.plot is not None or args.halvings is not None):
        raise InputError("--plot and --halvings are of --pareto; give that too")
    if args.pareto and (args.out is not None or args.export or args.memory_snapshot):
        raise InputError(
            "--out, --export and --memory-snapshot are of one plan, --pareto finds several; leave them out: --json has every "
            "row's plan"
        )
    return bool(args.pareto)


def run(args: argparse.Namespace, asked: Mapping[str, Any]) -> list[Block]:
    """The answer; the plot is written. asked: the arguments of `compile`. Raises AutoparError."""
    if others := {"buckets", "entries", "pad_values", "plan"} & asked.keys():
        raise InputError(f"{args.model} gives {', '.join(sorted(others))}; --pareto plans a step alone: leave them out")
    halvings = HALVINGS if args.halvings is None else args.halvings
    found = autopar.api.pareto(**asked, halvings=halvings)
    if args.plot is not None:
        found.plot(args.plot)
    if args.json:
        return [json.dumps(found.to_dict())]
    return found.blocks()
