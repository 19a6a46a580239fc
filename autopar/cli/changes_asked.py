"""The arguments of `autopar plan` that ask what if: `--mesh`, `--pin`, `--memory-gb` and `--compare`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from autopar.program import ParallelProgram
from autopar.what_if.answer import NoFit, compared
from autopar.what_if.changes import axes_of, pins_of


def add_arguments(plan: argparse.ArgumentParser) -> None:
    """The arguments among those of the command."""
    plan.add_argument(
        "--mesh", metavar="AXIS=SIZE,…", help="sizes of axes, such as tp=4 or tp=4,pp=2; the rest is solved"
    )
    plan.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="NAME=SPEC",
        help="how parameters rest, such as 'layers.*.q_proj.weight=[@tp, .]'; NAME is of parameters or modules, with wildcards; "
        "may be given again",
    )
    plan.add_argument(
        "--memory-gb", type=float, metavar="N", help="plan as if every device had N GB (10^9 bytes) of memory"
    )
    plan.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="say what B has more than A, each of them best, the path of a saved plan (.json), or changes such as strategy=fsdp, "
        "tp=4,microbatches=8, nodes=16, memory_gb=24 or pin:NAME=SPEC",
    )


def changes(args: argparse.Namespace) -> dict[str, Any]:
    """The changes that the arguments ask for. Raises InputError."""
    asked: dict[str, Any] = {}
    if args.mesh is not None:
        asked["mesh"] = axes_of(args.mesh)
    if args.pin:
        asked["pin"] = pins_of(args.pin)
    if args.memory_gb is not None:
        asked["memory_gb"] = args.memory_gb
    return asked


def comparison(program: ParallelProgram, args: argparse.Namespace) -> str:
    """The answer to `--compare`, in words or as JSON, and on the page that `--html` asks for. Raises AutoparError."""
    first, second = args.compare
    answer = compared(program, first, second, program.compile_again, program.with_plan)
    if args.html is not None:
        answer.before.report_html(args.html, what_if=[answer.facts()])
    return json.dumps(answer.facts()) if args.json else answer.report()


def no_fit_text(answer: NoFit, args: argparse.Namespace) -> str:
    """The answer that nothing fits, in words or as JSON."""
    return json.dumps({"fits": False, **answer.facts()}) if args.json else f"{answer.sentence}\n{answer.error}"
