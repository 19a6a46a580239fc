"""The reader of bills, against steps worked out by hand, and the estimator's bill against numbers of before it was one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.cluster import ClusterSpec
from autopar.cluster.device import device_preset
from autopar.costmodel import ParallelConfig, Software, StepPlan, TransformerShape, estimate
from autopar.costmodel.bill import (
    Bill,
    CallBill,
    ParameterTraffic,
    Purpose,
    Shown,
    StageBill,
    Work,
    exposed_parameters_s,
    step_seconds,
)
from autopar.costmodel.estimator.rows import row_software
from autopar.costmodel.simulate import Durations, makespan_s
from autopar.costmodel.software import LAUNCH_HOST, NEUTRAL, ONCE_LAUNCHES, StepConstants, default_constants, emitted_on
from autopar.ir.actions import StageGraph
from autopar.ir.schedules import SCHEDULES

CONSTANTS = StepConstants(
    fused_passes=2.0,
    eager_share=0.5,
    tp_exposed=0.25,
    dp_exposed=0.5,
    zero3_exposed=0.125,
    jitter=0.0,
    step_overhead_s=0.0,
)
FUSED = Software(constants=CONSTANTS)
TP, RING = Purpose("tp"), Purpose("tp", "tp_exposed")


def in_a_row(microbatches: int) -> Bill:
    """One stage, whose microbatches come one after another."""

    def pipeline(seconds: Durations) -> float:
        return microbatches * sum(seconds.values())

    return Bill((), ((0,),), microbatches, pipeline)


def step_s(stage: StageBill, software: Software, microbatches: int = 1) -> float:
    return step_seconds(replace(in_a_row(microbatches), stages=(stage,)), software).step_s


def two_stages(*stages: StageBill, send_s: float) -> Bill:
    graph = StageGraph.chain(2, 1)
    table = SCHEDULES["1f1b"].table(graph, 2)
    return Bill(stages, graph.groups, 2, lambda seconds: makespan_s(table, graph, seconds, send_s))


def test_two_stages_and_two_microbatches_by_hand() -> None:
    """Forward 1 s, backward 2 s (1 for inputs, 1 for weights) per stage, sends of 0.5 s. One forward one backward:

    stage 0   F0 [0, 1]      F1 [1, 2]                       B0 [5, 7]        B1 [8, 10]
    stage 1   F0 [1.5, 2.5]  B0 [2.5, 4.5]  F1 [4.5, 5.5]  B1 [5.5, 7.5]

    B0 starts on stage 0 when the gradient is there, at 4.5 + 0.5 = 5, and B1 at 7.5 + 0.5 = 8: the step ends at 10. Then
    stage 0 has 4 s of gradients to reduce, of which its last backward (2 s) hides 2 s, and 3 s of optimizer; stage 1 has
    1 s of gradients, half of it exposed, and no optimizer.
    """
    block = CallBill(Work(1.0), Work(1.0), Work(1.0))
    first = StageBill(((block, 1),), ParameterTraffic(reduce_s=4.0), optimizer_s=3.0)
    second = StageBill(((block, 1),), ParameterTraffic(reduce_s=1.0))
    read = step_seconds(two_stages(first, second, send_s=0.5), FUSED)
    assert read.span_s == pytest.approx(10.0)
    assert read.parameters_s == pytest.approx(2.0)
    assert read.step_s == pytest.approx(10.0 + 2.0 + 3.0)


@pytest.mark.parametrize(("kernels", "passes_s"), [("fused", 2 * 0.5), ("eager", 0.5 * 0.75), ("apart", 0.75)])
def test_passes_over_memory_are_those_of_the_kernels(kernels: str, passes_s: float) -> None:
    block = CallBill(Work(1.0, fused_s=0.5, apart_s=0.75))
    assert step_s(StageBill(((block, 3),)), replace(FUSED, kernels=kernels)) == pytest.approx(3 * (1.0 + passes_s))


def test_of_a_message_the_share_counts_that_nothing_hides() -> None:
    block = StageBill(((CallBill(Work(1.0, messages={TP: 0.5, RING: 0.8})), 2),))
    assert step_s(block, FUSED) == pytest.approx(2 * (1.0 + 0.5 + 0.25 * 0.8))
    assert step_s(block, replace(FUSED, overlap_tp=False)) == pytest.approx(2 * (1.0 + 0.5 + 0.8))
    assert step_s(block, NEUTRAL) == pytest.approx(2 * (1.0 + 0.5 + 0.8))


def test_a_call_takes_no_less_than_its_launches_and_messages_come_on_top() -> None:
    block = CallBill(Work(0.1, messages={TP: 0.5}), Work(0.1), Work(0.2), host_s=0.8)
    read = step_seconds(replace(in_a_row(1), stages=(StageBill(((block, 1),)),)), FUSED)
    assert read.seconds == pytest.approx({(0, "F"): 0.2 + 0.5, (0, "B"): 0.2, (0, "W"): 0.4})


@pytest.mark.parametrize(
    ("traffic", "non_overlapped_s"),
    [
        (ParameterTraffic(reduce_s=1.0), 0.5),  # a share, though backward (3 s) would hide it
        (ParameterTraffic(reduce_s=10.0), 10.0 - 3.0),
        (ParameterTraffic(gather_s=4.0), 4.0 - 1.0),  # forward takes 1 s
        (ParameterTraffic(each_forward_s=0.8), 2 * 0.125 * 0.8),
        (ParameterTraffic(each_forward_s=3.0, each_backward_s=8.0), 2 * (3.0 - 1.0 + 8.0 - 3.0)),
    ],
)
def test_parameters_messages_hide_behind_a_microbatch(traffic: ParameterTraffic, non_overlapped_s: float) -> None:
    stage = StageBill(((CallBill(Work(1.0), Work(1.0), Work(2.0)), 1),), traffic)
    assert step_s(stage, FUSED, 2) == pytest.approx(2 * 4.0 + non_overlapped_s)
    assert step_s(stage, NEUTRAL, 2) == pytest.approx(2 * 4.0 + traffic.total_s(2))
    assert step_s(stage, replace(FUSED, late_reduction=True), 2) == pytest.approx(2 * 4.0 + traffic.total_s(2))


def test_what_a_writer_knows_to_be_exposed_of_parameters_messages_counts_as_it_is() -> None:
    one = ParameterTraffic(2.0, 3.0, 5.0, shown=Shown(1.0, 0.5, 4.0))
    both = one + ParameterTraffic(gather_s=7.0, shown=Shown(0.0, 0.25, 0.0))
    assert exposed_parameters_s(both, (100.0, 100.0), 4, 0.0, NEUTRAL) == 4 * (1.0 + 0.75) + 4.0 + 7.0
    assert both.total_s(4) == 4 * 5.0 + 5.0 + 7.0


def test_values_gathered_late_hide_behind_nothing_and_gradients_still_do() -> None:
    stage = StageBill(((CallBill(Work(1.0), Work(1.0)), 1),), ParameterTraffic(reduce_s=0.6, gather_s=0.4))
    assert step_s(stage, replace(FUSED, late_gather=True)) == pytest.approx(2.0 + 0.5 * 0.6 + 0.4)


def test_jitter_and_overhead_are_those_of_the_constants() -> None:
    software = replace(FUSED, constants=replace(CONSTANTS, jitter=0.01, step_overhead_s=0.5))
    bill = replace(in_a_row(1), stages=(StageBill(((CallBill(Work(1.0)), 1),), rest_s=0.25),), nodes=8)
    read = step_seconds(bill, software)
    assert read.step_s == pytest.approx((1.0 + 0.25 + 0.5) * 1.03)
    assert read.overhead_s == pytest.approx(read.step_s - 1.25)


@pytest.mark.parametrize(("optimizer_s", "rest_s", "once_s"), [(0.1, 0.05, 0.4), (0.3, 0.2, 0.5), (0.5, 0.0, 0.5)])
def test_what_comes_once_a_step_takes_the_host_at_least_its_seconds(
    optimizer_s: float, rest_s: float, once_s: float
) -> None:
    software = replace(NEUTRAL, constants=replace(NEUTRAL.constants, once_host_s=0.4))
    stage = StageBill(((CallBill(Work(1.0)), 1),), optimizer_s=optimizer_s, rest_s=rest_s)
    read = step_seconds(replace(in_a_row(1), stages=(stage,)), software)
    assert read.step_s == pytest.approx(1.0 + once_s)
    assert read.optimizer_s + read.rest_s == pytest.approx(once_s)
    assert read.overhead_s == pytest.approx(0.0)


def test_the_hosts_constants_are_those_of_recorded_steps() -> None:
    """A fit by relative errors of seconds, in launches of the moment, to kernels' lines and a constant."""
    rows = json.loads((Path(__file__).parents[1] / "gpu/recorded/host/nvidia-h100-80gb-hbm3.json").read_text())["steps"]
    taken = np.array([row["step_s"] / row["launch_s"] for row in rows])
    listed = np.array([[row["launches"], 1.0] for row in rows])
    fitted = np.linalg.lstsq(listed / taken[:, None], np.ones(len(rows)), rcond=None)[0]
    assert fitted == pytest.approx([LAUNCH_HOST, LAUNCH_HOST * ONCE_LAUNCHES], rel=0.01)
    said = listed @ fitted / taken
    assert np.median(np.abs(said - 1)) < 0.15


