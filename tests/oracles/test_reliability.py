"""Reliability: the worked examples of the texts."""

import pytest

from autopar.errors import InfeasibleError
from tests.oracles import reliability as r

HOUR = 3600.0


def test_exercise_25_4_checkpoints_every_4_4_hours():
    plan = r.checkpoint_plan(0.5 * HOUR, 24 * HOUR)
    assert plan.interval_s / HOUR == pytest.approx(4.4, abs=0.01)
    assert round(plan.per_week) == 38
    assert plan.overhead == pytest.approx(0.113, abs=0.001)
    assert 0.7 < plan.goodput < 0.9


def test_exercise_25_6_failures_and_redundancy():
    assert r.failure_probability(2048, 1e-4) == pytest.approx(0.185, abs=0.0005)
    assert r.redundant_failure_probability(2048, 1e-4) == pytest.approx(2e-5, rel=0.05)


def test_daly_is_near_young_and_minimises_the_wall_time():
    write, mtbf = 60.0, 86400.0
    best = r.daly_interval_s(write, mtbf)
    assert best == pytest.approx(r.young_interval_s(write, mtbf), rel=0.05)
    wall = r.daly_wall_s(1e6, best, write, mtbf)
    assert all(wall <= r.daly_wall_s(1e6, best * f, write, mtbf) for f in (0.8, 0.9, 1.1, 1.2))
    assert r.daly_interval_s(3 * mtbf, mtbf) == mtbf
    t = r.young_interval_s(write, mtbf)
    assert r.waste(t, write, mtbf) == pytest.approx((2 * write / mtbf) ** 0.5)


def test_recovery_rises_tier_by_tier():
    seconds = r.recovery_by_tier_s(1e12, streams=16, deserialize_s=5)
    assert list(seconds.values()) == sorted(seconds.values())
    assert r.recovery_s(1e12, 16, 1e9, 5) == 67.5
    assert r.mtbf_s(1000, 1e8) == 1e5


def test_elastic_and_rebalancing():
    assert r.elastic(1e-3, 1024, 256, 100.0, 3, 4) == (5e-4, 75.0)
    assert not r.should_rebalance([1.0, 1.1], steps_left=10**6, move_s=1)
    assert r.should_rebalance([1.0, 2.0], steps_left=1000, move_s=100)
    assert not r.should_rebalance([1.0, 2.0], steps_left=10, move_s=100)
    assert r.shares_by_speed([1.0, 3.0]) == pytest.approx([0.75, 0.25])


def test_exercise_25_3_places_400_tb_in_tiers():
    tiers = {"hbm": 160e12, "ddr": 512e12, "nvme": 100e12}
    assert r.place_in_tiers(400e12, tiers) == {"hbm": 160e12, "ddr": 240e12, "nvme": 0.0}
    with pytest.raises(InfeasibleError, match=r"28\.0 TB short"):
        r.place_in_tiers(800e12, tiers)
