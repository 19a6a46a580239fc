"""Files that ranks left when a run ended, one each, and the conclusion from all of them: who kept the run, or ended it.

flight.py writes the files. A rank that left none is one that could not write any more.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..data.datafile import read_json
from ..data.fields import from_data
from ..data.schema import SchemaError
from ..errors import RuntimeProgramError
from .diagnosis import Diagnosis, diagnose
from .flight import FLIGHT, Left


def read_flights(directory: Path) -> dict[int, Left]:
    """The files that ranks left, by rank. Raises RuntimeProgramError where none did, or a file is damaged."""
    folder = directory / FLIGHT if (directory / FLIGHT).is_dir() else directory
    found: dict[int, Left] = {}
    for path in sorted(folder.glob("rank_*.json")):
        try:
            left = from_data(Left, read_json(path))
        except (OSError, SchemaError) as error:
            raise RuntimeProgramError(f"{path} is damaged ({error}); take it away to look at the others") from None
        found[left.beat.rank] = left
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
    beats = [
        replace(found[rank].beat, last=tuple(message.row for message in found[rank].recent)) for rank in range(ranks)
    ]
    return diagnose([replace(beat, number=beat.number - 1) for beat in beats], beats)
