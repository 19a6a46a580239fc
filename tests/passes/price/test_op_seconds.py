"""Seconds of single ops on their blocks, by closed form: 2 m n k of a product, bytes read and written of everything else."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx

from autopar.cluster import ClusterSpec
from autopar.cluster.device import DeviceSpec, EfficiencyCurve, device_preset
from autopar.cluster.kernels import FILL, KernelTimes
from autopar.cluster.link import LinkLevel
from autopar.costmodel.compute import aligned_share
from autopar.ir.call import OpCall, Operand
from autopar.ir.mesh import Mesh
from autopar.ir.program import Template
from autopar.ir.rule import Rule
from autopar.ir.types import TensorType
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.memo import Memo
from autopar.passes.shard.uneven import balanced
from autopar.runtime.comm.mesh import Shares

MEASURED = Path(__file__).parents[2] / "gpu/recorded/kernels/nvidia-h100-80gb-hbm3.json"
PEAK, MEMORY, LAUNCH = 1e12, 1e11, 2e-6
CURVE = EfficiencyCurve(matmul=0.5, memory=0.5, half_dim=16.0)
DEVICE = DeviceSpec("test", {"float32": PEAK}, 1e12, 2 * MEMORY, LAUNCH, curve=CURVE)
PRICER = Pricer(ClusterSpec("test", ((4, DEVICE),), (LinkLevel("node", 4, 1e9, 1e-5),)), Mesh.of(dp=4))
aten = torch.ops.aten


def seconds(op: Callable[..., object], shapes: list[tuple[int, ...]], out: tuple[int, ...], sharded: bool) -> float:
    """Seconds of an op on float32 tensors, whole or with its first factor over the four ranks."""
    call, rule = ruled(op, shapes, out, torch.float32)
    return PRICER.op_s(call, rule, (next(iter(rule.factors)) if sharded else "",))


def ruled(
    op: Callable[..., object], shapes: list[tuple[int, ...]], out: tuple[int, ...], dtype: torch.dtype
) -> tuple[OpCall, Rule]:
    """A call of an op, and how it may be sharded."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
    node = graph.call_function(op, tuple(inputs))
    graph.output((node,))
    for value, shape in zip((*inputs, node), (*shapes, out), strict=True):
        value.meta["type"] = TensorType(shape, dtype)
    names = tuple(value.name for value in inputs)
    template = Template("t", graph, (), names, (node.name,), (None,) * len(names), (None,), ())
    call = template.op_calls[node.name]
    return call, RuleBook().rule(call)


@pytest.mark.parametrize("ways", [1, 4])
def test_a_product_takes_its_flops_at_the_share_of_its_shape(ways: int) -> None:
    m, k, n = 1024, 512, 2048
    share = 0.5 / ((1 + 16 / (m / ways)) * (1 + 16 / n) * (1 + 16 / k))
    expected = LAUNCH + 2 * m * n * k / ways / (PEAK * share)
    assert seconds(aten.mm.default, [(m, k), (k, n)], (m, n), ways > 1) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("m", "k", "n", "ways", "kept"),
    [
        (1024, 512, 2048, 1, 1.0),
        (1023, 512, 2048, 1, 1.0),
        (1024, 510, 2048, 1, 0.4),
        (1024, 512, 2044, 1, 0.4),
        (1024, 511, 2048, 1, 0.2),
        (1024, 512, 2047, 1, 0.2),
        (1024, 512, 8192, 4, 1.0),
        (1024, 512, 8176, 4, 0.4),
        (1024, 512, 8180, 4, 0.2),
        (1024, 512, 8190, 4, 0.2),
    ],
)
def test_rows_that_are_no_multiple_of_16_bytes_are_slower(m: int, k: int, n: int, ways: int, kept: float) -> None:
    """Where n is cut over four ranks, of 8190 two hold 2048 columns and two 2047."""
    call, rule = ruled(aten.mm.default, [(m, k), (k, n)], (m, n), torch.bfloat16)
    mesh = Mesh((("tp", Shares(balanced(n, ways)) if n % ways else ways),))
    (factor,) = rule.operands[1][1] if ways > 1 else ("",)
    plain, device = (
        replace(DEVICE, peak_flops={"bfloat16": PEAK}, curve=c) for c in (CURVE, replace(CURVE, even=0.4, odd=0.2))
    )
    full_s, got_s = (
        Pricer(ClusterSpec("test", ((ways, one),), (LinkLevel("node", ways, 1e9, 1e-5),)), mesh).op_s(
            call, rule, (factor,)
        )
        for one in (plain, device)
    )
    assert got_s - LAUNCH == pytest.approx((full_s - LAUNCH) / kept)


