"""Twenty scripts as people post them: each becomes one of many ranks by three changed lines at most, and computes what it did.

A script runs as it was posted, in float64, and with its changes on two and four ranks, under the chosen plan and a random
one: the numbers that it collects in lists over 20 steps and the weights at its end are the same to 1e-9. Where the model
draws random numbers, eager takes those of the program (`tests.scripts.draws`).
"""

from __future__ import annotations

import difflib
import functools
from typing import Any

import pytest
import torch

import autopar
from tests.scripts.draws import Draws
from tests.scripts.ranks import NAMES, POSTED, EveryRank, changed, parallelized, run

TOLERANCE = 1e-9
MOST_LINES = 3
RANDOM = {"ddpm", "min_gpt", "vae"}
"""Scripts whose models draw random numbers in `forward`."""
NO_CUT = {"dcgan"}
"""Scripts whose random plan of four ranks has stages, which their entry cannot be cut into."""
SEEDS = {"chosen": None, "random": 1}
QUICK = ("micrograd", "simclr")


def posted(name: str) -> str:
    return (POSTED / f"{name}.py").read_text()


def on_ranks(name: str, ranks: int, seed: int | None = None) -> tuple[dict[str, Any], str]:
    """The globals that a script with its changes leaves, with the weights under the name of the model; and that name."""
    steps: list[EveryRank] = []

    def plan_of(program: autopar.ParallelProgram) -> autopar.ParallelProgram:
        return program if seed is None else program.with_plan(autopar.random_plan(program, seed))

    try:
        left = run(name, changed(name), parallelized(plan_of, ranks, steps))
        model = next(key for key, value in left.items() if value is steps[0].model)
        return left | {model: dict(steps[0].state_dict())}, model
    finally:
        for step in steps:
            step.end()


@functools.cache
def eager(name: str) -> dict[str, Any]:
    """The globals that a script leaves as it was posted."""
    if name not in RANDOM:
        return run(name, posted(name))
    draws = Draws()
    with draws.noted():
        on_ranks(name, 1)
    with draws.given():
        return run(name, posted(name))


def assert_equal_to_one_device(name: str, ranks: int, seed: int | None) -> None:
    expected = eager(name)
    left, model = on_ranks(name, ranks, seed)
    told = {key for key, value in expected.items() if isinstance(value, list) and value and type(value[0]) is float}
    assert any(len(expected[key]) == 20 for key in told)
    for key in told:
        torch.testing.assert_close(left[key], expected[key], rtol=TOLERANCE, atol=TOLERANCE)
    state = expected[model].state_dict()
    assert list(left[model]) == list(state)
    for weight, value in state.items():
        torch.testing.assert_close(left[model][weight], value, rtol=TOLERANCE, atol=TOLERANCE)


def test_there_are_twenty() -> None:
    assert len(NAMES) == 20


@pytest.mark.parametrize("name", NAMES)
def test_three_lines_change_at_most(name: str) -> None:
    """The import aside, and the lines that go where they are not replaced."""
    lines = difflib.unified_diff(posted(name).splitlines(), changed(name).splitlines(), n=0, lineterm="")
    added = [line for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert 0 < len(added) <= MOST_LINES, "\n".join(added)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", QUICK)
def test_a_script_on_two_ranks_computes_what_it_did(name: str) -> None:
    assert_equal_to_one_device(name, 2, None)


@pytest.mark.slow
@pytest.mark.parametrize("plan", SEEDS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_every_script_on_many_ranks_computes_what_it_did(name: str, ranks: int, plan: str) -> None:
    if (name in NO_CUT) and ranks == 4 and plan == "random":
        with pytest.raises(autopar.CaptureError, match="cannot be cut into the same"):
            on_ranks(name, ranks, SEEDS[plan])
        return
    assert_equal_to_one_device(name, ranks, SEEDS[plan])
