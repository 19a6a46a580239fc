"""`autopar-doctor DIR`: who kept a run that hung, or ended one that failed, from what its ranks wrote then.

DIR is the directory of the run (`run.py --run-dir`), or its folder `flight`. A rank that left no file is one that could not write
any more. `--rank R` shows the last messages of a rank too.

`autopar-doctor --preflight OUT` looks at the machines before a run of the program in OUT, and says what is wrong and what to set.
Started on one machine it looks at that one; started on all of them, with MASTER_ADDR and NODE_RANK as for launch.sh, also at what
they have in common; `torchrun … OUT/run.py --preflight` looks at every rank and link. More arguments are those of run.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError, InputError
from autopar.runtime import launch
from autopar.runtime.datafile import read_json
from autopar.runtime.diagnosis import Beat, Diagnosis, diagnose
from autopar.runtime.flight import FLIGHT, row_of
from autopar.runtime.schema import (
    MOST_RANKS,
    SchemaError,
    integer,
    listed,
    number,
    optional,
    paragraph,
    record,
    table,
    text,
)

_RANK, _COUNT, _TIME = integer(0, MOST_RANKS), integer(-1, 1 << 53), number(0, 1e12)
_BEAT = record(
    {
        "rank": _RANK,
        "number": _COUNT,
        "step": _COUNT,
        "action": text(),
        "waits": paragraph(),
        "since_s": number(-1e9, 1e9),
        "group": text(),
        "place": _COUNT,
        "members": listed(_RANK),
        "started": table(text(), _COUNT),
        "line": paragraph(),
        "excuse": paragraph(),
        "excused_s": number(0, 1e9),
        "working": paragraph(),
        "turn": _COUNT,
        "marks": table(text(), table(text(), _COUNT)),
        "last": listed(_COUNT, most=0),
        "error": paragraph(),
        "blamed": listed(_RANK),
    }
)
_MESSAGE = record(
    {
        "started": _TIME,
        "step": _COUNT,
        "action": text(),
        "number": _COUNT,
        "group": text(),
        "members": listed(_RANK),
        "what": paragraph(),
        "waited": optional(_TIME),
        "ended": optional(_TIME),
        "turn": _COUNT,
        "place": _COUNT,
        "hash": _COUNT,
    }
)
_FLIGHT = record(
    {"autopar_flight": integer(2, 2), "ranks": integer(1, MOST_RANKS), "beat": _BEAT, "recent": listed(_MESSAGE)}
)


@dataclass(frozen=True)
class Left:
    """What a rank left."""

    ranks: int
    beat: Beat
    recent: Sequence[dict[str, Any]]


def read_flights(directory: Path) -> dict[int, Left]:
    """What every rank left, by rank. Raises InputError where none did, or a file is damaged."""
    folder = directory / FLIGHT if (directory / FLIGHT).is_dir() else directory
    found: dict[int, Left] = {}
    for path in sorted(folder.glob("rank_*.json")):
        try:
            data = _FLIGHT(read_json(path), "")
        except (OSError, SchemaError) as error:
            raise InputError(f"{path} is damaged ({error}); take it away to look at the others") from None
        beat = Beat.of(data["beat"])
        found[beat.rank] = Left(data["ranks"], beat, data["recent"])
    if not found:
        raise InputError(
            f"{folder} has no files of ranks: they are written when a run hangs or fails (run.py --run-dir)"
        )
    return found


def conclusion(found: dict[int, Left]) -> Diagnosis:
    """Who kept the run, or ended it."""
    ranks = next(iter(found.values())).ranks
    failed = [left.beat for left in found.values() if left.beat.error]
    for beat in failed:
        if beat.blamed:
            return Diagnosis(beat.blamed, beat.error)
    alone = [beat for beat in failed if not beat.waits]  # who fails in a message does so because of another rank
    if alone:
        said = "; ".join(f"rank {beat.rank} failed with {beat.error}, at {beat.where}" for beat in alone[:4])
        return Diagnosis(tuple(beat.rank for beat in alone), said)
    missing = tuple(rank for rank in range(ranks) if rank not in found)
    if missing:
        shown = ", ".join(map(str, missing[:8]))
        waits = next((left.beat for left in found.values() if left.beat.waits), None)
        for_what = f"; rank {waits.rank} waits for {waits.waits}, {waits.where}" if waits else ""
        return Diagnosis(
            missing, f"rank {shown} left nothing: it was stopped or killed, or its machine is gone{for_what}"
        )
    beats = [replace(found[rank].beat, last=tuple(map(row_of, found[rank].recent))) for rank in range(ranks)]
    return diagnose([replace(beat, number=beat.number - 1) for beat in beats], beats)


def message_lines(left: Left, last: int = 12) -> Iterator[str]:
    """The last messages of a rank."""
    yield f"rank {left.beat.rank}, last at {left.beat.where}"
    for m in left.recent[-last:]:
        at = time.strftime("%H:%M:%S", time.localtime(m["started"]))
        state = "done" if m["ended"] else "waited for" if m["waited"] else "under way"
        yield f"  {at}  step {m['step']:<6} {m['action']:10} #{m['number']:<6} {state:10} {m['what']} over {m['group']}"


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
    arguments, of_run = parser.parse_known_args(argv)
    if arguments.preflight:
        return launch.main(arguments.directory, ["--preflight", *of_run])
    if of_run:
        parser.error(f"unrecognized arguments: {' '.join(of_run)}")
    try:
        found = read_flights(arguments.directory)
        diagnosis = conclusion(found)
        absent = [rank for rank in arguments.rank if rank not in found]
        if absent:
            raise InputError(f"--rank {absent[0]} left nothing; ranks that did: {', '.join(map(str, sorted(found)))}")
    except AutoparError as error:
        print(f"autopar-doctor: {error}", file=sys.stderr)
        return 2
    print(diagnosis.text)
    for rank in dict.fromkeys((*(r for r in diagnosis.culprits[:4] if r in found), *arguments.rank)):
        print("\n".join(message_lines(found[rank])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
