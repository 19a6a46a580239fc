"""`autopar plan`: what `autopar.compile` would do with a model on a cluster, without writing a line of Python.

autopar plan my_package.models:step --cluster dgx-h100 --nodes 8
autopar plan config.json --cluster dgx-h100 --nodes 8 --batch 64 --sequence 8192 --precision bf16

MODEL is a function that returns the arguments of `autopar.compile` after the cluster left out, as a dict or as (model,
example_inputs); or the config.json of a Hugging Face model, which the installed transformers builds, without weights, as a
language model that is trained on tokens.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import autopar.api
from autopar.cli.cluster_argument import read_cluster
from autopar.cli.model_config import read_config
from autopar.errors import AutoparError, InputError
from autopar.ir.memory_levers import PRECISIONS
from autopar.options import Options
from autopar.program import ParallelProgram

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    commands = argparse.ArgumentParser(prog="autopar", description="Plans of models on clusters.")
    plan = commands.add_subparsers(dest="command", required=True).add_parser(
        "plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    plan.add_argument("--json", action="store_true", help="meshes, seconds and bytes as JSON in place of the report")
    return commands


def planned(args: argparse.Namespace) -> ParallelProgram:
    """The program that the command line asks for. Raises AutoparError."""
    cluster = read_cluster(args.cluster, args.nodes)
    if args.model.endswith(".json"):
        arguments = of_config(Path(args.model), args.batch or cluster.size, args.sequence, args.precision)
    else:
        arguments = of_function(args.model)
    options = {"precision": args.precision, "strategy": args.strategy, "pp": args.pp}
    given = {name: value for name, value in options.items() if value is not None and value != "auto"}
    if given and "options" in arguments:
        raise InputError(
            f"{args.model} gives options itself; leave out --{', --'.join(given)}, or the function's options"
        )
    return autopar.api.compile(cluster=cluster, **{"options": Options(**given), **arguments})


def of_function(name: str) -> Mapping[str, Any]:
    """The result of `module:function`, as arguments of compile. Raises InputError."""
    module_name, _, function = name.partition(":")
    if not module_name or not function:
        raise InputError(f"MODEL {name!r} is neither module:function nor a config.json")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError(f"MODEL {name!r}: {error}; run from the folder that holds it, or install it") from error
    finally:
        sys.path.remove(os.getcwd())
    make = getattr(module, function, None)
    if not callable(make):
        raise InputError(f"MODEL {name!r}: {module_name} has no function {function}")
    made = make()
    if isinstance(made, tuple) and len(made) == 2:
        return {"model": made[0], "example_inputs": made[1]}
    if isinstance(made, Mapping) and {"model", "example_inputs"} <= made.keys():
        return made
    raise InputError(
        f"MODEL {name!r} returned {type(made).__name__}; return (model, example_inputs), or a dict of compile's arguments"
    )


def of_config(path: Path, batch: int, sequence: int, precision: str | None) -> Mapping[str, Any]:
    """A language model of transformers on the meta device, trained with AdamW; in float32, as mixed precision has it, where a
    precision is asked for, else in the dtype of the configuration. Raises InputError."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(f"{path}: a config.json needs transformers: pip install transformers") from error
    fields = read_config(path)
    try:
        config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
            model = model.float() if precision else model
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: transformers makes no language model of this configuration ({error})") from error
    with torch.device("meta"):
        tokens = torch.zeros(batch, sequence, dtype=torch.long)
    return {"model": model, "example_inputs": {"input_ids": tokens, "labels": tokens}, "optimizer": ADAMW}


def main(argv: list[str] | None = None) -> int:
    """The command; 0, or 2 after an error, which goes to standard error."""
    args = parser().parse_args(argv)
    try:
        program = planned(args)
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 2
    if args.out is not None:
        program.plan.save(args.out)
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
