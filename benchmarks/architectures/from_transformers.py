"""Architectures of transformers, tiny: every model type once, with the first head that it has of those listed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .case import Case
from .shrunken import IMAGE, SEQUENCE, VOCABULARY, shrunken

BATCH = 4

SWIN = {"embed_dim": 24, "depths": [1, 1], "num_heads": [3, 6], "window_size": 4, "patch_size": 4, "out_features": None}
# What a tiny configuration needs beside small sizes.
GIVEN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "donut-swin": SWIN,
    "esm": {"vocab_size": 96, "pad_token_id": 1, "mask_token_id": 32},
    "gemma4_text": {"per_layer_config": None, "layer_types": ["sliding_attention", "full_attention"]},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_token": 2,
    },
    "longt5": {"decoder_start_token_id": 0},
    "swin": SWIN,
    "swinv2": SWIN,
    "switch_transformers": {"decoder_start_token_id": 0},
    "t5": {"decoder_start_token_id": 0},
    "deit": {"num_labels": 2},
    "dinov2": {"out_features": None, "out_indices": None},
    "dinov2_with_registers": {"out_features": None, "out_indices": None},
    "beit": {"out_features": None, "out_indices": None},
    "nemotron_h": {"hybrid_override_pattern": "M*"},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1},
    "gemma3n_text": {
        "intermediate_size": [64, 64],
        "activation_sparsity_pattern": [0.95, 0.0],
        "num_kv_shared_layers": 0,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_n_groups": 1, "layer_types": ["mamba", "attention"]},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "mobilebert": {"embedding_size": 16},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 4},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen4_exp_text": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "xlnet": {"d_head": 8},
    "reformer": {"is_decoder": True},
    "marian": {"pad_token_id": 0, "decoder_start_token_id": 0},
    "zamba": {"layer_types": ["mamba", "hybrid"]},
    "zamba2": {"layer_types": ["mamba", "hybrid"], "n_mamba_heads": 8},
}
# Where an image is wanted in another size.
IMAGES = {
    "dinat": 64,
    "hgnet_v2": 128,
    "levit": 64,
    "swiftformer": 64,
    "efficientnet": 64,
    "mobilevit": 64,
    "mobilevitv2": 64,
}


def cases() -> list[Case]:
    """One case a model type."""
    heads: list[tuple[str, Any, Callable[[PreTrainedConfig, str], Any]]] = [
        ("MODEL_FOR_CAUSAL_LM", AutoModelForCausalLM, _tokens),
        ("MODEL_FOR_MASKED_LM", AutoModelForMaskedLM, _tokens),
        ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", AutoModelForSeq2SeqLM, _tokens),
        ("MODEL_FOR_IMAGE_CLASSIFICATION", AutoModelForImageClassification, _images),
    ]
    by_type: dict[str, Case] = {}
    for mapping, auto, batch in heads:
        for kind in getattr(modeling_auto, f"{mapping}_MAPPING_NAMES"):
            if kind in CONFIG_MAPPING and kind not in by_type:
                by_type[kind] = Case(kind, "transformers", _maker(kind, auto, batch))
    return list(by_type.values())


def tiny_config(kind: str, **given: Any) -> PreTrainedConfig:
    """The default configuration of a model type, with small sizes."""
    made = CONFIG_MAPPING[kind]
    return made(**(shrunken(made().to_dict()) | GIVEN.get(kind, {}) | given))


def _maker(kind: str, auto: Any, batch: Callable[[PreTrainedConfig, str], Any]) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        config = tiny_config(kind)
        return auto.from_config(config), batch(config, kind)

    return make


def _tokens(config: PreTrainedConfig, kind: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY - 3, (BATCH, SEQUENCE))
    return {"input_ids": ids, "labels": ids.clone()}


def _images(config: PreTrainedConfig, kind: str) -> dict[str, torch.Tensor]:
    size = IMAGES.get(kind, IMAGE)
    channels = getattr(config, "num_channels", 3)
    return {"pixel_values": torch.randn(BATCH, channels, size, size), "labels": torch.randint(0, 2, (BATCH,))}
