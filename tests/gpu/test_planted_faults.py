"""The simulated GPU's own test: what is planted is found, with its kind and its lines, and what is right is left alone."""

from __future__ import annotations

import pytest

from tests.gpu.planted import PLANTED, Planted
from tests.gpu.simulated import on_ranks
from tests.gpu.simulation.findings import KINDS

every_fault = pytest.mark.parametrize("planted", PLANTED, ids=str)


@every_fault
def test_a_planted_fault_is_found_with_its_lines(planted: Planted) -> None:
    found = on_ranks(planted.ranks, lambda rank, _: planted.body(rank, True))
    assert {one.kind for one in found.findings} == {planted.kind}, str(found)
    lines = {int(place.line.rpartition(":")[2]) for one in found.findings for place in one.places}
    assert lines == planted.lines, str(found)


@every_fault
def test_the_same_program_without_its_fault_is_right(planted: Planted) -> None:
    found = on_ranks(planted.ranks, lambda rank, _: planted.body(rank, False))
    assert not found.findings, str(found)


def test_there_are_enough_faults() -> None:
    assert len(PLANTED) >= 30
    assert {planted.kind for planted in PLANTED} == set(KINDS)