def test_blocks_of_unequal_numbers_of_heads_are_as_aligned_as_heads_are() -> None:
    """Eight heads of 64 over five ranks: three have 128 columns, two 64."""
    call, rule = ruled(aten.mm.default, [(1024, 512), (512, 512)], (1024, 512), torch.bfloat16)
    (factor,) = rule.operands[1][1]
    mesh = Mesh((("tp", Shares((2, 2, 2, 1, 1))),))
    assert mesh.blocks(512, ("tp",)) == (128, 128, 128, 64, 64)
    plain, device = (
        replace(DEVICE, peak_flops={"bfloat16": PEAK}, curve=c) for c in (CURVE, replace(CURVE, even=0.4, odd=0.2))
    )
    full_s, got_s = (
        Pricer(ClusterSpec("test", ((5, one),), (LinkLevel("node", 5, 1e9, 1e-5),)), mesh).op_s(call, rule, (factor,))
        for one in (plain, device)
    )
    assert got_s == full_s


def test_products_measured_on_an_h100_keep_the_share_that_its_curve_says() -> None:
    """Products of 8192 to a side, less so many in one dim, beside the whole one."""
    measured = json.loads(MEASURED.read_text())["odd products"]
    h100 = device_preset("h100")
    kept: dict[float, list[float]] = {1.0: [], h100.curve.even: [], h100.curve.odd: []}
    for one in measured:
        said = aligned_share(h100, "bfloat16", one["shape"][1:])
        kept[said].append(one["flops_a_second"] / 760e12)
    assert min(map(len, kept.values())) >= 4
    for said, found in kept.items():
        assert statistics.median(found) == pytest.approx(said, rel=0.2)


def test_a_thin_product_takes_its_bytes() -> None:
    m, k, n = 4096, 4096, 1
    expected = LAUNCH + 4 * (m * k + k * n + m * n) / MEMORY
    flops_s = 2 * m * n * k * (1 + 16 / m) * (1 + 16 / n) * (1 + 16 / k) / (PEAK * 0.5)
    got = seconds(aten.mm.default, [(m, k), (k, n)], (m, n), False)
    assert got == pytest.approx(max(expected, LAUNCH + flops_s))


@pytest.mark.parametrize("ways", [1, 4])
@pytest.mark.parametrize(("op", "operands"), [(aten.relu.default, 1), (aten.add.Tensor, 2), (aten.mul.Tensor, 2)])
def test_a_pointwise_op_reads_its_operands_and_writes_its_result(
    op: Callable[..., object], operands: int, ways: int
) -> None:
    shape = (1024, 512)
    expected = LAUNCH + (operands + 1) * 4 * 1024 * 512 / ways / MEMORY
    assert seconds(op, [shape] * operands, shape, ways > 1) == pytest.approx(expected)


