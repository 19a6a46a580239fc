"""The command line of a run: options that go together."""

from __future__ import annotations

import pytest

from autopar.runtime.program.arguments import parser, without_a_directory


@pytest.mark.parametrize(
    ("given", "idle"),
    [
        ([], ""),
        (["--steps", "3", "--save", "out", "--save-every", "2", "--hang", "5"], ""),
        (["--on-nan", "skip"], "--on-nan"),
        (["--keep-every", "5"], "--keep-every"),
        (["--synchronous"], "--synchronous"),
        (["--save-every", "2"], "--save-every"),
    ],
)
def test_options_of_a_runs_directory_do_nothing_without_one(given: list[str], idle: str) -> None:
    assert without_a_directory(parser().parse_args(given)) == idle
    assert without_a_directory(parser().parse_args([*given, "--run-dir", "run"])) == ""
