"""FLOPs and bytes of op families as they are captured, forward and backward, by the closed forms of the texts.

Functions are traced and differentiated as in a model; what their ops compute must be that of the formula, and what they move
that of the tensors which a kernel cannot do without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.cluster import ClusterSpec
from autopar.cluster.device import DeviceSpec, EfficiencyCurve
from autopar.cluster.link import LinkLevel
from autopar.costmodel.compute import update_time_s
from autopar.ir.mesh import Mesh
from autopar.ops.registry import find
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.book import RuleBook
from tests.ops.traced import traced

MEMORY, LAUNCH = 1e11, 2e-6
DEVICE = DeviceSpec("test", {"float32": 1e12}, 1e12, 2 * MEMORY, LAUNCH, curve=EfficiencyCurve(memory=0.5))
PRICER = Pricer(ClusterSpec("test", ((1, DEVICE),), (LinkLevel("node", 1, 1e9, 1e-5),)), Mesh.of(dp=1))
RULES = RuleBook()


def flops(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> tuple[float, float]:
    """FLOPs of a function's products, forward and backward."""
    template = traced(function, tensors)
    total = {True: 0.0, False: 0.0}
    for name, call in template.op_calls.items():
        definition = find(call.op)
        if definition is not None and definition.work is not None:
            forward = template.nodes[name].meta["phase"] == "F"
            total[forward] += definition.work(call, RULES.rule(call))[0]
    return total[True], total[False]


def forward_bytes(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> float:
    """Bytes that the ops of forward move, by their seconds."""
    template = traced(function, tensors)
    nbytes = 0.0
    for name, call in template.op_calls.items():
        definition = find(call.op)
        free = definition is not None and definition.free
        if template.nodes[name].meta["phase"] == "F" and not free:
            rule = RULES.rule(call)
            nbytes += (PRICER.op_s(call, rule, ("",)) - LAUNCH) * MEMORY
    return nbytes


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, requires_grad=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_attention_is_two_products_of_scores_and_backward_five(causal: bool, kv_heads: int) -> None:
    b, h, s, d = 2, 8, 64, 16
    forward, backward = flops(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
        [zeros(b, h, s, d), zeros(b, kv_heads, s, d), zeros(b, kv_heads, s, d)],
    )
    assert forward == 4 * b * h * s**2 * d / (2 if causal else 1)
    assert backward == 2.5 * forward


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_in_a_gpus_attention_adds_its_hashes_and_two_products_of_backward(causal: bool) -> None:
    """On a CPU, which does it by the plain formula, the price is as it is without."""
    b, h, s, d = 2, 8, 64, 16

    def seconds(kind: Literal["cpu", "gpu"], p: float) -> list[float]:
        device = replace(DEVICE, kind=kind, launch_overhead_s=0.0, curve=EfficiencyCurve(attention=1.0))
        pricer = Pricer(ClusterSpec("test", ((1, device),), (LinkLevel("node", 1, 1e9, 1e-5),)), Mesh.of(dp=1))
        template = traced(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, p, causal), [zeros(b, h, s, d) for _ in "qkv"]
        )
        calls = [call for call in template.op_calls.values() if call.op.startswith("autopar.attention")]
        return [pricer.op_s(call, RULES.rule(call), ("",)) for call in calls]

    (forward, backward), (forward_drop, backward_drop) = seconds("gpu", 0.0), seconds("gpu", 0.1)
    drawn_s = 2 * 23 * b * h * s**2 * (0.5 if causal else 1.0) / 1e12
    assert forward_drop == pytest.approx(forward + drawn_s)
    assert backward_drop == pytest.approx(backward * 7 / 5 + 2 * drawn_s)
    assert seconds("cpu", 0.1) == seconds("cpu", 0.0)


@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 1), (1, 2)])
def test_a_convolution_multiplies_every_output_with_its_window_and_backward_twice_so(stride: int, groups: int) -> None:
    n, c, k, size, window = 2, 4, 8, 16, 3
    out = (size - window) // stride + 1
    forward, backward = flops(
        lambda x, w: F.conv2d(x, w, stride=stride, groups=groups),
        [zeros(n, c, size, size), zeros(k, c // groups, window, window)],
    )
    assert forward == 2 * n * k * (c // groups) * window**2 * out**2
    assert backward == 2 * forward


def test_a_linear_layer_is_one_product_and_backward_two() -> None:
    rows, wide, deep = 32, 64, 16
    forward, backward = flops(lambda x, w: F.linear(x, w), [zeros(rows, deep), zeros(wide, deep)])
    assert (forward, backward) == (2 * rows * wide * deep, 4 * rows * wide * deep)


def test_softmax_reads_and_writes_its_values_once() -> None:
    assert forward_bytes(lambda x: x.softmax(-1), [zeros(64, 128)]) == pytest.approx(2 * 4 * 64 * 128)


def test_an_rms_norm_reads_its_values_and_writes_them_with_one_statistic_a_row() -> None:
    nbytes = forward_bytes(lambda x, w: F.rms_norm(x, (128,), w, 1e-6), [zeros(64, 128), zeros(128)])
    assert nbytes == pytest.approx(4 * (2 * 64 * 128 + 128 + 64))


def test_a_look_up_reads_and_writes_the_rows_that_are_looked_up() -> None:
    ids = torch.zeros(64, dtype=torch.long)
    nbytes = forward_bytes(lambda w, i: F.embedding(i, w), [zeros(5000, 128), ids])
    assert nbytes == pytest.approx(8 * 64 + 2 * 4 * 64 * 128)


@pytest.mark.parametrize(("state", "moved"), [(0, 3), (1, 5), (2, 7)])
def test_an_update_reads_weight_gradient_and_state_and_writes_weight_and_state(state: int, moved: int) -> None:
    """Adam: reads w, g, m, v and writes w, m, v."""
    assert update_time_s(DEVICE, float(state), 4.0 * 1000) == pytest.approx(moved * 4 * 1000 / MEMORY)
    assert math.isclose(moved, 3 + 2 * state)
