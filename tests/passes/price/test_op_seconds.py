"""Seconds of single ops on their blocks, by closed form: 2 m n k of a product, bytes read and written of everything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx

from autopar.cluster import ClusterSpec
from autopar.cluster.device import DeviceSpec, EfficiencyCurve
from autopar.cluster.kernels import FILL, KernelTimes
from autopar.cluster.link import LinkLevel
from autopar.ir.mesh import Mesh
from autopar.ir.program import Template
from autopar.ir.types import TensorType
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.book import RuleBook

PEAK, MEMORY, LAUNCH = 1e12, 1e11, 2e-6
CURVE = EfficiencyCurve(matmul=0.5, memory=0.5, half_dim=16.0)
DEVICE = DeviceSpec("test", {"float32": PEAK}, 1e12, 2 * MEMORY, LAUNCH, curve=CURVE)
PRICER = Pricer(ClusterSpec("test", ((4, DEVICE),), (LinkLevel("node", 4, 1e9, 1e-5),)), Mesh.of(dp=4))
aten = torch.ops.aten


def seconds(op: Callable[..., object], shapes: list[tuple[int, ...]], out: tuple[int, ...], sharded: bool) -> float:
    """Seconds of an op on float32 tensors, whole or with its first factor over the four ranks."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
    node = graph.call_function(op, tuple(inputs))
    graph.output((node,))
    for value, shape in zip((*inputs, node), (*shapes, out), strict=True):
        value.meta["type"] = TensorType(shape, torch.float32)
    names = tuple(value.name for value in inputs)
    template = Template("t", graph, (), names, (node.name,), (None,) * len(names), (None,), ())
    call = template.op_calls[node.name]
    rule = RuleBook().rule(call)
    return PRICER.op_s(call, rule, (next(iter(rule.factors)) if sharded else "",))


@pytest.mark.parametrize("ways", [1, 4])
def test_a_product_takes_its_flops_at_the_share_of_its_shape(ways: int) -> None:
    m, k, n = 1024, 512, 2048
    share = 0.5 / ((1 + 16 / (m / ways)) * (1 + 16 / n) * (1 + 16 / k))
    expected = LAUNCH + 2 * m * n * k / ways / (PEAK * share)
    assert seconds(aten.mm.default, [(m, k), (k, n)], (m, n), ways > 1) == pytest.approx(expected)


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
