"""The budget search on one mesh, with points written by hand: what a point counts is not what its plan's peak is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.passes.search.one_mesh import within_memory
from autopar.passes.search.one_mesh.within_memory import fastest_within_limit, tighter_room
from autopar.passes.shard.solve import Shortage


@dataclass(frozen=True)
class HandPoint:
    """Fewer bytes take more seconds. Once lowered, half as many bytes come on top."""

    nbytes: float

    @property
    def problem(self) -> Any:
        return SimpleNamespace(mesh=None)

    @property
    def seconds(self) -> float:
        return 1000.0 / self.nbytes

    @property
    def peak(self) -> float:
        return 1.5 * self.nbytes


@dataclass
class HandJoint:
    """A hull on which every whole number of bytes from `least` to `most` is a point."""

    least: int = 10
    most: int = 100
    price: float = 0.0
    asked: list[float] = field(default_factory=list)

    @property
    def fastest(self) -> HandPoint:
        return HandPoint(self.most)

    def smallest(self) -> HandPoint:
        self.asked.append(0.0)
        return HandPoint(self.least)

    @property
    def smallest_so_far(self) -> HandPoint:
        return HandPoint(self.least)

    def within(self, budget: float, useless_from_s: float) -> HandPoint:
        self.asked.append(budget)
        return HandPoint(int(budget))

    def hull_bound_s(self, budget: float, useless_from_s: float) -> float:
        return HandPoint(budget).seconds


@pytest.fixture(autouse=True)
def hand_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate is its point."""
    monkeypatch.setattr(within_memory, "candidate_at", lambda task, point, bound_s: point)


def task(limit: float, lowered: list[float] | None = None) -> Any:
    def finish(point: Any) -> Any:
        if not isinstance(point, HandPoint):
            return point
        if lowered is not None:
            lowered.append(point.nbytes)
        account = SimpleNamespace(peak_bytes=point.peak, surely=point.nbytes)
        solution = SimpleNamespace(cost=point.seconds)
        return SimpleNamespace(solution=solution, step_s=point.seconds, account=account, plan=None, point=point)

    return SimpleNamespace(
        limit_at=lambda mesh: limit,
        finish=finish,
        surely_short_bytes=lambda plan, counted: counted.surely - limit,
        short_bytes=lambda plan, counted: counted.peak_bytes - limit,
        program=SimpleNamespace(training=False),
    )


def fitted(joint: Any, limit: float, lowered: list[float] | None = None) -> Any:
    return fastest_within_limit(task(limit, lowered), joint)


def test_where_the_fastest_fits_nothing_else_is_looked_at() -> None:
    joint = HandJoint()
    assert fitted(joint, 150.0).point == joint.fastest
    assert joint.asked == []


def test_a_budget_is_where_peaks_on_a_straight_line_reach_the_limit() -> None:
    """10 bytes peak at 15, and 100 are too many before anything is lowered, as all above 99 are, 1.1 times the limit. With 5
    beside what they count 85 would fit; they peak at 127.5, and the line between is at 90 at 60 bytes, which fill the limit."""
    lowered: list[float] = []
    found = fitted(HandJoint(), 90.0, lowered)
    assert lowered == [10, 85, 60]
    assert found.point.nbytes == 60


def test_no_budget_is_above_what_could_be_lowered() -> None:
    joint = HandJoint(most=10_000)
    assert fitted(joint, 90.0).point.nbytes == 60
    assert max(joint.asked) < 99


