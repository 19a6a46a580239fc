"""`autopar price CONFIG --model MODEL --cluster C`: how long a step of another system's configuration will take.

CONFIG is a command line of Megatron, a recipe of torchtitan, a JSON of DeepSpeed, a YAML of accelerate, a tp_plan, or FSDP2
code as `autopar plan --export` writes it. MODEL is as for `autopar plan`. The layout is compiled, and said are seconds, tokens
per second, utilisation, peak by cause, whether that fits, keys that mean nothing here, and what the nearest of the better
plans, and the best of them, change.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import autopar.api
from autopar.capture.examples.inputs import batch_size
from autopar.cli.asked_model import arguments_of
from autopar.cli.cluster_argument import read_cluster
from autopar.cli.command import Commands, add
from autopar.cli.terminal import show
from autopar.compiled import Compiled
from autopar.errors import InputError
from autopar.exchange.formats import FORMATS, read_file
from autopar.exchange.layout import Layout
from autopar.exchange.to_options import differences, options_of
from autopar.ir.text import size_text, time_text
from autopar.options import Options
from autopar.program import ParallelProgram
from autopar.report.answer import rate_text, room_facts, work_facts
from autopar.report.better_plans import Better, better_plans

EXAMPLE = "autopar price examples/ds_config.json --model examples.command_line:step --cluster dgx-h100"


def add_parser(commands: Commands) -> None:
    """The command among those of `autopar`."""
    price = add(commands, "price", run, __doc__, EXAMPLE)
    price.add_argument("config", metavar="CONFIG", type=Path, help="a configuration of another system")
    price.add_argument("--model", required=True, help="module:function, or a config.json of transformers")
    price.add_argument("--cluster", required=True, help="a preset such as dgx-h100, a cluster file, or here")
    price.add_argument("--nodes", type=int, default=1, help="of a preset")
    price.add_argument("--format", choices=tuple(FORMATS), help="of CONFIG (default: told by the file)")
    price.add_argument("--sequence", type=int, default=2048, help="of a config.json: tokens of a sequence")
    price.add_argument("--batch", type=int, default=0, help="sequences of a step, where CONFIG does not say them")
    price.add_argument(
        "--tp", type=int, help="tensor-parallel ranks, where CONFIG leaves that to its launcher (a tp_plan)"
    )
    price.add_argument("--alone", action="store_true", help="do not look for a better plan")
    price.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the answer; 0. Raises AutoparError."""
    found = priced(args)
    if args.json:
        print(json.dumps(found))
    else:
        show(in_words(found))
    return 0


def priced(args: argparse.Namespace) -> dict[str, Any]:
    """The answer as data: seconds, bytes, tokens per second, and what a better plan does otherwise. Raises AutoparError."""
    cluster = read_cluster(args.cluster, args.nodes)
    read = read_file(args.config, args.format)
    if args.tp is not None and read.layout.tp not in (1, args.tp):
        raise InputError(f"{args.config} has tp={read.layout.tp}; leave out --tp {args.tp}")
    layout = replace(read.layout, tp=args.tp or read.layout.tp).on(cluster.size)
    if layout.modules and layout.tp == 1:
        raise InputError(f"{args.config} leaves the number of tensor-parallel ranks to its launcher; give --tp")
    asked = layout.global_batch or args.batch
    usual = (layout.dp or 1) * (layout.micro_batch or 1)
    arguments = dict(arguments_of(args.model, asked or usual, args.sequence, layout.precision or None))
    if "options" in arguments and not isinstance(arguments["options"], Options):
        raise InputError(f"{args.model}: options must be autopar.Options(…)")
    given = arguments.pop("options", None)
    asked = asked or batch_size(arguments["example_inputs"], (given or Options()).batch_dims)
    layout = replace(layout, global_batch=asked)
    program = autopar.api.compile(cluster=cluster, options=options_of(layout, given), **arguments)
    if asked != program.request.batch:
        whose = args.config if read.layout.global_batch else "--batch"
        raise InputError(
            f"{whose} has a global batch of {asked}, {args.model} one of {program.request.batch}; make them the same"
        )
    facts = {
        "ranks": cluster.size,
        "layout": {name: str(value) for name, value in layout.said().items() if name != "modules"},
        **_prediction(program, given or Options()),
        "priced_with": list(differences(layout)),
        "meaningless": dict(read.unknown),
    }
    return facts | ({} if args.alone else {"better": _better(program, layout, given or Options())})


def _prediction(program: Compiled, given: Options) -> dict[str, Any]:
    """Seconds, tokens per second, utilisation and bytes of a program. given: the options that say how much memory there is."""
    work, room = work_facts(program), room_facts(program, given)
    return {
        "step_time_s": program.predicted.step_time_s,
        "tokens_per_s": work.tokens_per_s,
        "mfu": work.mfu,
        "peak_bytes": program.predicted.peak_bytes,
        "peak_by_cause_bytes": dict(program.peak_kinds),
        "needed_bytes": room.needed_bytes,
        "device_bytes": room.device_bytes,
    }


def _better(program: ParallelProgram, layout: Layout, given: Options) -> dict[str, Any] | None:
    """The nearest plan that is better, and the best; None where there is none."""
    found = better_plans(program, layout, given, program.compile_again)
    return (
        None
        if found is None
        else dict(zip(("nearest", "best"), (_described(one, given) for one in found), strict=True))
    )


def _described(better: Better, given: Options) -> dict[str, Any]:
    """A better plan, and what it changes."""
    changes = {name: [str(before), str(after)] for name, (before, after) in better.changes.items()}
    return {
        "degrees": dict(better.degrees),
        **_prediction(better.program, given),
        "changes": changes,
        "also": list(better.also),
    }


def in_words(found: dict[str, Any]) -> str:
    """The answer for people."""
    said = ", ".join(f"{name}={value}" for name, value in found["layout"].items())
    lines = [f"{found['ranks']} ranks: {said}", _line("this layout", found)]
    causes = {name: nbytes for name, nbytes in found["peak_by_cause_bytes"].items() if nbytes >= 0.5}
    lines.append("peak: " + ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in causes.items()))
    lines += [f"priced with {point}" for point in found["priced_with"]]
    lines += [f"means nothing here: {name} = {value}" for name, value in found["meaningless"].items()]
    if "better" in found:
        better = found["better"]
        if better is None:
            lines.append("no plan is predicted to be better")
        elif better["nearest"] == better["best"]:
            lines += _better_lines("better, nearest and best", better["best"])
        else:
            lines += [*_better_lines("nearest better", better["nearest"]), *_better_lines("best", better["best"])]
    return "\n".join(lines)


def _better_lines(what: str, found: dict[str, Any]) -> list[str]:
    degrees = " ".join(f"{name}={size}" for name, size in found["degrees"].items())
    changes = [f"  {name}: {before} → {after}" for name, (before, after) in found["changes"].items()]
    return [_line(f"{what}: {degrees}", found), *changes, *(f"  and {one}" for one in found["also"])]


def _line(what: str, found: dict[str, Any]) -> str:
    tokens = "" if found["tokens_per_s"] is None else f"{rate_text(found['tokens_per_s'])}, "
    mfu = "" if found["mfu"] is None else f"{found['mfu']:.1%} of the peak of products, "
    over = found["needed_bytes"] - found["device_bytes"]
    fits = f"does not fit: {size_text(over)} too many" if over > 0 else f"of {size_text(found['device_bytes'])}"
    return (
        f"{what}: step {time_text(found['step_time_s'])}, {tokens}{mfu}peak {size_text(found['peak_bytes'])} ({fits})"
    )