def test_programs_on_fitted_gpus_are_read_with_the_fitted_constants_and_others_without() -> None:
    h100 = emitted_on(ClusterSpec.preset("dgx-h100"))
    assert h100.constants.dp_exposed < 1
    assert h100.constants.ep_exposed == 1
    assert h100.late_gather
    assert not h100.overlap_tp
    measured = replace(device_preset("h100"), curve=replace(device_preset("h100").curve, matmul=0.7))
    alone = emitted_on(ClusterSpec.homogeneous(devices=8, device=measured))
    launch_s = LAUNCH_HOST * measured.launch_overhead_s
    assert alone.launch_host_s == pytest.approx(launch_s)
    assert alone.constants.once_host_s == pytest.approx(ONCE_LAUNCHES * launch_s)
    assert alone.mixture_host_s(16) == 0
    assert replace(alone, constants=NEUTRAL.constants) == NEUTRAL
    assert emitted_on(ClusterSpec.local(4)) == NEUTRAL


def test_where_tokens_are_dropped_the_host_waits_for_no_counts() -> None:
    """Kernels of every expert are launched all the same."""
    sample = json.loads((Path(__file__).parent / "estimator/published_sample.json").read_text())
    notes = ("MoE tokens force-balanced, dropless", "token-drop MoE (capacity factor; balanced)")
    dropless, dropping = (row_software({**sample[0], "notes": one}, default_constants()) for one in notes)
    assert not dropless.drops_tokens
    assert dropping.mixture_host_s(16) == 16 * dropping.constants.expert_host_s
    assert dropless.mixture_host_s(0) - dropping.mixture_host_s(0) == pytest.approx(
        dropless.constants.moe_host_s - dropless.constants.dense_host_s
    )


