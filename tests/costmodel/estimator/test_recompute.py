"""A layer that is made again in backward: by Megatron's checkpoints, torch's, those by op, and in some layers alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import ClusterSpec
from autopar.costmodel import ParallelConfig, Software, StepPlan, TransformerShape, estimate, estimate_row
from autopar.costmodel.bill import Purpose
from autopar.costmodel.estimator.layer import TP, TP_BEHIND, WAITED, communication, layer_bill, unsaved_share
from autopar.costmodel.estimator.rows import row_workload
from autopar.costmodel.estimator.workload import Workload
from autopar.errors import ConstraintError
from tests.costmodel.estimator.test_estimate import ROW

SHAPE = TransformerShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, seq_len=8192, gated_mlp=True
)
MEGATRON, TORCH = Software("bf16"), Software("bf16", recompute_stops=True, regathers=False)


def workload(software: Software, recompute: str, tp: int = 1, **plan: float) -> Workload:
    parallel = ParallelConfig(dp=8 // tp, tp=tp, sequence_parallel=tp > 1, zero=1)
    return Workload.of(SHAPE, ClusterSpec.preset("dgx-h100"), StepPlan(parallel, 1, recompute, **plan), 32, software)


def again_s(software: Software) -> float:
    """Seconds of a layer's kernels that full recomputation adds to its backward."""
    full, none = (layer_bill(workload(software, recompute), False).B for recompute in ("full", "none"))
    return full.busy_s(software) - none.busy_s(software)


def test_checkpoints_that_stop_make_the_last_product_no_second_time() -> None:
    forward_s = layer_bill(workload(MEGATRON, "none"), False).F.busy_s(MEGATRON)
    assert again_s(MEGATRON) == pytest.approx(forward_s)
    down = SHAPE.ffn / (2 * SHAPE.hidden + 2 * SHAPE.kv_width + 3 * SHAPE.ffn)  # of the products' FLOPs
    products_s = layer_bill(workload(MEGATRON, "none"), False).W.computed_s
    assert forward_s - again_s(TORCH) == pytest.approx(down * products_s, rel=0.05)


def test_checkpoints_by_op_make_every_second_product_again_and_all_in_8_bits() -> None:
    keys, output, up, down = SHAPE.kv_width, SHAPE.hidden, SHAPE.ffn, SHAPE.ffn
    whole = SHAPE.hidden + 2 * keys + output + 2 * up + down
    assert unsaved_share(workload(TORCH, "selective"), False) == pytest.approx((keys + output + up) / whole)
    low = replace(TORCH, precision="float8")
    assert unsaved_share(workload(low, "selective"), False) == pytest.approx(1 - down / whole)


def test_part_of_the_layers_is_between_none_and_all_in_seconds_and_bytes() -> None:
    none, some, full = (
        estimate(SHAPE, w.cluster, w.plan, batch=32)
        for w in (workload(MEGATRON, "none"), workload(MEGATRON, "full", recomputed=0.25), workload(MEGATRON, "full"))
    )
    quarter = none.step_time_s + 0.25 * (full.step_time_s - none.step_time_s)
    assert some.step_time_s == pytest.approx(quarter, rel=1e-3)
    held = [e.memory_bytes["activations"] for e in (full, some, none)]
    assert held[1] == pytest.approx(held[0] + 0.75 * (held[2] - held[0]), rel=0.01)
    with pytest.raises(ConstraintError, match="share of the layers"):
        workload(MEGATRON, "full", recomputed=0.0).plan.check()


def test_rows_say_how_many_layers_are_made_again() -> None:
    of_stage = {**ROW, "recompute": "full", "recompute_detail": {"recompute_num_layers": 8}}
    second = {**ROW, "recompute": "selective", "notes": "selective layer AC (every 2nd layer)"}
    assert row_workload(of_stage).plan.recomputed == 8 / 32
    assert (row_workload(second).plan.recompute, row_workload(second).plan.recomputed) == ("full", 0.5)
    assert row_workload(ROW).plan.recomputed == 1.0


def test_what_backward_sends_again_hides_behind_products_though_nothing_else_does() -> None:
    apart = replace(MEGATRON, overlap_tp=False)
    forward, backward = communication(workload(apart, "none", tp=8), False)
    assert backward[TP] + backward[TP_BEHIND] == pytest.approx(1.5 * forward[TP])
    assert [apart.exposed_share(purpose.overlap) for purpose in (TP, TP_BEHIND)] == [1.0, apart.constants.tp_exposed]
    kept = communication(workload(TORCH, "none", tp=8), False)
    assert kept[0] == kept[1]


def test_megatrons_sums_of_backward_hide_behind_products_and_those_of_forward_and_of_its_fork_do_not() -> None:
    def messages(software: Software) -> tuple[set[Purpose], set[Purpose]]:
        whole = workload(software, "none", tp=2)
        parallel = replace(whole.parallel, sequence_parallel=False)
        forward, backward = communication(whole.at(replace(whole.plan, parallel=parallel)), False)
        assert sum(forward.values()) == pytest.approx(sum(backward.values()))
        return set(forward), set(backward)

    assert messages(MEGATRON) == ({WAITED}, {TP_BEHIND})
    assert messages(TORCH) == ({WAITED}, {WAITED})
    gpt = {**ROW, "model": {**ROW["model"], "family": "gpt"}, "schedule": "1F1B"}
    assert row_workload(gpt).software.regathers
    assert not row_workload({**gpt, "schedule": "1F1B (DeepSpeed)"}).software.regathers


def test_parameters_in_8_bits_are_gathered_in_8_bits() -> None:
    row = {**ROW, "model": {**ROW["model"], "dtype": "fp8"}}
    in_16 = {**row, "parallel": {**row["parallel"], "fsdp_mixed_precision": "DEFAULT"}}
    assert (row_workload(row).software.copy_bytes, row_workload(in_16).software.copy_bytes) == (1.0, 2.0)
    halved, whole = (replace(row_workload(r).software, reduce_bytes=2.0) for r in (row, in_16))
    w = row_workload({**row, "parallel": {**row["parallel"], "zero": 3}})
    alone_s = [
        estimate(w.model, w.cluster, w.plan, batch=w.batch, software=s).comm["dp"]["total_s"] for s in (halved, whole)
    ]
    assert alone_s[0] < 0.8 * alone_s[1]
    assert estimate_row(row).step_time_s < estimate_row(in_16).step_time_s
