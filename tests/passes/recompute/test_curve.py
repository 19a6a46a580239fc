"""The curve of what keeping less costs: convex, never above a named policy, and the plan's own place on or above it."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import pytest

from autopar.passes.price.pricer import Pricers
from autopar.passes.recompute.curve import Curve, curves
from autopar.report.curve import curve_svg
from tests.passes.recompute.recomputed import llama_on


@pytest.fixture(scope="module")
def curve() -> Curve:
    program = llama_on(4, memory_bytes=9e8, pp=1)
    (found,) = curves(program.ir, program.plan, Pricers(program.cluster), program.rules)
    return found


def seconds_at(curve: Curve, nbytes: float) -> float:
    """Seconds on the curve at so many bytes, between its corners."""
    for (b, t), (c, u) in pairwise(curve.corners):
        if c <= nbytes <= b:
            return t + (u - t) * (b - nbytes) / (b - c)
    return 0.0 if nbytes >= curve.corners[0][0] else float("inf")


def test_it_runs_from_keeping_everything_to_keeping_the_least(curve: Curve) -> None:
    assert curve.corners[0][1] == 0
    for (b, t), (c, u) in pairwise(curve.corners):
        assert c < b
        assert u > t
    slopes = [(u - t) / (b - c) for (b, t), (c, u) in pairwise(curve.corners)]
    assert all(later >= slope * (1 - 1e-6) for slope, later in pairwise(slopes))


def test_no_policy_and_no_plan_is_below_it(curve: Curve) -> None:
    assert set(curve.policies) == {"none", "selective", "full"}
    for nbytes, seconds in (*curve.policies.values(), curve.chosen):
        assert seconds >= seconds_at(curve, nbytes) * (1 - 1e-9)


def test_a_plan_that_had_to_recompute_keeps_less_than_everything(curve: Curve) -> None:
    assert curve.chosen[0] < curve.corners[0][0]
    assert curve.chosen[1] > 0
    assert curve.chosen[1] < curve.policies["full"][1]


def test_the_picture_has_a_line_per_curve_that_differs(curve: Curve) -> None:
    other = replace(curve, chosen=curve.corners[0])
    picture = ET.fromstring(curve_svg([curve, curve, other], "three stages"))
    lines = [e for e in picture.iter() if e.get("id", "").startswith("curve ")]
    assert len(lines) == 2
    for line in lines:
        (path,) = (e for e in line if e.tag.endswith("path"))
        assert len(path.attrib["d"].split("L")) == len(curve.corners)
    words = {e.text for e in picture.iter() if e.tag.endswith("text")}
    assert {"none", "selective", "full", "three stages"} <= words
