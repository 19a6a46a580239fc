"""Devices and operations: presets, dtypes, the roofline's shape, calibration fits on made-up measurements."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import ClusterSpec
from autopar.cluster.device import device_from_dict, device_names, device_preset, dtype_bytes, dtype_name
from autopar.costmodel.calibrate import fit_device, fit_matmul
from autopar.costmodel.calibrate_links import Sample, collective_lines, fit_line, fit_links
from autopar.costmodel.collective import COSTS
from autopar.costmodel.compute import matmul_share, op_time_s
from autopar.errors import ClusterError
from autopar.runtime.data.fields import to_data


def test_every_preset_is_complete_and_round_trips():
    for name in device_names():
        device = device_preset(name)
        assert device.peak("float32") > 0
        assert device_from_dict(to_data(device)) == device
        assert hash(device_from_dict(to_data(device))) == hash(device)
        assert 0 < device.curve.matmul <= 1
        assert 0 < device.curve.attention <= 1


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("H100-SXM5-80GB", "h100"),
        ("V100-SXM2-16GB", "v100-16"),
        ("A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla T4", "t4"),
    ],
)
def test_product_names_are_understood(said, meant):
    assert device_preset(said).name == meant


@pytest.mark.parametrize("said", ["cpuu", "T400", "h10", "rtx4090"])
def test_a_name_that_only_begins_like_a_device_is_unknown(said):
    with pytest.raises(ClusterError, match=f"unknown device '{said}'"):
        device_preset(said)


def test_dtypes_have_many_names():
    assert dtype_name("torch.bfloat16") == dtype_name("bf16") == "bfloat16"
    assert dtype_bytes("nvfp4") == 0.5
    with pytest.raises(ClusterError, match="unknown dtype 'float7'"):
        dtype_bytes("float7")


dims = st.integers(1, 1 << 15)


@given(m=dims, n=dims, k=dims, more=st.integers(1, 8))
def test_larger_products_are_more_efficient_and_never_faster(m, n, k, more):
    h100 = device_preset("h100")
    assert matmul_share(h100, m, n, k) <= matmul_share(h100, m * more, n, k) <= h100.curve.matmul

    def seconds(m: int) -> float:
        shape = {"flops": 2.0 * m * n * k, "nbytes": 2.0 * (m * k + k * n + m * n)}
        return op_time_s(h100, dtype="bfloat16", kind="matmul", shape=(m, n, k), **shape)

    assert seconds(m) <= seconds(m * more) + 1e-15


def test_roofline_picks_the_slower_side():
    a100 = device_preset("a100")
    bound = op_time_s(a100, flops=1.0, nbytes=1e9, dtype="float16", kind="matmul", shape=(8192, 8192, 8192))
    assert bound == pytest.approx(a100.launch_overhead_s + 1e9 / (a100.memory_bandwidth_Bps * a100.curve.memory))
    assert op_time_s(a100, flops=1e12, nbytes=1e9, dtype="bool", kind="pointwise") == pytest.approx(bound)
    with pytest.raises(ClusterError, match="unknown kind of operation"):
        op_time_s(a100, flops=1, nbytes=1, dtype="float16", kind="magic")


def test_an_incomplete_device_is_named():
    with pytest.raises(ClusterError, match="device: memory_bandwidth_Bps is missing"):
        device_from_dict({"name": "x", "peak_flops": {"fp32": 1e12}, "memory_bytes": 1e9})
    with pytest.raises(ClusterError, match="unknown key 'memory_GB'"):
        device_from_dict({"preset": "h100", "memory_GB": 94})
    with pytest.raises(ClusterError, match="unknown device 'abacus'"):
        device_preset("abacus")


def test_one_sample_that_was_disturbed_moves_no_constant():
    """A process of somebody else's, while one product, attention, message was timed."""
    rate, launch, base = 50e9, 2e-6, ClusterSpec.local(1).device(0)
    products = [Sample("matmul", (n, n, n), "float32", launch + 2 * n**3 / rate) for n in (64, 128, 256, 512, 1024)]
    shares = [
        Sample("attention", (4, seq, 64), "float32", launch + 8 * seq**2 * 64 * (1 + 256 / seq) * 1.5 / (0.4 * rate))
        for seq in (128, 256, 512, 1024, 2048)
    ]
    rest = [
        Sample("launch", (1,), "float32", launch),
        Sample("wait", (1,), "float32", launch),
        Sample("memory", (2**28,), "float32", 2**28 / 10e9),
    ]

    def slower(samples, which):
        return [s._replace(seconds=s.seconds * (30 if n == which else 1)) for n, s in enumerate(samples)]

    (quiet, _), (disturbed, _) = (fit_device([*products, *slower(shares, which), *rest], base) for which in (None, 2))
    assert quiet["curve"]["attention"] == pytest.approx(0.4, rel=1e-2)
    assert disturbed["curve"]["attention"] == pytest.approx(quiet["curve"]["attention"])
    small = [Sample(kind, (1024, 2), "float32", 1e-4) for kind in ("all_reduce", "all_gather", "reduce_scatter")]
    large = [s._replace(shape=(1 << 24, 2), seconds=1e-2) for s in small]
    lines = collective_lines([*slower(small, 1), *large])
    assert {kind: line[0] for kind, line in lines.items()} == {s.kind: (1.0, 1e-4) for s in small}


def test_fits_recover_made_up_constants():
    rate, d, launch = 50e9, 16.0, 2e-6
    shapes = [(64, 64, 64), (256, 256, 256), (1024, 1024, 1024), (64, 1024, 1024), (1024, 64, 1024), (2048, 512, 512)]
    samples = [
        Sample(
            "matmul", s, "float32", launch + 2 * np.prod(s) / rate * (1 + d / s[0]) * (1 + d / s[1]) * (1 + d / s[2])
        )
        for s in shapes
    ]
    found, half, residual = fit_matmul(samples, launch)
    assert found == pytest.approx(rate, rel=0.05)
    assert half == pytest.approx(d, rel=0.15)
    assert residual < 0.02
    x = np.array([1e4, 1e6, 1e8])
    a, B, residual = fit_line(x, 1e-4 + x / 2e9)
    assert (a, B) == (pytest.approx(1e-4), pytest.approx(2e9))
    assert residual < 1e-9


def test_a_profile_changes_a_cluster():
    base = device_preset("cpu")
    samples = [Sample(kind, (1,), "float32", 1e-6) for kind in ("launch", "wait")]
    samples += [Sample("matmul", (s, s, s), "float32", 1e-6 + 2 * s**3 / 30e9) for s in (128, 512, 1024)]
    samples += [Sample("attention", (4, 512, 64), "float32", 1e-3), Sample("memory", (10**8,), "float32", 1e-2)]
    device, residuals = fit_device(samples, base)
    moved = [
        Sample(k, (n, 2), "float32", 1e-4 + n * COSTS[k].crosses(2) / 1e9)
        for k in ("all_reduce", "all_gather")
        for n in (10**4, 10**7)
    ]
    links, more = fit_links(moved)
    cluster = ClusterSpec.local(2).with_profile({"device": device, "links": links})
    assert cluster.device(0).peak("float32") == pytest.approx(30e9, rel=0.1)
    assert cluster.levels[0].bandwidth_Bps == pytest.approx(1e9, rel=1e-6)
    assert set(residuals) == {"matmul float32", "attention", "memory"}
    assert max(more.values()) < 1e-6
