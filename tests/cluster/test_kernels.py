"""Measured kernels and collectives: what a profile says of them, how they are read, and fits on made-up measurements."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from autopar.cluster import ClusterSpec
from autopar.cluster.device import device_from_dict, device_preset
from autopar.cluster.kernels import FILL, KernelTimes, Product, seconds_at
from autopar.cluster.link import LinkLevel
from autopar.costmodel import host_kernels
from autopar.costmodel.calibrate_exchanges import exchange_seconds
from autopar.costmodel.calibrate_lateness import late_share, of_ranks, of_slowest, usual_of_slowest_s
from autopar.costmodel.calibrate_links import OVERLAPPED, OVERLAPPED_BYTES, Sample, collective_lines, fit_links
from autopar.costmodel.collective import collective_time_s
from autopar.costmodel.compute import filling_time_s, op_time_s, update_time_s
from autopar.costmodel.host_kernels import Measured, fit_kernels, fit_product, middle, usual_s
from autopar.costmodel.software import NEUTRAL, emitted_on
from autopar.errors import ClusterError
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.threads import run_threads
from autopar.runtime.data.fields import from_data, to_data

KERNELS = KernelTimes(
    {
        "copy": ((1e3, 1e-6), (1e6, 1e-4)),
        "aten.gelu": ((1e3, 5e-6), (1e6, 1e-3)),
        "update 2": ((1e3, 2e-5), (1e6, 5e-4)),
    },
    {"autopar.linear": Product(2e-6, 1e11, 8.0)},
)
DEVICE = replace(device_preset("cpu"), kernels=KERNELS)


def seconds(op: str, nbytes: float, device=DEVICE, **more) -> float:
    return op_time_s(device, flops=0.0, nbytes=nbytes, dtype="float32", kind="pointwise", op=op, **more)


def test_a_measured_op_takes_what_it_took_between_its_points_and_the_last_rate_beyond_them():
    assert seconds("aten.gelu.default", 1e3) == pytest.approx(5e-6)
    assert seconds("aten.gelu.default", 1.0) == pytest.approx(5e-6)
    assert seconds("aten.gelu.default", (1e3 + 1e6) / 2) == pytest.approx((5e-6 + 1e-3) / 2)
    rate = (1e-3 - 5e-6) / (1e6 - 1e3)
    assert seconds("aten.gelu.default", 3e6) == pytest.approx(1e-3 + 2e6 * rate)


def test_an_op_that_was_not_measured_takes_what_a_copy_takes():
    assert seconds("aten.cosh.default", 1e6) == pytest.approx(1e-4)


def test_a_product_takes_its_launch_and_its_flops_stretched_by_thin_dims():
    taken = op_time_s(
        DEVICE, flops=2e9, nbytes=1.0, dtype="float32", kind="matmul", shape=(5, 8, 8, 1e12), op="autopar.linear"
    )
    assert taken == pytest.approx(2e-6 + 2e9 / 1e11 * 2 * 2)


def test_a_device_without_measured_kernels_knows_no_ops():
    assert seconds("aten.gelu.default", 1e6, device_preset("cpu")) == seconds(
        "aten.add.Tensor", 1e6, device_preset("cpu")
    )


def test_what_is_left_of_a_result_is_filled_where_that_was_measured():
    device = replace(DEVICE, kernels=replace(KERNELS, passes={**KERNELS.passes, FILL: ((1e3, 1e-6), (1e6, 1e-3))}))
    assert filling_time_s(device, 3e6, 2e6) == (pytest.approx(1e-3), 2e6)
    assert filling_time_s(device, 1e6, 2e6) == (0.0, 1e6)
    assert filling_time_s(device_preset("cpu"), 3e6, 2e6) == (0.0, 3e6)


def test_updates_are_measured_by_state_and_read_for_numbers_and_arrays_alike():
    assert update_time_s(DEVICE, 2.0, 1e6 / 7) == pytest.approx(5e-4)
    assert update_time_s(DEVICE, 2.0, np.array([1e6 / 7, 0.0])) == pytest.approx([5e-4, 2e-5])


def test_a_profile_with_kernels_and_collectives_round_trips():
    for kernels in (KERNELS, replace(KERNELS, causal_tile=512.0)):
        assert from_data(KernelTimes, to_data(kernels)) == kernels
    assert device_from_dict(to_data(DEVICE)) == DEVICE
    assert hash(device_from_dict(to_data(DEVICE))) == hash(DEVICE) != hash(device_preset("cpu"))
    links = {"node": {"measured": [["all_reduce", 2, [[1.0, 1e-3], [1e6, 2e-3]]]], "exposed": 0.5}}
    cluster = ClusterSpec.local(2).with_profile({"device": {"kernels": to_data(KERNELS)}, "links": links})
    assert cluster.device(0).kernels == KERNELS
    assert from_data(LinkLevel, to_data(cluster.levels[0])) == cluster.levels[0]
    assert ClusterSpec.from_dict(cluster.to_dict()) == cluster


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ({"passes": {"aten.gelu": [[1, 1], [2, 2]]}, "products": {}}, "passes has no 'copy'"),
        ({"passes": {"copy": [[2, 1], [1, 1]]}, "products": {}}, "bytes must ascend"),
        ({"passes": {"copy": [[1, 1]]}, "products": {}}, "at least 2"),
        ({"passes": {"copy": [[1, -1], [2, 2]]}, "products": {}}, "positive number"),
    ],
)
def test_a_profile_whose_kernels_make_no_sense_is_refused(kernels, message):
    with pytest.raises(ClusterError, match=message):
        ClusterSpec.local(2).with_profile({"device": {"kernels": kernels}})


def test_seconds_between_points_never_fall_beyond_the_last():
    falling = ((1.0, 2.0), (2.0, 1.0))
    assert seconds_at(falling, 10.0) == 1.0


def test_a_fit_of_products_recovers_made_up_constants():
    product = Product(5e-6, 8e10, 16.0)
    shapes = [(64, 64, 64), (512, 256, 256), (512, 1024, 256), (16, 512, 64), (1024, 1024, 1024)]
    found = [
        Measured("product", "autopar.linear", 0.0, 2.0 * np.prod(s), s, product.seconds(2.0 * np.prod(s), s))
        for s in shapes
    ]
    fitted, residual = fit_product(found)
    assert residual < 0.02
    for m in found:
        assert fitted.seconds(m.flops, m.dims) == pytest.approx(m.seconds, rel=0.05)


def test_the_usual_time_counts_what_recurs_and_not_one_long_pause():
    assert usual_s([1.0, 1.0, 2.0, 1.0]) == 1.25
    assert usual_s([1.0] * 9 + [100.0]) == pytest.approx(1.2)


def test_a_sweep_in_which_the_machine_was_slow_for_one_kind_of_ops_does_not_count():
    product, copy = (Measured(kind, kind, 8.0, 0.0, (), 1e-3) for kind in ("product", "copy"))
    slow = product._replace(seconds=2e-3)
    assert middle([[slow, copy], [product, copy], [product, copy._replace(seconds=5e-3)]]) == [product, copy]


def test_small_messages_of_a_kind_share_a_latency_and_an_all_reduce_takes_what_it_took_not_its_halves():
    samples = [
        Sample(kind, (size, 2), "float32", latency + size * per_byte)
        for kind, latency, per_byte in (
            ("all_reduce", 1e-3, 5e-9),
            ("all_gather", 2e-3, 1e-9),
            ("reduce_scatter", 3e-3, 2e-9),
            ("broadcast", 1e-4, 1e-9),
            ("p2p", 1e-4, 1e-9),
        )
        for size in (1 << 10, 1 << 22, 1 << 24)
    ]
    lines = collective_lines(samples)
    assert {round(points[0][1], 5) for kind, points in lines.items() if kind not in ("broadcast", "p2p")} == {2e-3}
    assert lines["p2p"][0][1] == pytest.approx(1e-4, rel=0.1)
    for size in (1 << 22, 1 << 24):
        assert seconds_at(lines["all_reduce"], size) == pytest.approx(1e-3 + size * 5e-9)


def test_large_messages_take_what_they_took_at_each_size_and_never_less_than_smaller_ones():
    took = {1 << 10: 2e-3, 1 << 18: 1e-3, 1 << 22: 5e-3, 1 << 24: 4e-2}
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "p2p")
    lines = collective_lines([Sample(kind, (size, 2), "float32", s) for kind in kinds for size, s in took.items()])
    assert lines["p2p"] == ((1.0, 2e-3), (1 << 18, 2e-3), (1 << 22, 5e-3), (1 << 24, 4e-2))


def test_a_calibrated_link_is_read_as_measured_and_hides_what_computing_hid():
    samples = [
        Sample(kind, (size, 2), "float32", 1e-3 + size * 1e-9)
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p")
        for size in (1 << 10, 1 << 22, 1 << 24)
    ]
    hidden = Sample(OVERLAPPED, (OVERLAPPED_BYTES, 2), "float32", 0.25 * (1e-3 + OVERLAPPED_BYTES * 1e-9))
    links, _ = fit_links([*samples, hidden], tables=True)
    cluster = ClusterSpec.local(2).with_profile({"links": links})
    assert collective_time_s(cluster, "all_gather", 1e8, (0, 1)) == pytest.approx(1e-3 + 0.1, rel=0.02)
    software = emitted_on(cluster)
    assert software.shards_share == pytest.approx(0.25)
    assert (software.reduce_share, software.gather_share) == (1.0, 1.0)
    assert emitted_on(ClusterSpec.local(2)) == NEUTRAL


def test_an_exchange_has_a_line_of_its_own_and_computing_hides_what_it_did_between_most_ranks():
    samples = [
        Sample(kind, (size, ranks), "float32", ranks * (1e-3 + size * 1e-9))
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p", "shift")
        for size in (1 << 10, 1 << 22, 1 << 24)
        for ranks in (2, 4)
    ]
    exchanges = [Sample("exchange", (size, 4), "float32", 6e-3 + size * 1e-9) for size in (1 << 17, 1 << 20, 1 << 22)]
    of_two, of_four = (Sample(OVERLAPPED, (OVERLAPPED_BYTES, n), "float32", 0.004) for n in (2, 4))
    plain, _ = fit_links([*samples, of_two, of_four], tables=True)
    links, _ = fit_links([*samples, *exchanges, of_two, of_four], tables=True)
    assert links["node"]["exposed"] == pytest.approx(0.004 / (4e-3 + 4 * OVERLAPPED_BYTES * 1e-9))
    assert links["node"]["bandwidth_Bps"] == plain["node"]["bandwidth_Bps"]
    cluster = ClusterSpec.local(4).with_profile({"links": links})
    assert collective_time_s(cluster, "exchange", 1 << 20, (0, 1, 2, 3)) == pytest.approx(6e-3 + 2**20 * 1e-9)
    assert collective_time_s(cluster, "all_to_all", 1.0, (0, 1, 2, 3)) == pytest.approx(4e-3, rel=0.01)


def test_exchanges_are_measured_between_ranks():
    def rank(comm: Comm) -> list[tuple[int, float]]:
        return exchange_seconds(comm, "ep", 1)

    measured = run_threads(2, {"ep": 2}, rank)
    assert [nbytes for nbytes, _ in measured[0]] == [163840, 1310720, 5242880]
    assert all(seconds > 0 for found in measured for _, seconds in found)


def test_a_turn_takes_what_it_takes_on_the_slowest_rank_whoever_that_is():
    taken = ([1.0, 2.0, 1.0], [2.0, 1.0, 1.0])
    found = run_threads(2, {"dp": 2}, lambda comm: usual_of_slowest_s(comm, taken[comm.rank]))
    assert found == [pytest.approx(5 / 3)] * 2


def test_ops_take_the_mean_of_all_ranks_and_what_the_slowest_is_late():
    by_rank = [[Measured("pass", "copy", 8.0, 0.0, (), seconds)] for seconds in (1e-3, 2e-3, 3e-3)]
    assert of_slowest(of_ranks(by_rank), 0.1) == [Measured("pass", "copy", 8.0, 0.0, (), pytest.approx(2.2e-3))]


def test_lateness_is_measured_between_ranks_and_they_agree_on_it():
    found = run_threads(2, {"dp": 2}, lambda comm: late_share(comm, 2))
    assert found[0] == found[1] >= 0.0


def test_every_op_that_a_calibration_times_runs_and_its_kernels_are_those_of_a_profile():
    torch.manual_seed(0)
    with torch.no_grad():
        found = [
            *host_kernels.measured([*host_kernels.passes(4), *host_kernels.updates(64)], 1),
            *host_kernels.measured([*host_kernels.passes(8), *host_kernels.updates(128)], 1),
            *host_kernels.measured([t for t in host_kernels.products(True) if t.flops < 2e7], 1),
        ]
    kernels, residuals = fit_kernels(found)
    assert {"copy", "aten.gelu", "autopar.norm_dw", "update 2"} <= set(kernels.passes)
    assert set(residuals) == set(kernels.products) - {"matmul"}
    assert from_data(KernelTimes, to_data(kernels)) == kernels


@pytest.mark.parametrize(("share", "tile"), [(0.45, 0.0), (0.5, 0.0), (0.75, 512.0), (1.0, 1024.0), (1.1, 1024.0)])
def test_a_causal_kernel_that_takes_more_than_half_skips_keys_by_tiles(share, tile):
    full = Measured("product", "autopar.attention", 1.0, 1e9, (1024, 32), 0.01)
    causal = Measured("causal", host_kernels.CAUSAL, 1.0, 1e9, (1024, 32), 0.01 * share)
    assert host_kernels.causal_tile(causal, [full]) == pytest.approx(tile)
