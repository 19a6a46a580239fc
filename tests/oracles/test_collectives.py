"""Collectives: the texts' worked examples."""

import pytest

from tests.oracles import collectives as c


def test_example_25_2_two_level_sum():
    inner = c.ring_all_reduce_s(25e9, 8, 600e9)
    outer = c.ring_all_reduce_s(25e9, 32, 200e9)
    assert inner * 1e3 == pytest.approx(73, abs=0.5)
    assert outer * 1e3 == pytest.approx(242, abs=0.5)
    assert c.hierarchical_sum_s(25e9, 8, 600e9, 32, 200e9) * 1e3 == pytest.approx(315, abs=0.5)


def test_example_9_1_is_6_125_seconds():
    assert c.ring_all_reduce_s(350e9, 8, 100e9) == 6.125


def test_example_25_5_compression_pays_1_22():
    plain, small = 25e9 / 200e9, c.compressed_s(25e9, 0.5e9, 200e9, 0.05, 0.05)
    assert plain == 0.125
    assert small == pytest.approx(0.1025)
    assert plain / small == pytest.approx(1.22, abs=0.005)
    assert c.compression_speedup(0.5, 4, 0) == pytest.approx(1.6)


def test_one_bucket_beats_many_messages():
    one, many = c.aggregated_s([1e6] * 25, 25e9, 1e-5)
    assert one < many
    assert many - one == pytest.approx(24e-5)
