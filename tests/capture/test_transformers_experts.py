"""Mixtures of experts of Hugging Face's transformers, where it is installed, as their authors wrote them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import autopar

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


@pytest.mark.parametrize("name", MODELS)
def test_a_mixture_of_experts_trains_on_four_ranks_as_on_one(name: str) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    tokens = torch.randint(3, 64, (8, 8))
    batch = {"input_ids": tokens, "labels": tokens}
    optimizer = functools.partial(torch.optim.SGD, lr=0.01)
    program = autopar.compile(model, autopar.ClusterSpec.local(4), batch, optimizer=optimizer)
    assert len(program.captured.exported.known_blocks) == (
        2 if name == "JetMoe" else 1
    )  # its attention has experts too
    assert autopar.verify(program, model, batch).max_error <= 1e-9
    plan = autopar.random_plan(program, 7, pp=1)
    other = autopar.compile(model, autopar.ClusterSpec.local(4), batch, optimizer=optimizer, plan=plan)
    assert autopar.verify(other, model, batch).max_error <= 1e-9
