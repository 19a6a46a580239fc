"""Whole steps: bounds, monotony, errors, rows, search."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster import ClusterSpec
from autopar.costmodel import (
    ParallelConfig,
    Software,
    StepPlan,
    TransformerShape,
    estimate,
    estimate_inference,
    estimate_row,
)
from autopar.costmodel.estimator.pipeline_time import chunk_layers
from autopar.costmodel.estimator.search import search
from autopar.errors import ClusterError, ConstraintError, InfeasibleError, InputError

LLAMA8B = TransformerShape(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    vocab=128256,
    seq_len=8192,
    gated_mlp=True,
    name="llama3-8b",
)
LLAMA405B = replace(LLAMA8B, layers=126, hidden=16384, heads=128, ffn=53248, name="llama3-405b")
MOE = replace(LLAMA8B, experts=8, topk=2, seq_len=4096)

ROW = {
    "id": "dgxc llama3.1 8b",
    "model": {
        "name": "llama3_8b",
        "family": "llama",
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "ffn": 14336,
        "vocab": 128256,
        "seq_len": 8192,
        "experts": None,
        "topk": None,
        "dtype": "bf16",
        "gated_mlp": True,
    },
    "hardware": {"gpu": "H100-SXM5-80GB", "gpus": 8, "gpus_per_node": 8, "intra_bw_GBps": 450, "inter_bw_GBps": 50},
    "parallel": {"dp": 4, "tp": 1, "pp": 1, "cp": 2, "ep": 1, "vpp": None, "sequence_parallel": False, "zero": 1},
    "batch": {"global": 128, "micro": 1},
    "recompute": "none",
    "schedule": "none",
}


def one(model=LLAMA8B, nodes=1, batch=128, micro_batch=1, machine="dgx-h100", precision="bfloat16", **how):
    parallel = how.pop("parallel", ParallelConfig(dp=8 * nodes, zero=1))
    cluster, plan = ClusterSpec.preset(machine, nodes=nodes), StepPlan(parallel, micro_batch, **how)
    return estimate(model, cluster, plan, batch=batch, software=Software(precision))


def test_a_published_row_is_predicted_within_ten_percent():
    assert estimate_row(ROW).step_time_s == pytest.approx(12.27, rel=0.1)


def test_rows_with_little_known_are_filled_by_defaults():
    row = {**ROW, "parallel": {**ROW["parallel"], "zero": None, "vpp": None}, "batch": {"global": 128, "micro": None}}
    row = {
        **row,
        "hardware": {**ROW["hardware"], "inter_bw_GBps": None},
        "recompute": "unknown",
        "measured": {"step": 1},
    }
    e = estimate_row(row)
    assert e.step_time_s > 0
    with pytest.raises(InputError, match=r"dgxc llama3.1 8b: batch is missing"):
        estimate_row({k: v for k, v in ROW.items() if k != "batch"})


def test_never_faster_than_the_peak_and_parts_add_up():
    for how in ({}, {"parallel": ParallelConfig(dp=2, tp=4, sequence_parallel=True)}, {"recompute": "full"}):
        e = one(**how)
        peak = ClusterSpec.preset("dgx-h100").device(0).peak("bf16")
        assert e.step_time_s > LLAMA8B.flops_per_token() * 128 * 8192 / 8 / peak
        assert 0 < e.mfu < 1
        assert sum(e.breakdown.values()) == pytest.approx(e.step_time_s, rel=0.02)
        assert e.tokens_per_s_per_device == pytest.approx(128 * 8192 / 8 / e.step_time_s)


@settings(max_examples=30, deadline=None)
@given(faster=st.floats(1, 8), tp=st.sampled_from([1, 2, 4, 8]), pp=st.sampled_from([1, 2]))
def test_faster_links_never_make_a_step_slower(faster, tp, pp):
    def step(rate: float) -> float:
        cluster = ClusterSpec.homogeneous(
            devices=16, device="h100", intra_bandwidth_Bps=450e9 * rate, inter_bandwidth_Bps=50e9 * rate
        )
        parallel = ParallelConfig(dp=16 // tp // pp, tp=tp, pp=pp, zero=1, sequence_parallel=True)
        return estimate(LLAMA8B, cluster, StepPlan(parallel, 1), batch=64).step_time_s

    assert step(faster) <= step(1.0) * (1 + 1e-9)


@given(p=st.sampled_from([2, 4, 8]), m=st.integers(2, 40))
@settings(max_examples=30, deadline=None)
def test_more_microbatches_never_more_bubble(p, m):
    def bubble(m: int) -> float:
        return one(batch=8 // p * m, parallel=ParallelConfig(dp=8 // p, pp=p)).bubble_fraction

    assert bubble(m + 1) <= bubble(m) + 1e-9


def test_full_recompute_costs_time_and_saves_memory():
    plain, full = one(), one(recompute="full")
    assert 1.2 < full.step_time_s / plain.step_time_s < 1.45
    assert full.memory_bytes["activations"] < plain.memory_bytes["activations"] / 5


def test_experts_across_nodes_cost_communication():
    near = one(MOE, nodes=2, parallel=ParallelConfig(dp=16, ep=8, zero=1))
    far = one(replace(MOE, experts=16), nodes=2, parallel=ParallelConfig(dp=16, ep=16, zero=1))
    assert far.comm["ep"]["total_s"] > 2 * near.comm["ep"]["total_s"]


def test_every_schedule_gives_an_estimate_and_zero_bubble_beats_1f1b():
    steps = {
        name: one(parallel=ParallelConfig(dp=1, pp=8), batch=16, schedule=name).step_time_s
        for name in ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v")
    }
    assert steps["zb-2p"] < steps["zb-h1"] < steps["1f1b"]
    inter = one(parallel=ParallelConfig(dp=1, pp=8, vpp=4), batch=16).step_time_s
    assert inter < steps["1f1b"]


def test_layers_are_spread_evenly_with_room_for_embedding_and_head():
    assert sum(map(sum, chunk_layers(126, 8, 8))) == 126
    assert chunk_layers(126, 8, 8)[0][0] == 1
    assert chunk_layers(30, 8, 1) == ((3,), (4,), (4,), (4,), (4,), (4,), (4,), (3,))
    assert chunk_layers(62, 1, 1) == ((62,),)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"parallel": ParallelConfig(dp=3, tp=2)}, r"= 6 ranks, but the cluster has 8; .*dp would be 4"),
        (
            {"parallel": ParallelConfig(dp=1, tp=8), "model": replace(LLAMA8B, heads=30, head_dim=128)},
            "30 heads cannot be split over tp=8; the next smaller that fits: 6",
        ),
        ({"batch": 100}, "batch=100 is no multiple of dp\\*micro_batch=8; nearest: 96"),
        ({"parallel": ParallelConfig(dp=8, ep=8)}, "no experts; use ep=1"),
        ({"parallel": ParallelConfig(dp=1, pp=8, vpp=8)}, "cannot fill pp=8 x vpp=8"),
        ({"schedule": "zigzag"}, "unknown schedule 'zigzag'"),
        ({"recompute": "some"}, "recompute is none"),
        ({"parallel": ParallelConfig(dp=0, tp=8)}, "dp must be a positive integer"),
        ({"model": MOE, "parallel": ParallelConfig(dp=8, ep=3)}, "8 experts cannot be split over ep=3"),
    ],
)
def test_errors_teach(how, message):
    with pytest.raises(ConstraintError, match=message):
        one(**how)


def test_a_device_without_the_dtype_is_named():
    with pytest.raises(ClusterError, match=r"v100 has no bfloat16 arithmetic; it has .*float16"):
        one(machine="dgx-v100")
    with pytest.raises(ClusterError, match="a100 has no float8"):
        one(machine="dgx-a100", precision="fp8")


@pytest.mark.slow
def test_search_finds_a_plan_for_405b_and_orders_it():
    cluster = ClusterSpec.preset("dgx-h100", nodes=256)
    result = search(LLAMA405B, cluster, batch=512)
    steps = [c.estimate.step_time_s for c in result.best]
    assert len(steps) == 10
    assert steps == sorted(steps)
    assert all(c.estimate.fits and c.reason for c in result.best)


def test_search_is_never_worse_than_any_plan_it_would_enumerate():
    cluster = ClusterSpec.preset("dgx-h100", nodes=2)
    best = search(LLAMA8B, cluster, batch=128).best[0].estimate.step_time_s
    for tp, pp in ((1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2)):
        parallel = ParallelConfig(16 // tp // pp, tp, pp, sequence_parallel=tp > 1, zero=1)
        e = estimate(LLAMA8B, cluster, StepPlan(parallel, 1), batch=128)
        assert not e.fits or best <= e.step_time_s * (1 + 1e-9)


def test_exercise_25_1_is_infeasible_and_says_what_is_short():
    dense = TransformerShape(layers=120, hidden=20480, heads=160, ffn=81920, vocab=100000, seq_len=2048)
    assert dense.params == pytest.approx(0.6e12, rel=0.05)
    with pytest.raises(InfeasibleError, match=r"TB short. Use \d+ such devices or more"):
        search(dense, ClusterSpec.preset("dgx-a100", nodes=8), batch=64)
    huge = replace(dense, layers=120 * 330)
    with pytest.raises(InfeasibleError, match=r"2048 x a100 have 174\.\d+ TB"):
        search(huge, ClusterSpec.preset("dgx-a100", nodes=256), batch=2048)


def test_hugging_face_configs_are_read():
    llama = TransformerShape.from_hf_config(
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_hidden_layers": 32,
            "intermediate_size": 14336,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
        }
    )
    assert llama.params == pytest.approx(8.03e9, rel=0.01)
    gpt2 = TransformerShape.from_hf_config(
        {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257, "n_positions": 1024}
    )
    assert (gpt2.ffn, gpt2.gated_mlp, gpt2.seq_len) == (3072, False, 1024)
    with pytest.raises(InputError, match="none of hidden_size"):
        TransformerShape.from_hf_config({})


def test_offload_frees_memory_for_time():
    plain = one()
    acts, opt = one(offload="activations"), one(offload="optimizer")
    assert acts.memory_bytes["activations"] < plain.memory_bytes["activations"] / 4
    assert opt.memory_bytes["optimizer"] == 0
    assert acts.step_time_s >= plain.step_time_s
    assert opt.step_time_s > plain.step_time_s
    with pytest.raises(ConstraintError, match="offload is none"):
        one(offload="moon")


def test_the_slowest_device_sets_the_pace():
    nodes = [{"count": 1, "device": d, "devices_per_node": 8} for d in ("h100", "a100")]
    mixed, slow, fast = (
        estimate(LLAMA8B, cluster, StepPlan(ParallelConfig(dp=16, zero=1), 1), batch=64)
        for cluster in (
            ClusterSpec.from_dict({"nodes": nodes}),
            ClusterSpec.preset("dgx-a100", nodes=2),
            ClusterSpec.preset("dgx-h100", nodes=2),
        )
    )
    assert fast.step_time_s < mixed.step_time_s
    assert mixed.step_time_s == pytest.approx(slow.step_time_s, rel=0.05)


def test_decoding_reads_all_weights_for_every_token():
    def serve(tp: int, batch: int = 1):
        return estimate_inference(
            model=LLAMA8B,
            cluster=ClusterSpec.preset("dgx-h100"),
            parallel=ParallelConfig(dp=8 // tp, tp=tp),
            batch=batch,
            prompt=2048,
        )

    one_device = serve(1)
    assert one_device.per_token_s > 16e9 / 3.35e12
    assert serve(8).per_token_s < one_device.per_token_s
    assert serve(1, 16).tokens_per_s_per_device > 5 * one_device.tokens_per_s_per_device
    assert one_device.prefill_s > one_device.per_token_s
    assert one_device.fits
    assert not serve(1, 512).fits
