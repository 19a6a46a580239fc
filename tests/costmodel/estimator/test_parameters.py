"""The messages of parameters: emitted programs send tensor by tensor along one axis after the other, frameworks all at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.costmodel.collective import strided_time_s
from autopar.costmodel.estimator.parameters import parameter_traffic
from autopar.costmodel.estimator.workload import Workload
from autopar.costmodel.software import Software
from benchmarks.agree_cases import GPT, case

LAYERS = ((GPT.layers,),)
TABLE, SQUARE, MLP = GPT.vocab * GPT.hidden, GPT.hidden**2, GPT.hidden * GPT.ffn


def gpt(zero: int) -> Workload:
    return case(GPT, 16, 2, dp=4, cp=2, tp=2, zero=zero)


def test_every_gather_of_zero_3_is_a_message_along_every_axis() -> None:
    """Per layer six matrices (of their mean length) and ten vectors, of which backward reads the two norms' weights."""
    w = gpt(3)

    def alone_s(elements: float) -> float:
        over_dp = strided_time_s(w.cluster, "all_gather", 2 * elements, 4, 4)
        return over_dp + strided_time_s(w.cluster, "all_gather", 2 * elements / 4, 2, 2)

    matrix_s, vector_s = alone_s((4 * SQUARE + 2 * MLP + 2 * GPT.hidden) / 6 / w.parts.mlp), alone_s(GPT.hidden)
    traffic = parameter_traffic(w, LAYERS)
    assert traffic.each_backward_s == pytest.approx(GPT.layers * (6 * matrix_s + 2 * vector_s), rel=0.02)
    forward_s = GPT.layers * (6 * matrix_s + 10 * vector_s) + 2 * alone_s(TABLE / w.parts.vocabulary)
    assert traffic.each_forward_s == pytest.approx(forward_s, rel=0.02)
    assert traffic.each_reduce_s > 0


def test_small_gradients_share_a_message() -> None:
    """A bucket takes what one message does, however many tensors are in it; in buckets that no tensor fits all are alone."""
    w = gpt(1)
    alone = replace(w, software=replace(w.software, bucket_bytes=1.0))
    vectors_s = GPT.layers * 10 * strided_time_s(w.cluster, "reduce_scatter", 4 * GPT.hidden, 4, 4)
    assert parameter_traffic(alone, LAYERS).reduce_s - parameter_traffic(w, LAYERS).reduce_s > vectors_s


def test_what_a_framework_sends_is_one_message() -> None:
    w = replace(gpt(3), software=Software("bf16"))
    traffic = parameter_traffic(w, LAYERS)
    assert traffic.each_reduce_s == 0
    params = GPT.layers * (GPT.layer_params(False)) / 2 + 2 * TABLE / 2
    alone_s = strided_time_s(w.cluster, "all_gather", 2 * params, 2, 8)
    assert traffic.each_forward_s == pytest.approx(alone_s, rel=1e-9)