LLAMA8B = TransformerShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, seq_len=8192, gated_mlp=True
)
GPT = replace(
    LLAMA8B,
    layers=48,
    hidden=6144,
    heads=64,
    kv_heads=64,
    ffn=24576,
    vocab=51200,
    seq_len=2048,
    gated_mlp=False,
    attention="materialised",
)
EXPERTS = replace(LLAMA8B, experts=8, topk=2, seq_len=4096, mtp_layers=1)
FULL_SHARDS = ParallelConfig(dp=16, tp=2, sequence_parallel=True, zero=3)
STEPS: Mapping[str, tuple[TransformerShape, StepPlan, int, Software, float]] = {
    "data parallel": (LLAMA8B, StepPlan(ParallelConfig(dp=32, zero=1), 1), 128, Software(), 3.1571748016247536),
    "ZeRO-3": (LLAMA8B, StepPlan(FULL_SHARDS, 1, "selective"), 128, Software("fp8", "eager"), 3.7362230990321206),
    "late": (LLAMA8B, StepPlan(ParallelConfig(dp=32), 1, "mlp"), 64, Software(late_reduction=True), 2.055517865522237),
    "pipeline": (
        GPT,
        StepPlan(ParallelConfig(dp=2, tp=4, pp=4, vpp=2, zero=1), 1, "full"),
        64,
        Software(),
        2.456069018815664,
    ),
    "zero bubble": (
        GPT,
        StepPlan(ParallelConfig(dp=4, pp=8), 2, "selective", "zb-h1"),
        128,
        Software(),
        3.9384384406030244,
    ),
    "experts": (
        EXPERTS,
        StepPlan(ParallelConfig(dp=16, pp=2, ep=8, zero=1), 1, "full"),
        256,
        Software(),
        9.381844797307789,
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_the_estimators_bill_comes_to_what_its_formulas_gave(case: str) -> None:
    """Numbers of the formulas, recorded with the fitted constants as they are; they were the same before there was a bill."""
    model, plan, batch, software, expected = STEPS[case]
    got = estimate(model, ClusterSpec.preset("dgx-h100", nodes=4), plan, batch=batch, software=software)
    assert got.step_time_s == pytest.approx(expected, rel=1e-9)
    parts = sum(got.breakdown.values())
    assert parts == pytest.approx(got.step_time_s, rel=1e-9)
