"""Memory in the formulas of the texts: the Korthikanti and ZeRO tables to the last digit."""

import pytest

from tests.oracles.transformer_memory import korthikanti_layer_bytes, korthikanti_total_bytes, zero_bytes

# model: a, h, L, t, p, V, b, activations in GiB with TP only, with TP + SP + selective (s = 2048, v = 51200).
TABLE = [
    (64, 6144, 48, 8, 1, 1, 4, 59.25, 9.5625),
    (96, 12288, 96, 8, 8, 3, 1, 66.84375, 12.3515625),
    (128, 20480, 105, 8, 35, 3, 1, 114.0234375, 23.076171875),
    (160, 25600, 128, 8, 64, 1, 1, 131.25, 26.5625),
]


@pytest.mark.parametrize(("a", "h", "L", "t", "p", "V", "b", "tp_only", "selective"), TABLE)
def test_korthikanti_table_is_exact(a, h, L, t, p, V, b, tp_only, selective):
    layers = L * (1 + (p - 1) / (p * V)) if V > 1 else L
    plain = layers * korthikanti_layer_bytes(2048, b, h, a, t)
    lean = layers * korthikanti_layer_bytes(2048, b, h, a, t, sequence_parallel=True, recompute="selective")
    assert plain / 2**30 == tp_only
    assert lean / 2**30 == selective


@pytest.mark.parametrize(
    ("index", "percent"),
    [(0, (66.84, 49.42, 16.18, 7.64)), (1, (62.04, 56.53, 18.49, 8.71)), (2, (58.31, 62.04, 20.27, 9.42))],
)
def test_korthikanti_figure_7_within_a_sixth_of_a_point(index, percent):
    a, h, _, t, _, _, b, *_ = TABLE[index]
    full = korthikanti_layer_bytes(2048, b, h, a, t)
    cases = [(True, "none"), (False, "selective"), (True, "selective"), (False, "full")]
    for (sp, recompute), expected in zip(cases, percent, strict=True):
        share = korthikanti_layer_bytes(2048, b, h, a, t, sequence_parallel=sp, recompute=recompute) / full
        assert 100 * share == pytest.approx(expected, abs=0.15)


def test_the_first_stage_also_holds_dropout_and_without_pipeline_the_logits():
    deep = korthikanti_total_bytes(2048, 1, 12288, 96, 96, 51200, 8, 8, 3, sequence_parallel=True, recompute="none")
    layers = 96 * (1 + 7 / 24) * korthikanti_layer_bytes(2048, 1, 12288, 96, 8, sequence_parallel=True)
    assert deep - layers == pytest.approx(2048 * 12288 * 8 / 8)
    flat = korthikanti_total_bytes(2048, 1, 12288, 96, 1, 51200, 1, 1, 1, sequence_parallel=False, recompute="full")
    assert flat == 2 * 2048 * 12288 + 2048 * 12288 + 4 * 2048 * 12288 * (1 + 51200 / 12288)


def test_zero_table_is_exact():
    assert zero_bytes(7.5e9, 64, 0) == 120e9
    for ranks, one, two, three in (
        (4, 52.5, 41.3, 30),
        (16, 35.6, 21.6, 7.5),
        (64, 31.4, 16.6, 1.88),
        (1024, 30.1, 15.1, 0.12),
    ):
        assert zero_bytes(7.5e9, ranks, 1) / 1e9 == pytest.approx(one, abs=0.06)
        assert zero_bytes(7.5e9, ranks, 2) / 1e9 == pytest.approx(two, abs=0.06)
        assert zero_bytes(7.5e9, ranks, 3) / 1e9 == pytest.approx(three, abs=0.06)


def test_exercise_9_3_is_332_5_gb_on_every_device():
    assert zero_bytes(70e9, 16, 2, weight=4, grad=4, K=8) == 332.5e9
