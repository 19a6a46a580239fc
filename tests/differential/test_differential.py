"""Small models of every kind × sets of options: equal to eager, or refused by name; nothing else."""

from __future__ import annotations

import pytest

from tests.differential import suite
from tests.differential.suite import OPTION_SETS
from tests.test_house import ROOT

NAMES = list(suite.by_name())
FAST = NAMES[::7]
"""A case of every kind for the quick suite, each under one set of options."""


def check(name: str, options: str) -> None:
    case, got = suite.by_name()[name], suite.outcome(name, options)
    if case.coupled and options == "microbatches=4":
        assert got.kind == "refused", "an op of it needs the whole batch"
        assert got.what.startswith("CoupledError"), got.what
    else:
        assert got.kind == "equal", got.what


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "options"), [(n, [*OPTION_SETS][k % len(OPTION_SETS)]) for k, n in enumerate(FAST)])
def test_a_selection_equals_eager_or_is_refused(name: str, options: str) -> None:
    check(name, options)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTION_SETS)
@pytest.mark.parametrize("name", NAMES)
def test_every_model_equals_eager_or_is_refused(name: str, options: str) -> None:
    check(name, options)


def test_the_page_counts_the_cases() -> None:
    page = (ROOT / "docs" / "correctness.md").read_text()
    assert f"{len(NAMES)} small models" in page
    assert f"{len(NAMES) * len(OPTION_SETS):,} combinations" in page
    assert f"{len(NAMES)} small models, each under six sets of options" in (ROOT / "README.md").read_text()
    assert len(OPTION_SETS) == 6
