"""Files that ranks left when a run ended, one each, and the conclusion from all of them: who kept the run, or ended it.

flight.py writes the files. A rank that left none is one that could not write any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..data.datafile import read_json
from ..data.schema import MOST_RANKS, SchemaError, integer, listed, number, optional, paragraph, record, table, text
from ..errors import RuntimeProgramError
from .diagnosis import Beat, Diagnosis, diagnose
from .flight import FLIGHT, row_of

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
    {
        "autopar_flight": integer(3, 3),
        "ranks": integer(1, MOST_RANKS),
        "machines": listed(text()),
        "beat": _BEAT,
        "recent": listed(_MESSAGE),
    }
)


@dataclass(frozen=True)
class Left:
    """The file that a rank left. machines: of all ranks, by rank; empty where ranks did not tell each other."""

    ranks: int
    machines: Sequence[str]
    beat: Beat
    recent: Sequence[dict[str, Any]]


def read_flights(directory: Path) -> dict[int, Left]:
    """The files that ranks left, by rank. Raises RuntimeProgramError where none did, or a file is damaged."""
    folder = directory / FLIGHT if (directory / FLIGHT).is_dir() else directory
    found: dict[int, Left] = {}
    for path in sorted(folder.glob("rank_*.json")):
        try:
            data = _FLIGHT(read_json(path), "")
        except (OSError, SchemaError) as error:
            raise RuntimeProgramError(f"{path} is damaged ({error}); take it away to look at the others") from None
        beat = Beat.of(data["beat"])
        found[beat.rank] = Left(data["ranks"], data["machines"], beat, data["recent"])
    if not found:
        raise RuntimeProgramError(
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
