"""A tiny configuration of any architecture of transformers: the default one with every size replaced by a small one.

Sizes are known by the names that configurations use for them. What is derived from sizes (a list with one entry a layer,
a width per head) is left out, so that the configuration derives it again; configurations inside a configuration are treated
the same way. Layers are not dropped at random, which a program refuses. Everything else, options and dropouts too, stays as its
author set it.
"""

from __future__ import annotations

from typing import Any

VOCABULARY, SEQUENCE, IMAGE = 96, 16, 32

_SIZES: dict[str, int] = {
    "hidden_size d_model n_embd dim model_dim embed_dim embedding_size word_embed_proj_dim embedding_dim width "
    "encoder_hidden_size decoder_hidden_size hidden_dim d_embed lru_width attention_hidden_size emb_dim n_embed "
    "input_embedding_size text_hidden_size model_width": 32,
    "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers depth "
    "num_decoder_layers num_blocks": 2,
    "num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads num_heads "
    "encoder_num_attention_heads decoder_num_attention_heads mamba_num_heads "
    "linear_num_heads": 4,
    "intermediate_size ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim d_ff d_inner feed_forward_size ffn_hidden_size "
    "filter_size feedforward_dim inner_dim pooler_fc_size dense_intermediate_size mlp_hidden_size": 64,
    "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size expert_ffn_dim attn_hidden_size "
    "moe_shared_expert_intermediate_size shared_intermediate_size": 32,
    "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts n_experts": 4,
    "num_experts_per_tok moe_k moe_top_k top_k_experts num_selected_experts moe_topk experts_per_token": 2,
    "n_group topk_group n_shared_experts num_shared_experts first_k_dense_replace": 1,
    "q_lora_rank kv_lora_rank": 16,
    "qk_nope_head_dim qk_rope_head_dim v_head_dim head_dim d_kv attention_head_dim linear_head_dim": 8,
    "state_size mamba_d_state ssm_state_size mamba_d_head time_step_rank mamba_dt_rank patch_size hidden_size_per_layer_input "
    "mamba_chunk_size chunk_size": 8,
    "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions max_seq_len max_length "
    "max_sequence_length context_length original_max_position_embeddings": 64,
    "vocab_size vocab_size_per_layer_input entity_vocab_size": VOCABULARY,
    "image_size": IMAGE,
    "num_key_value_heads": 2,
}
SIZES = {name: size for names, size in _SIZES.items() for name in names.split()}
_DERIVED = """
layer_types layers_block_type attention_types block_types mlp_layer_types attention_layers head_dim sub_layers_types
sliding_window_pattern layer_type no_rope_layers moe_layers architectures transformers_version id2label label2id
per_layer_sliding_windows full_attn_idxs attn_layer_indices model_type dtype
"""
DERIVED = frozenset(_DERIVED.split())


def shrunken(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration, made small."""
    small: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and ("hidden_size" in value or "d_model" in value or name.endswith("_config")):
            small[name] = shrunken(value) | ({"model_type": value["model_type"]} if "model_type" in value else {})
        elif name in DERIVED:
            continue
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            small[name] = min(value, SIZES[name])
        elif name.endswith("layerdrop"):
            small[name] = 0.0
        elif name.endswith("token_id") and isinstance(value, int):
            small[name] = value % VOCABULARY
        elif name.endswith("token_id") and isinstance(value, list):
            small[name] = [v % VOCABULARY for v in value]
        else:
            small[name] = value
    if "num_key_value_heads" in small and config.get("num_key_value_heads") == config.get("num_attention_heads"):
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small
