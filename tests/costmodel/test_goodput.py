"""The simulator of failures against closed forms, brute force and a published run."""

from __future__ import annotations

import statistics

import pytest

from autopar.costmodel.goodput import Failures, Saving, best_interval_s, expected, simulate
from tests.oracles.reliability import daly_wall_s, young_interval_s

DAY = 86400.0
LLAMA_MTBF_S = 54 * DAY / 419
"""The time between failures of a run on 16,384 H100: 419 unexpected interruptions in 54 days (Grattafiori et al. 2024, 3.3.4)."""


def goodput(interval_s: float, saving: Saving, failures: Failures, work_s: float = 400 * DAY, seeds: int = 6) -> float:
    return statistics.mean(simulate(work_s, interval_s, saving, failures, seed).goodput for seed in range(seeds))


def test_without_failures_only_saving_takes_time():
    done = simulate(1000.0, 100.0, Saving(2.0, 30.0), Failures(1e18))
    assert (done.wall_s, done.lost_s, done.failures) == (1000 + 9 * 2.0, 0.0, 0)


@pytest.mark.parametrize(
    ("interval_s", "write_s", "mtbf_s"), [(3600, 300, 20000), (900, 60, 5000), (7200, 1800, 86400)]
)
def test_synchronous_saving_is_dalys_wall_time(interval_s, write_s, mtbf_s):
    work_s = 300.0 * mtbf_s
    walls = [simulate(work_s, interval_s, Saving(write_s), Failures(mtbf_s), seed).wall_s for seed in range(20)]
    assert statistics.mean(walls) == pytest.approx(daly_wall_s(work_s, interval_s, write_s, mtbf_s), rel=0.015)


@pytest.mark.parametrize("write_s", [0.0, 60.0, 500.0])
@pytest.mark.parametrize("down_s", [0.0, 600.0])
def test_the_first_order_is_near_where_failures_are_rare(write_s, down_s):
    saving, failures = Saving(5.0, write_s), Failures(50000.0, down_s)
    assert goodput(700.0, saving, failures) == pytest.approx(expected(700.0, saving, failures), abs=0.003)


@pytest.mark.few(1)
@pytest.mark.parametrize("saving", [Saving(60.0), Saving(2.0, 30.0), Saving(20.0, 600.0)])
def test_the_interval_that_is_chosen_is_as_good_as_any(saving):
    failures = Failures(10000.0, 300.0)
    chosen = goodput(best_interval_s(saving, failures, 7.0), saving, failures)
    others = [goodput(t, saving, failures) for t in (50, 100, 200, 400, 800, 1600, 3200) if t >= saving.write_s]
    assert chosen >= max(others) - 0.005


def test_the_interval_is_youngs_in_whole_steps_and_no_shorter_than_writing():
    assert best_interval_s(Saving(60.0), Failures(10000.0), 1e-9) == pytest.approx(young_interval_s(60.0, 10000.0))
    assert best_interval_s(Saving(0.1, 500.0), Failures(10000.0), 80.0) == 560.0


def test_what_is_lost_down_and_saved_adds_up():
    done = simulate(100 * DAY, 600.0, Saving(3.0, 40.0), Failures(9000.0, 200.0), seed=3)
    assert done.wall_s == pytest.approx(done.work_s + done.lost_s + done.down_s + done.saving_s, rel=1e-6)
    assert 0.97 * 200 * done.failures < done.down_s <= 200 * done.failures  # some fail while others are replaced


def test_spares_that_run_out_cost_repairs_or_speed():
    saving = Saving(3.0, 40.0)

    def with_spares(spares: int | None, **more: bool) -> float:
        return goodput(600.0, saving, Failures(20000.0, 200.0, 100, spares, 2 * DAY, **more), 100 * DAY, 3)

    waits, shrinks = with_spares(0), with_spares(0, shrinks=True)
    assert waits < 0.2 < shrinks
    assert with_spares(6) < with_spares(12) < with_spares(40) == with_spares(None)
    # 8.6 nodes are under repair on average, so the run has 91 % of its nodes
    assert shrinks == pytest.approx(with_spares(None) * (1 - 2 * DAY / 20000 / 100), abs=0.02)


def test_a_published_run_of_54_days():
    """Llama 3 405B on 16,384 H100: "higher than 90 % effective training time" with 466 interruptions, 47 of them planned. A
    failure that takes 10 minutes from the stall to the next step, and a copy that stalls 5 s every Young interval."""
    failures, saving = Failures(54 * DAY / 466, 600.0), Saving(5.0, 30.0)
    interval_s = best_interval_s(saving, failures, 8.0)
    done = [simulate(54 * DAY * 0.9, interval_s, saving, failures, seed) for seed in range(10)]
    assert statistics.mean(one.failures for one in done) == pytest.approx(466, rel=0.05)
    assert statistics.mean(one.goodput for one in done) == pytest.approx(0.90, abs=0.03)


def test_a_plan_of_95_percent_at_that_rate_of_failures():
    """A stall of a second, failures found in a minute, and ranks that start in two."""
    failures, saving = Failures(LLAMA_MTBF_S, 180.0, 2048, 64, 2 * DAY), Saving(1.0, 30.0)
    assert goodput(best_interval_s(saving, failures, 8.0), saving, failures, 54 * DAY) > 0.95


@pytest.mark.parametrize("devices", [8, 1024, 16384, 100_000])
def test_more_devices_get_less_done_of_what_they_could(devices):
    mtbf_s = LLAMA_MTBF_S * 16384 / devices
    failures, saving = Failures(mtbf_s, 300.0), Saving(2.0, 30.0)
    share = goodput(best_interval_s(saving, failures, 8.0), saving, failures, 54 * DAY, 3)
    assert {8: 0.999, 1024: 0.99, 16384: 0.94, 100_000: 0.7}[devices] < share < 1
