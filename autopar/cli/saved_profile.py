"""The files that `run.py --profile DIR` wrote, one per rank, read into a Profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autopar.errors import InputError
from autopar.report.beside import Profile
from autopar.runtime.comm.recorder import KEPT, Sent, Span, StepRecord
from autopar.runtime.data.datafile import read_json
from autopar.runtime.data.schema import (
    MOST_RANKS,
    Schema,
    SchemaError,
    integer,
    listed,
    number,
    paragraph,
    record,
    row,
    text,
)

_S = number(0, 1e9)
_MESSAGE: Schema[Any] = row(text(), text(), integer(0, 1 << 60), paragraph(), text(), _S, _S, _S)
_STEP = record({"seconds": _S, "spans": listed(row(text(), _S, _S)), "messages": listed(_MESSAGE)})
_RANK = record({"autopar_profile": integer(1, 1), "rank": integer(0, MOST_RANKS), "steps": listed(_STEP, 1, KEPT)})


def read_profile(directory: Path, ranks: int) -> Profile:
    """The profile of a program of so many ranks. Raises InputError where a rank's file is missing or is none."""
    return Profile(tuple(_steps(directory / f"rank_{rank}.json") for rank in range(ranks)))


def _steps(path: Path) -> tuple[StepRecord, ...]:
    try:
        data = _RANK(read_json(path), "")
    except OSError as error:
        raise InputError(
            f"--profile: {path} cannot be read ({error.strerror}); it is written at the end of run.py --profile DIR, "
            "a file per rank: bring those of all nodes together"
        ) from None
    except SchemaError as error:
        raise InputError(f"--profile: {path} is damaged ({error}); record again") from None
    return tuple(
        StepRecord(step["seconds"], tuple(Span(*s) for s in step["spans"]), tuple(Sent(*m) for m in step["messages"]))
        for step in data["steps"]
    )