def test_the_gradient_of_a_look_up_takes_its_rows_and_fills_the_rest_of_the_table() -> None:
    """The device is as measured: a millisecond a kB of rows and what they are added to, a microsecond a kB of zeros."""
    passes = {"copy": ((1.0, 1.0), (2.0, 2.0)), "autopar.embedding_grad": ((1.0, 1e-6), (1e9, 1e3))}
    kernels = KernelTimes({**passes, FILL: ((1.0, 1e-9), (1e9, 1.0))})
    device = replace(DEVICE, kernels=kernels)
    known = Pricer(ClusterSpec("test", ((4, device),), (LinkLevel("node", 4, 1e9, 1e-5),)), Mesh.of(dp=4))
    graph = fx.Graph()
    g, index = graph.placeholder("g"), graph.placeholder("index")
    node = graph.call_function(torch.ops.autopar.embedding_grad.default, (g, index, 4096, -1))
    graph.output((node,))
    types = (TensorType((64, 16), torch.float32), TensorType((64,), torch.int64), TensorType((4096, 16), torch.float32))
    for value, type_ in zip((g, index, node), types, strict=True):
        value.meta["type"] = type_
    template = Template("t", graph, (), ("g", "index"), (node.name,), (None,) * 2, (None,), ())
    call = template.op_calls[node.name]
    own = 4096 + 512 + 4096
    assert known.op_s(call, RuleBook().rule(call), ("",)) == pytest.approx(own * 1e-6 + (4096 * 64 - 4096) * 1e-9)


def test_meshes_share_seconds_of_equal_blocks_and_get_those_that_each_would_find_alone() -> None:
    call, rule = ruled(aten.mm.default, [(32, 64), (64, 16)], (32, 16), torch.float32)
    cluster, memo = ClusterSpec("test", ((8, DEVICE),), (LinkLevel("node", 8, 1e9, 1e-5),)), Memo()
    for mesh in (Mesh.of(dp=8), Mesh.of(dp=4, tp=2), Mesh.of(dp=2, tp=4)):
        shared = Pricer(cluster, mesh, None, memo).op_choices(call, rule)
        assert shared.strategies == tuple(rule.strategies(mesh))
        alone = [Pricer(cluster, mesh).op_s(call, rule, strategy) for strategy in shared.strategies]
        assert shared.seconds.tolist() == alone


def test_rules_of_one_form_are_priced_by_their_own_sizes_in_whatever_order_they_have_factors() -> None:
    call, rule = ruled(aten.mm.default, [(32, 64), (64, 16)], (32, 16), torch.float32)
    turned = Rule(rule.operands, rule.results, dict(reversed(rule.factors.items())), rule.linear, rule.carried)
    wide, of_wide = ruled(aten.mm.default, [(128, 64), (64, 16)], (128, 16), torch.float32)
    assert turned.form is rule.form is of_wide.form
    first, other, wider = (
        Pricer(PRICER.cluster, PRICER.mesh).op_choices(*op) for op in ((call, rule), (call, turned), (wide, of_wide))
    )
    assert first.table is other.table is wider.table
    assert first.seconds.tolist() == other.seconds.tolist()
    assert (wider.seconds > first.seconds).all()


@pytest.mark.parametrize(
    ("parts", "rows_read"), [({}, 64 * 20), ({"b": 4}, 16 * 20), ({"n": 4}, 64 * 5), ({"v": 4}, 64 * 20)]
)
def test_bags_read_the_rows_that_they_name_and_write_their_sums(parts: dict[str, int], rows_read: int) -> None:
    index, table, sums = TensorType((64, 20), torch.int64), TensorType((1 << 16, 8), torch.float32), (64, 8)
    call = OpCall(
        "autopar.embedding_bag",
        {"w": Operand(0), "index": Operand(1), "offsets": None, "weights": None, "padding": -1, "last": False},
        (table, index),
        (TensorType(sums, torch.float32),),
    )
    (factor,) = parts or ("",)
    moved = 4 * 8 * rows_read + (8 * 64 * 20 + 0.0) / (4 if factor in ("b", "n") else 1)
    moved += 4 * 64 * 8 / (4 if factor == "b" else 1)
    assert PRICER.op_s(call, RuleBook().rule(call), (factor,)) == pytest.approx(LAUNCH + moved / MEMORY)
