"""The advice on a saved program: what its files and a profile say, and, with its model, what planning finds better."""

from __future__ import annotations

import argparse
from pathlib import Path

import autopar.api
from autopar.cli.asked_model import arguments_of
from autopar.cli.saved import Saved, read
from autopar.cli.saved_profile import read_profile
from autopar.cluster import ClusterSpec
from autopar.cluster.arrangement import arranged
from autopar.program import ParallelProgram
from autopar.report.advice.advice import Advice
from autopar.report.advice.planned import saved_advice
from autopar.report.predicted_vs_measured import Profile
from autopar.runtime.data.whole_files import current


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that ask for advice."""
    parser.add_argument("--profile", type=Path, metavar="DIR", help="of a run of this program: run.py --profile DIR")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="the model that the program is of, module:function or a config.json: changes are planned, and the better ones told",
    )
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="after which no further change is planned (default: 120)"
    )


def is_program(directory: Path) -> bool:
    """Whether a directory is a saved program, rather than that of a run, which keeps what it says of the program alone."""
    return directory.is_dir() and all((current(directory) / name).is_file() for name in ("program.json", "plan.json"))


def advised(arguments: argparse.Namespace) -> Advice:
    """The advice that the command line asks for. Raises AutoparError, SchemaError."""
    saved = read(arguments.directory)
    profile = None if arguments.profile is None else read_profile(arguments.profile, saved.program.ranks)
    if arguments.model is None:
        return of_saved(saved, profile)
    return _program(saved, arguments.model).advice(profile, seconds=arguments.seconds)


def of_saved(saved: Saved, profile: Profile | None = None) -> Advice:
    """The advice that a saved program's files have, without its model: nothing is planned. profile: of a run of it. Raises
    ClusterError."""
    return saved_advice(saved.program, arranged(_cluster(saved), saved.plan.placement), profile)


def _cluster(saved: Saved) -> ClusterSpec:
    return ClusterSpec.from_dict(saved.program.cluster_described)


def _program(saved: Saved, model: str) -> ParallelProgram:
    """The saved program, compiled again under its plan. Raises AutoparError."""
    work = saved.program.work
    batch, tokens = work.batch or 1, work.tokens or 1
    given = arguments_of(model, batch, max(tokens // batch, 1), saved.plan.precision or None)
    return autopar.api.compile(cluster=_cluster(saved), plan=saved.plan, **given)
