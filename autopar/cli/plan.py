"""`autopar plan`: what `autopar.compile` would do with a model on a cluster, without writing a line of Python.

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
from autopar.cli import changes_asked, pareto
from autopar.cli.asked_model import arguments_of
from autopar.cli.cluster_argument import read_cluster
from autopar.cli.command import Commands, add
from autopar.cli.refused_page import print_page_of
from autopar.cli.terminal import show
from autopar.errors import InfeasibleError, InputError
from autopar.exchange.formats import FORMATS
from autopar.ir.memory_levers import PRECISIONS
from autopar.options import Options
from autopar.program import ParallelProgram
from autopar.what_if.answer import no_fit
from autopar.what_if.changes import changed_cluster, changed_options

EXAMPLE = "autopar plan examples.command_line:step --cluster dgx-h100 --out plan.json"


def add_parser(commands: Commands) -> None:
    """The command among those of `autopar`."""
    plan = add(commands, "plan", run, __doc__, EXAMPLE)
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
        "--memory-snapshot",
        nargs=2,
        action="append",
        default=[],
        metavar=("RANK", "PATH"),
        help="write the predicted memory of a rank over a step as a pickle for pytorch.org/memory_viz; may be given again",
    )
    plan.add_argument(
        "--html", type=Path, metavar="PATH", help="write a page of the plan here, or of what does not fit"
    )
    plan.add_argument("--json", action="store_true", help="meshes, seconds and bytes as JSON in place of the report")
    changes_asked.add_arguments(plan)
    pareto.add_arguments(plan)


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `compile` that the command line stands for. Raises AutoparError."""
    changes = changes_asked.changes(args)
    cluster = changed_cluster(read_cluster(args.cluster, args.nodes), changes)
    arguments = arguments_of(args.model, args.batch or cluster.size, args.sequence, args.precision)
    options_named = {"precision": args.precision, "strategy": args.strategy, "pp": args.pp}
    given = {name: value for name, value in options_named.items() if value is not None and value != "auto"}
    if given and "options" in arguments:
        raise InputError(
            f"{args.model} gives options itself; leave out --{', --'.join(given)}, or the function's options"
        )
    options = arguments.get("options") or Options(**given)
    return {**arguments, "cluster": cluster, "options": changed_options(options, changes)}


def run(args: argparse.Namespace) -> int:
    """Plan the model, and print what was decided; 0, or 1 where nothing fits the memory asked for. Raises AutoparError."""
    arguments = asked(args)
    say = print if args.json else show
    if pareto.is_asked(args):
        say(*pareto.run(args, arguments))
        return 0
    try:
        program = autopar.api.compile(**arguments)
    except InfeasibleError as error:
        print_page_of(error, args.html)
        if args.memory_gb is None:
            raise
        say(changes_asked.no_fit_text(no_fit(error, arguments["cluster"], arguments["options"]), args))
        return 1
    if args.compare is not None:
        say(changes_asked.comparison(program, args))
        return 0
    exported = [program.export(name, path) for name, path in args.export]
    if args.html is not None:
        program.report_html(args.html)
    for rank, path in args.memory_snapshot:
        if not rank.isdecimal():
            raise InputError(f"--memory-snapshot takes the number of a rank and a path, not {rank!r}")
        program.memory_snapshot(path, rank=int(rank))
    if args.out is not None:
        program.plan.save(args.out)
    for one in exported:
        print(one, file=sys.stderr)
    say(json.dumps(facts(program)) if args.json else program.report())
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
        "energy_J": predicted.energy_J,
        "seconds": dict(program.timings),
    }
