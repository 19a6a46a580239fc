"""`autopar plan`: what `autopar.compile` would do with a model on a cluster, without writing a line of Python.

autopar plan my_package.models:step --cluster dgx-h100 --nodes 8
autopar plan config.json --cluster dgx-h100 --nodes 8 --batch 64 --sequence 8192 --precision bf16

MODEL is a function that returns the arguments of `autopar.compile` after the cluster left out, as a dict or as (model,
example_inputs); or the config.json of a Hugging Face model, which the installed transformers builds, without weights, as a
language model that is trained on tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import autopar.api
from autopar.cli import price
from autopar.cli.asked_model import arguments_of
from autopar.cli.cluster_argument import read_cluster
from autopar.cli.refused_page import print_page_of
from autopar.errors import AutoparError, InputError
from autopar.exchange.formats import FORMATS
from autopar.ir.memory_levers import PRECISIONS
from autopar.options import Options
from autopar.program import ParallelProgram


def parser() -> argparse.ArgumentParser:
    """The command line."""
    commands = argparse.ArgumentParser(prog="autopar", description="Plans of models on clusters.")
    by_name = commands.add_subparsers(dest="command", required=True)
    price.add_parser(by_name)
    plan = by_name.add_parser("plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plan.add_argument("model", metavar="MODEL", help="module:function, or a config.json of transformers")
    plan.add_argument(
        "--cluster", required=True, help="a preset such as dgx-h100, a cluster file, or here: this machine"
    )
    plan.add_argument("--nodes", type=int, default=1, help="of a preset")
    plan.add_argument(
        "--batch", type=int, default=0, help="of a config.json: sequences of a step (default: one a rank)"
    )
    plan.add_argument("--sequence", type=int, default=2048, help="of a config.json: tokens of a sequence")
    plan.add_argument("--precision", choices=sorted(PRECISIONS), help="mixed precision, as in Options")
    plan.add_argument("--strategy", default="auto", help="as in Options")
    plan.add_argument("--pp", type=int, help="stages of the pipeline, as in Options")
    plan.add_argument("--out", type=Path, metavar="PLAN.json", help="write the plan here (compile takes it as plan=)")
    plan.add_argument(
        "--export",
        nargs=2,
        action="append",
        default=[],
        metavar=("FORMAT", "PATH"),
        help=f"write the plan in a format of {', '.join(FORMATS)}; may be given again",
    )
    plan.add_argument(
        "--html", type=Path, metavar="PATH", help="write a page of the plan here, or of what does not fit"
    )
    plan.add_argument("--json", action="store_true", help="meshes, seconds and bytes as JSON in place of the report")
    return commands


def planned(args: argparse.Namespace) -> ParallelProgram:
    """The program that the command line asks for. Raises AutoparError."""
    cluster = read_cluster(args.cluster, args.nodes)
    arguments = arguments_of(args.model, args.batch or cluster.size, args.sequence, args.precision)
    options = {"precision": args.precision, "strategy": args.strategy, "pp": args.pp}
    given = {name: value for name, value in options.items() if value is not None and value != "auto"}
    if given and "options" in arguments:
        raise InputError(
            f"{args.model} gives options itself; leave out --{', --'.join(given)}, or the function's options"
        )
    return autopar.api.compile(cluster=cluster, **{"options": Options(**given), **arguments})


def main(argv: list[str] | None = None) -> int:
    """The command; 0, or 2 after an error, which goes to standard error."""
    args = parser().parse_args(argv)
    try:
        if args.command == "price":
            print(price.run(args))
            return 0
        program = planned(args)
        exported = [program.export(name, path) for name, path in args.export]
        if args.html is not None:
            program.report_html(args.html)
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        print_page_of(error, getattr(args, "html", None))
        return 2
    if args.out is not None:
        program.plan.save(args.out)
    for one in exported:
        print(one, file=sys.stderr)
    print(json.dumps(facts(program)) if args.json else program.report())
    return 0


def facts(program: ParallelProgram) -> dict[str, Any]:
    """The facts of a plan, as data."""
    predicted = program.predicted
    return {
        "plan": program.plan.show_meshes(),
        "ranks": program.plan.ranks,
        "microbatches": program.plan.microbatches,
        "schedule": program.plan.schedule,
        "step_time_s": predicted.step_time_s,
        "peak_bytes": predicted.peak_bytes,
        "seconds": dict(program.timings),
    }


if __name__ == "__main__":
    sys.exit(main())
