"""`autopar doctor DIR`: who kept a run that hung, or ended one that failed, from what its ranks wrote then.

DIR is the directory of the run (`run.py --run-dir`), or its folder `flight`. A rank that left no file is one that could not write
any more. `--rank R` shows the last messages of a rank too. Where rows of the batch moved between ranks
(`--rebalance`), their shares, the speeds that were measured, and the moves are told first.

`autopar doctor OUT`, of a saved program, says what limits its step: compute, memory, messages, the pipeline's bubble, memory
tiers, the host, or the input; `--profile DIR` (of `run.py --profile DIR`) as the run had it, and where that lies apart from the
prediction; `--model MODEL` also what could be changed, each change planned, and `--json` all of it as data.

`autopar doctor --preflight OUT` looks at the machines before a run of the program in OUT, and says what is wrong and what to set.
Started on one machine it looks at that one; started on all of them, with MASTER_ADDR and NODE_RANK as for launch.sh, also at what
they have in common; `torchrun … OUT/run.py --preflight` looks at every rank and link. More arguments are those of run.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.cli import advised
from autopar.cli.command import Commands, add, alone, refuse
from autopar.cli.terminal import show
from autopar.errors import AutoparError, InputError
from autopar.runtime.data.fields import to_data
from autopar.runtime.data.schema import SchemaError
from autopar.runtime.errors import RuntimeProgramError
from autopar.runtime.health.diagnosis import Diagnosis
from autopar.runtime.health.flight import Left
from autopar.runtime.health.flight_files import conclusion, read_flights
from autopar.runtime.run import launch
from autopar.runtime.run.learned_speeds import Learned, read_learned


def message_lines(left: Left, last: int = 12) -> Iterator[str]:
    """The last messages of a rank."""
    yield f"rank {left.beat.rank}, last at {left.beat.where}"
    for m in left.recent[-last:]:
        at = time.strftime("%H:%M:%S", time.localtime(m.started))
        state = "done" if m.ended else "waited for" if m.waited else "under way"
        yield f"  {at}  step {m.step:<6} {m.action:10} #{m.number:<6} {state:10} {m.what} over {m.group}"


def as_data(
    diagnosis: Diagnosis, found: Mapping[int, Left], ranks: Sequence[int], learned: Learned | None
) -> dict[str, Any]:
    """The conclusion as plain data. ranks: whose last messages are told."""
    return {
        "culprits": list(diagnosis.culprits),
        "text": diagnosis.text,
        "ranks": sorted(found),
        "messages": {str(rank): [to_data(message) for message in found[rank].recent] for rank in ranks},
        "learned": None if learned is None else to_data(learned),
    }


EXAMPLE = "autopar doctor --preflight out/mlp"


def add_parser(commands: Commands) -> None:
    """The command among those of `autopar`."""
    parser = add(commands, "doctor", run, __doc__, EXAMPLE, passes=True)
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--rank", type=int, action="append", default=[], help="show its last messages; may be given again"
    )
    parser.add_argument("--preflight", action="store_true", help="look at the machines before a run of this program")
    advised.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="the advice, or the conclusion about a run, as JSON")


def run(args: argparse.Namespace) -> int:
    """Print advice on a program and the conclusion about a run, whichever the directory is; 0, 1 where the preflight found what
    stops a run, or 2 where there is nothing to look at."""
    if args.preflight and args.json:
        args.own_parser.error("--json tells of a run or a program; --preflight prints what it finds")
    if args.preflight:
        return launch.main(args.directory, ["--preflight", *args.more])
    if args.more:
        args.own_parser.error(f"unrecognized arguments: {' '.join(args.more)}")
    if advised.is_program(args.directory):
        advice = advised.advised(args)
        if args.json:
            print(json.dumps(advice.facts()))
        else:
            show(str(advice))
        if args.json or not (args.directory / "flight").is_dir():
            return 0
    elif args.profile or args.model:
        args.own_parser.error(f"{args.directory} is no saved program; --profile and --model are of one")
    learned = None
    try:
        learned = read_learned(args.directory)
        if learned is not None and not args.json:
            show(learned.text())
        found = read_flights(args.directory)
        diagnosis = conclusion(found)
        absent = [rank for rank in args.rank if rank not in found]
        if absent:
            raise InputError(f"--rank {absent[0]} left nothing; ranks that did: {', '.join(map(str, sorted(found)))}")
    except (AutoparError, RuntimeProgramError, SchemaError) as error:
        wrong = refuse(args, error)
        if learned is not None and args.json:
            print(json.dumps(as_data(Diagnosis((), str(error)), {}, (), learned), indent=1))
        return wrong if learned is None else 0
    ranks = tuple(dict.fromkeys((*(r for r in diagnosis.culprits[:4] if r in found), *args.rank)))
    if args.json:
        print(json.dumps(as_data(diagnosis, found, ranks, learned), indent=1))
        return 0
    show(diagnosis.text)
    for rank in ranks:
        show(*message_lines(found[rank]))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """`autopar-doctor`, the command as a program of its own."""
    return alone("doctor", add_parser, argv)


if __name__ == "__main__":
    sys.exit(main())
