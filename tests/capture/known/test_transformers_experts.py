"""Mixtures of experts of Hugging Face's transformers, where it is installed, as their authors wrote them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from tests.measure import measure_peak
from tests.ops.rings import carrying

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WITH_SHARED = {"n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": SIZES | EXPERTS,
    "GptOss": SIZES | EXPERTS | {"head_dim": 8, "layer_types": ["full_attention"]},
    "NemotronH": SIZES
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8, "n_group": 1}
    | {"topk_group": 1, "moe_shared_expert_intermediate_size": 16, "layers_block_type": ["moe", "attention"]},
    "Dbrx": {
        "vocab_size": 64,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 1,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {
            "ffn_hidden_size": 16,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_jitter_eps": 0.0,
            "hidden_size": 32,
        },
    },
    "JetMoe": SIZES | EXPERTS | {"kv_channels": 8, "output_router_logits": True, "aux_loss_coef": 0.1},
    "LongcatFlash": SIZES
    | {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 32}
    | {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    | {"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 8},
}


IN_ONE_OP: dict[str, dict[str, Any]] = {
    "Mixtral": MODELS["Mixtral"] | {"output_router_logits": True, "router_aux_loss_coef": 0.1},
    "GptOss": MODELS["GptOss"],
    "Qwen3Moe": SIZES
    | {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True}
    | {"num_hidden_layers": 2, "output_router_logits": True},
    "DeepseekV3": SIZES
    | WITH_SHARED
    | {
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
    }
    | {"qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 8},
}
"""Models whose activations have names: auxiliary losses, biases and clamps, two layers, shared experts."""
SGD = functools.partial(torch.optim.SGD, lr=0.01)


def random_model(name: str, sizes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model


def tokens(seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (8, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("name", IN_ONE_OP)
def test_experts_on_their_own_ranks_train_as_on_one(name: str) -> None:
    model, batch = random_model(name, IN_ONE_OP[name]), tokens()
    options = autopar.Options(mesh={"ep": 4}, on_overflow="chunk", microbatches=1)
    program = autopar.compile(model, autopar.ClusterSpec.local(4), batch, optimizer=SGD, options=options)
    travelling = program.with_plan(carrying(program, "ep"))
    calls = [line for line in travelling.source(0).splitlines() if " experts.experts" in line]
    assert calls
    assert all("along=rt.along('ep')" in line for line in calls)
    for seed in (0, 1):
        assert autopar.verify(travelling, model, tokens(seed)).max_error <= 1e-9
    carried = 0
    for seed in range(12):
        other = program.with_plan(autopar.random_plan(program, seed, pp=1))
        carried += any(" experts.experts" in line and "along=" in line for line in other.source(0).splitlines())
        if seed < 3:
            assert autopar.verify(other, model, batch).max_error <= 1e-9
    assert carried


def test_what_a_rank_holds_stays_within_what_is_promised_for_its_experts() -> None:
    """Whatever the batch chooses."""
    sizes = IN_ONE_OP["Mixtral"] | {"hidden_size": 64, "intermediate_size": 256}
    model, batch = random_model("Mixtral", sizes), tokens()
    options = autopar.Options(mesh={"ep": 4}, on_overflow="chunk", recompute="none", microbatches=1)
    program = autopar.compile(model, autopar.ClusterSpec.local(4), batch, optimizer=SGD, options=options)
    travelling = program.with_plan(carrying(program, "ep"))
    for ids in (tokens()["input_ids"], torch.full((8, 8), 5)):
        measured = measure_peak(travelling, {"input_ids": ids, "labels": ids})
        assert max(measured) <= travelling.predicted.peak_bytes * 1.005


def test_a_batch_that_all_goes_to_few_experts_stops_by_name() -> None:
    model, one = random_model("Mixtral", IN_ONE_OP["Mixtral"]), torch.full((8, 8), 5)
    options = autopar.Options(mesh={"ep": 4}, microbatches=1)
    program = autopar.compile(model, autopar.ClusterSpec.local(4), tokens(), optimizer=SGD, options=options)
    travelling = program.with_plan(carrying(program, "ep"))
    with pytest.raises(
        autopar.ExpertOverflow, match=r"modeling_mixtral\.py:\d+: .* along ep .*promised for 40 \(1\.25 times"
    ):
        travelling.run([{"input_ids": one, "labels": one}])


def test_a_check_on_few_samples_is_not_stopped_by_what_they_choose() -> None:
    model, ids = random_model("Mixtral", IN_ONE_OP["Mixtral"]), torch.randint(3, 64, (64, 8))
    options, batch = autopar.Options(mesh={"ep": 4}, microbatches=1), {"input_ids": ids, "labels": ids}
    program = autopar.compile(model, autopar.ClusterSpec.local(4), batch, optimizer=SGD, options=options)
    travelling = program.with_plan(carrying(program, "ep"))
    checked = autopar.check(travelling)
    assert checked.ok
    assert checked.batch < 64


def test_a_plan_is_replayed_under_another_promise() -> None:
    model, batch = random_model("Mixtral", IN_ONE_OP["Mixtral"]), tokens()
    options = autopar.Options(mesh={"ep": 4}, microbatches=1)
    program = autopar.compile(model, autopar.ClusterSpec.local(4), batch, optimizer=SGD, options=options)
    wider = replace(options, expert_imbalance=4.0)
    plan, cluster = carrying(program, "ep"), autopar.ClusterSpec.local(4)
    other = autopar.compile(model, cluster, batch, optimizer=SGD, options=wider, plan=plan)
    assert other.predicted.peak_bytes > program.with_plan(plan).predicted.peak_bytes
    assert autopar.verify(other, model, batch).max_error <= 1e-9


def test_an_activation_without_a_name_stays_as_it_is() -> None:
    model, batch = random_model("Mixtral", IN_ONE_OP["Mixtral"] | {"hidden_act": "mish"}), tokens()
    program = autopar.compile(model, autopar.ClusterSpec.local(4), batch, optimizer=SGD)
    assert program.captured.exported.known_blocks[0].endswith("known_transformers.decorated")
    assert autopar.verify(program, model, batch).max_error <= 1e-9


@pytest.mark.parametrize("name", MODELS)
def test_a_mixture_of_experts_trains_on_four_ranks_as_on_one(name: str) -> None:
    model, batch, options = random_model(name, MODELS[name]), tokens(), autopar.Options(on_overflow="chunk")
    program = autopar.compile(model, autopar.ClusterSpec.local(4), batch, optimizer=SGD, options=options)
    assert len(program.captured.exported.known_blocks) == (
        2 if name == "JetMoe" else 1
    )  # its attention has experts too
    assert autopar.verify(program, model, batch).max_error <= 1e-9
    plan = autopar.random_plan(program, 7, pp=1)
    other = autopar.compile(model, autopar.ClusterSpec.local(4), batch, optimizer=SGD, options=options, plan=plan)
    assert autopar.verify(other, model, batch).max_error <= 1e-9