def test_the_first_budget_is_what_the_peak_of_the_smallest_plan_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan needs 20 bytes beside what it counts: 67 bytes fill the limit, and nothing else is looked at."""
    monkeypatch.setattr(HandPoint, "peak", property(lambda self: self.nbytes + 20.0))
    lowered: list[float] = []
    assert fitted(HandJoint(), 87.0, lowered).point.nbytes == 67
    assert lowered == [10, 67]


def test_what_comes_out_fits_and_is_the_fastest_of_what_was_seen() -> None:
    for limit in range(15, 160, 5):
        lowered: list[float] = []
        found = fitted(HandJoint(), float(limit), lowered)
        assert found.account.peak_bytes <= limit
        assert found.point.nbytes == max(n for n in lowered if 1.5 * n <= limit)


def test_where_not_even_the_smallest_fits_its_peak_is_told() -> None:
    found = fitted(HandJoint(), 14.0)
    assert isinstance(found, Shortage)
    assert found.least_bytes == 15.0


def test_where_the_smallest_counts_far_too_many_bytes_nothing_is_lowered() -> None:
    lowered: list[float] = []
    found = fitted(HandJoint(), 9.0, lowered)
    assert isinstance(found, Shortage)
    assert (found.least_bytes, lowered) == (10, [])


def test_a_hull_without_points_between_is_asked_and_nothing_is_lowered_twice() -> None:
    class TwoPoints(HandJoint):
        def within(self, budget: float, useless_from_s: float) -> HandPoint:
            self.asked.append(budget)
            return HandPoint(self.least)

    joint, lowered = TwoPoints(), list[float]()
    assert fitted(joint, 90.0, lowered).point.nbytes == 10
    assert joint.asked == [0.0, pytest.approx(85), pytest.approx(85.5)], (
        "up to what a plan with a fifth less beside it may count"
    )
    assert lowered == [10]


def test_budgets_above_one_that_has_nothing_new_are_looked_at() -> None:
    """Points count 10, 70 or 100 bytes, and 70 are found within 72: a budget of 70, where the line of peaks is at the limit,
    has no more than 10, and 85 have the 70 that fit."""

    class Step(HandJoint):
        def within(self, budget: float, useless_from_s: float) -> HandPoint:
            self.asked.append(budget)
            return HandPoint(70 if budget >= 72 else 10)

    lowered: list[float] = []
    assert fitted(Step(), 105.0, lowered).point.nbytes == 70
    assert lowered == [100, 10, 70]


def test_what_a_byte_costs_at_another_budget_stops_nothing() -> None:
    """Bytes are nearly free where the first budget is, and dear where the plan that fits is."""

    class Flat(HandJoint):
        def within(self, budget: float, useless_from_s: float) -> HandPoint:
            self.price = 1e-12
            return super().within(budget, useless_from_s)

    assert fitted(Flat(), 60.0).point.nbytes == 40


def test_what_would_be_hardly_faster_is_not_looked_for() -> None:
    joint = HandJoint(most=1000, least=999)
    assert fitted(joint, 1499.0).point.nbytes == 999
    assert joint.asked == [0.0]


def test_where_the_hull_is_too_slow_the_smallest_plan_is_all_that_is_looked_at() -> None:
    """No plan of less than 90 bytes takes less than 11.1 seconds, nor one of those that peaks let be looked for, up to 86, less
    than 11.6. The smallest takes 100."""
    for useless_from_s, looked_at in ((11.0, [10]), (11.5, [10]), (12.0, [10, 85, 60])):
        lowered: list[float] = []
        found = fastest_within_limit(task(90.0, lowered), HandJoint(), useless_from_s)
        assert (found is None) == (useless_from_s == 11.0)
        assert lowered == looked_at


def test_where_bounds_are_enough_to_see_that_nothing_is_of_interest_no_peak_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HandPoint, "peak", property(lambda self: pytest.fail("its gradients are played")))
    one = task(90.0)
    one.finish = lambda point: SimpleNamespace(
        solution=SimpleNamespace(cost=point.seconds),
        step_s=point.seconds,
        account=SimpleNamespace(surely=0.0),
        plan=None,
    )
    assert fastest_within_limit(one, HandJoint(), 11.0) is None


def test_a_smallest_plan_that_is_hardly_slower_than_what_it_is_to_beat_is_found() -> None:
    found = fastest_within_limit(task(90.0), HandJoint(), 98.0)
    assert found is not None
    slow = fastest_within_limit(task(16.0), HandJoint(least=10, most=11), 98.0)
    assert slow is not None
    assert slow.account.peak_bytes == 15.0


def test_what_a_peak_is_at_least_is_enough_to_see_that_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HandPoint, "peak", math.nan)
    found = fitted(HandJoint(), 9.5)
    assert isinstance(found, Shortage)
    assert found.least_bytes == 10.0


def test_ops_are_held_to_as_much_less_as_the_moment_is_too_long() -> None:
    """The smallest plan counts 10 bytes, 50 below the limit, and needs 100 beside them: what its largest op reads and makes is to
    be half as much. A small op, or bytes that are counted, are not what is too much."""

    def held_to(largest: float, limit: float, least_peak: float, room: float = math.inf) -> float:
        point = SimpleNamespace(
            nbytes=10.0, choice=(), problem=SimpleNamespace(largest_moment_bytes=lambda choice: largest)
        )
        return tighter_room(SimpleNamespace(smallest_so_far=point), limit, least_peak, room)  # type: ignore[arg-type]

    assert held_to(50.0, 60.0, 110.0) == 25.0
    assert held_to(5.0, 60.0, 110.0) == math.inf
    assert held_to(50.0, 10.0, 110.0) == math.inf
    assert held_to(50.0, 60.0, 60.0) == math.inf
    assert held_to(50.0, 60.0, 110.0, room=50.0) == 25.0
    assert held_to(50.0, 60.0, 110.0, room=40.0) == math.inf, "it is as small as it gets"
