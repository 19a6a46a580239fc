"""The files that `run.py --profile DIR` wrote, one per rank, read into a Profile."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import InputError
from autopar.report.predicted_vs_measured import Profile
from autopar.runtime.comm.recorder import RankRecord, StepRecord
from autopar.runtime.data.datafile import read_json
from autopar.runtime.data.fields import from_data
from autopar.runtime.data.schema import SchemaError


def read_profile(directory: Path, ranks: int) -> Profile:
    """The profile of a program of so many ranks. Raises InputError where a rank's file is missing or is none."""
    return Profile(tuple(_steps(directory / f"rank_{rank}.json") for rank in range(ranks)))


def _steps(path: Path) -> tuple[StepRecord, ...]:
    try:
        return from_data(RankRecord, read_json(path)).steps
    except OSError as error:
        raise InputError(
            f"--profile: {path} cannot be read ({error.strerror}); it is written at the end of run.py --profile DIR, "
            "a file per rank: bring those of all nodes together"
        ) from None
    except SchemaError as error:
        raise InputError(f"--profile: {path} is damaged ({error}); record again") from None
