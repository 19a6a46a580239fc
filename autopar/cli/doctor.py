"""`autopar-doctor DIR`: who kept a run that hung, or ended one that failed, from what its ranks wrote then.

DIR is the directory of the run (`run.py --run-dir`), or its folder `flight`. A rank that left no file is one that could not write
any more. `--rank R` shows the last messages of a rank too. Where rows of the batch moved between ranks
(`--rebalance`), their shares, the speeds that were measured, and the moves are told first.

`autopar-doctor OUT`, of a saved program, says what limits its step: compute, memory, messages, the pipeline's bubble, memory
tiers, the host, or the input; `--profile DIR` (of `run.py --profile DIR`) as the run had it, and where that lies apart from the
prediction; `--model MODEL` also what could be changed, each change planned, and `--json` all of it as data.

`autopar-doctor --preflight OUT` looks at the machines before a run of the program in OUT, and says what is wrong and what to set.
Started on one machine it looks at that one; started on all of them, with MASTER_ADDR and NODE_RANK as for launch.sh, also at what
they have in common; `torchrun … OUT/run.py --preflight` looks at every rank and link. More arguments are those of run.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from autopar.cli import advised
from autopar.errors import AutoparError, InputError
from autopar.runtime.data.schema import SchemaError
from autopar.runtime.errors import RuntimeProgramError
from autopar.runtime.health.flight import Left
from autopar.runtime.health.flight_files import conclusion, read_flights
from autopar.runtime.run import launch
from autopar.runtime.run.learned_speeds import read_learned


def message_lines(left: Left, last: int = 12) -> Iterator[str]:
    """The last messages of a rank."""
    yield f"rank {left.beat.rank}, last at {left.beat.where}"
    for m in left.recent[-last:]:
        at = time.strftime("%H:%M:%S", time.localtime(m.started))
        state = "done" if m.ended else "waited for" if m.waited else "under way"
        yield f"  {at}  step {m.step:<6} {m.action:10} #{m.number:<6} {state:10} {m.what} over {m.group}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 where the preflight found what stops a run, or 2 where there is nothing to look at."""
    parser = argparse.ArgumentParser(
        prog="autopar-doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--rank", type=int, action="append", default=[], help="show its last messages; may be given again"
    )
    parser.add_argument("--preflight", action="store_true", help="look at the machines before a run of this program")
    advised.add_arguments(parser)
    arguments, of_run = parser.parse_known_args(argv)
    if arguments.preflight:
        return launch.main(arguments.directory, ["--preflight", *of_run])
    if of_run:
        parser.error(f"unrecognized arguments: {' '.join(of_run)}")
    if advised.is_program(arguments.directory):
        status = _advise(arguments)
        if status or arguments.json or not (arguments.directory / "flight").is_dir():
            return status
    elif arguments.profile or arguments.model or arguments.json:
        parser.error(f"{arguments.directory} is no saved program; --profile, --model and --json are of one")
    learned = None
    try:
        learned = read_learned(arguments.directory)
        if learned is not None:
            print(learned.text())
        found = read_flights(arguments.directory)
        diagnosis = conclusion(found)
        absent = [rank for rank in arguments.rank if rank not in found]
        if absent:
            raise InputError(f"--rank {absent[0]} left nothing; ranks that did: {', '.join(map(str, sorted(found)))}")
    except (AutoparError, RuntimeProgramError, SchemaError) as error:
        print(f"autopar-doctor: {error}", file=sys.stderr)
        return 2 if learned is None else 0
    print(diagnosis.text)
    for rank in dict.fromkeys((*(r for r in diagnosis.culprits[:4] if r in found), *arguments.rank)):
        print("\n".join(message_lines(found[rank])))
    return 0


def _advise(arguments: argparse.Namespace) -> int:
    """Print the advice on a saved program."""
    try:
        found = advised.advised(arguments)
    except (AutoparError, SchemaError) as error:
        print(f"autopar-doctor: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found.facts()) if arguments.json else found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
