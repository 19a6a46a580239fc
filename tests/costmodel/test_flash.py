"""Attention and grouped products are priced as they were measured one by one on an H100."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.cluster import ClusterSpec
from autopar.cluster.device import device_preset
from autopar.costmodel.compute import half_dim, matmul_share
from autopar.costmodel.flash import FLASH_2, FLASH_3, PLAIN, attention_share, causal_tile, flash_kernel
from autopar.costmodel.software import Software, emitted_on
from benchmarks import fit_cost_model
from benchmarks.measured_kernels import recorded, residuals

H100 = device_preset("h100")
SAMPLE = Path(__file__).parent / "estimator/published_sample.json"


@pytest.mark.parametrize(
    ("kind", "rows", "median", "worst"),
    [
        ("flash attention forward", 36, 0.03, 0.22),
        ("flash attention backward", 36, 0.03, 0.1),
        ("cudnn attention forward", 36, 0.03, 0.1),
        ("cudnn attention backward", 36, 0.04, 0.15),
        ("grouped product", 40, 0.13, 0.36),
    ],
)
def test_kernels_of_an_h100_take_what_was_measured(kind: str, rows: int, median: float, worst: float) -> None:
    errors = np.abs(residuals(recorded(), H100)[kind])
    assert len(errors) == rows
    assert np.median(errors) <= median
    assert errors.max() <= worst


def test_grouped_products_of_emitted_programs_are_priced_as_measured_where_they_were() -> None:
    assert emitted_on(ClusterSpec.preset("dgx-h100")).constants.grouped_share == 1.0
    assert emitted_on(ClusterSpec.preset("dgx-a100")).constants.grouped_share < 1.0
    few, many = (
        matmul_share(H100, rows, 4096, 4096, grouped=True) / matmul_share(H100, rows, 4096, 4096) for rows in (64, 4096)
    )
    assert few > 1.5
    assert many == pytest.approx(1.0, abs=0.05)


def test_a_product_in_fewer_bits_needs_longer_dims_for_its_higher_peak() -> None:
    shares = [
        matmul_share(H100, 1024, 4096, 4096, dtype) / matmul_share(H100, 1 << 30, 1 << 30, 1 << 30, dtype)
        for dtype in ("float32", "bfloat16", "float8")
    ]
    assert shares == sorted(shares, reverse=True)
    assert half_dim(H100, "float8") == pytest.approx(2 * H100.curve.half_dim, rel=1e-3)
    assert half_dim(H100, "mxfp8") == half_dim(H100, "float8")
    cpu = device_preset("cpu")
    assert half_dim(cpu, "float32") == half_dim(cpu, "bfloat16") == cpu.curve.half_dim


def test_every_device_has_the_kernels_that_were_written_for_it() -> None:
    for name, own in (("h100", FLASH_3), ("b200", FLASH_3), ("a100", FLASH_2), ("mi300x", FLASH_2), ("cpu", PLAIN)):
        device = device_preset(name)
        eager = PLAIN if name == "cpu" else FLASH_2
        for backward in (False, True):
            assert flash_kernel(device, eager=False, backward=backward) == own[backward]
            assert flash_kernel(device, eager=True, backward=backward) == eager[backward]


def test_attention_gains_with_length_and_loses_under_a_mask_and_where_heads_are_narrow() -> None:
    for backward in (False, True):
        shares = [attention_share(H100, seq, 128, backward=backward) for seq in (512, 2048, 8192, 1 << 20)]
        assert shares == sorted(shares)
        tiles = [causal_tile(H100, seq, backward=backward) / seq for seq in (512, 2048, 8192)]
        assert tiles == sorted(tiles, reverse=True)
        narrow = [attention_share(H100, 4096, head, backward=backward) for head in (16, 32, 64, 96, 128)]
        assert narrow == sorted(narrow)
    assert attention_share(H100, 1 << 40, 128) == pytest.approx(H100.curve.attention)
    assert attention_share(H100, 4096, 512) == attention_share(H100, 4096, 256)


def test_the_fit_predicts_rows_and_kernels_from_its_prior() -> None:
    rows = fit_cost_model.usable(json.loads(SAMPLE.read_text()))
    assert (fit_cost_model.predict(rows, fit_cost_model.START) > 0).all()
    slower = {**fit_cost_model.START, "attention_eager": fit_cost_model.START["attention_eager"] / 2}
    moved = fit_cost_model.kernel_errors(slower) - fit_cost_model.kernel_errors(fit_cost_model.START)
    assert set(np.round(moved, 6)) == {0.0, round(float(np.log(2)), 6)}


def test_attention_is_torchs_where_torch_compiles_and_slower_where_it_adds_a_bias() -> None:
    own, torchs, biased = (Software(attention=kind) for kind in ("own", "torch", "biased"))
    assert (own.eager_attention, torchs.eager_attention, biased.eager_attention) == (False, True, True)
    assert own.attention_share == torchs.attention_share == 1.0
    constants = replace(biased.constants, biased_attention=0.5)
    assert replace(biased, constants=constants).attention_share == 0.5
    assert Software(kernels="eager").eager_attention
    assert not Software().eager_attention
