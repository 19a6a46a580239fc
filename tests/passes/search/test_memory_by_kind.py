"""Blocks by the speed of devices: each kind is held against its own memory."""

from __future__ import annotations

import functools
import pickle
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.cluster import ClusterSpec
from autopar.errors import InfeasibleError
from autopar.ir.mesh import Mesh
from autopar.runtime.comm.mesh import Shares
from tests.measure import measure_peak


def two_kinds(large_bytes: float, small_bytes: float) -> ClusterSpec:
    """A device, and one of a third of its speed."""
    local = ClusterSpec.local(2)
    slow = replace(local.device(0), name="slow", memory_bytes=small_bytes)
    peaks = {dtype: 3 * flops for dtype, flops in slow.peak_flops.items()}
    fast = replace(
        slow,
        name="fast",
        memory_bytes=large_bytes,
        peak_flops=peaks,
        memory_bandwidth_Bps=3 * slow.memory_bandwidth_Bps,
    )
    return ClusterSpec("two kinds", ((1, fast), (1, slow)), local.levels)


@functools.cache
def on_two_kinds(large_bytes: float, small_bytes: float) -> autopar.ParallelProgram:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
    return autopar.compile(
        torch.nn.Sequential(*layers),
        two_kinds(large_bytes, small_bytes),
        (torch.randn(4096, 64),),
        loss_fn=lambda y: y.square().mean(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        options=autopar.Options(strategy="dp", recompute="none", microbatches=1, idle_ranks=False),
    )


def test_rows_by_speed_fit_where_each_kind_has_memory_for_its_own() -> None:
    roomy = on_two_kinds(1e9, 1e9)
    ((axis, shares),) = roomy.plan.stages[0].mesh.axes
    assert axis == "dp"
    assert isinstance(shares, Shares)
    (peak,), (on_kinds,) = roomy.account.peaks, roomy.account.peaks_on_kinds
    assert on_kinds[0] == peak, "the fast device has the longest blocks"
    assert on_kinds[1] < 0.5 * peak
    tight = on_two_kinds(2 * peak, 0.8 * peak)
    assert tight.plan.stages[0].mesh == roomy.plan.stages[0].mesh
    assert tight.account.peaks == (peak,)
    for found, promised in zip(measure_peak(tight, (torch.randn(4096, 64),)), on_kinds.values(), strict=True):
        assert 0.9 * promised <= found <= 1.005 * promised


def test_a_plan_is_short_where_the_kind_with_few_rows_has_no_memory_for_them() -> None:
    roomy = on_two_kinds(1e9, 1e9)
    peak, small = roomy.account.peaks[0], roomy.account.peaks_on_kinds[0][1]
    with pytest.raises(InfeasibleError, match="nothing fits"):
        on_two_kinds(2 * peak, 0.9 * small)


def test_a_rank_sees_its_own_blocks() -> None:
    mesh = Mesh((("dp", Shares((4, 3, 1))), ("tp", 2)))
    for rank in range(mesh.size):
        seen, place = mesh.seen_by(rank), mesh.coordinate(rank)["dp"]
        for axes in (("dp",), ("dp", "tp")):
            lengths = [(8, 6, 2), (4, 3, 1)][len(axes) - 1]
            assert int(seen.extent(16, axes) or 0) == lengths[place]
        assert seen.extent(9, ("tp",)) is None
        assert pickle.loads(pickle.dumps(seen)) == seen
    assert mesh.seen_by(0) != mesh.seen_by(2) != mesh
