"""The cost of a library's way of writing a model: steps predicted on 64 H100, beside those of the same model written plainly.

    python -m benchmarks.architectures.plain_ratio [--only NAME ...] [--nodes 8]

One JSON object per language model of transformers, built wide (bf16, four layers, 2048 tokens a sequence, a sequence a rank)
on the meta device: `default_s` as `from_config` gives it, `uncached_s` with `use_cache=False`, and for models with the layout
of Llama `plain_s`, the same arithmetic in plain PyTorch (`plain_twin.py`). A ratio is of the default to the smaller of these;
what the library adds (caches, masks, repeated heads, casts) should leave no trace, so it should be one.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
import warnings
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import autopar

from .plain_twin import TWINS, Twin
from .shrunken import DERIVED

SEQUENCE = 2048
WIDE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "vocab_size": 32000,
    "max_position_embeddings": SEQUENCE,
}
# Where a name is another one, or a size follows from others.
GIVEN: dict[str, dict[str, Any]] = {
    "bloom": {"n_head": 16},
    "codegen": {"rotary_dim": 64, "n_inner": None},
    "falcon": {"num_kv_heads": 4, "ffn_hidden_size": 8192},
    "gpt2": {"n_inner": None},
    "gptj": {"rotary_dim": 64, "n_inner": None},
    "mpt": {"max_seq_len": SEQUENCE},
    "opt": {"word_embed_proj_dim": 2048, "ffn_dim": 8192},
    "gpt_bigcode": {"n_inner": None},
    "glm": {"head_dim": 128},
    "xglm": {"ffn_dim": 8192},
    "biogpt": {"num_key_value_heads": 16},
}
_NAMES = """
llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt2 gpt_neox gptj opt bloom falcon olmo olmo2 stablelm
starcoder2 granite cohere cohere2 mpt glm nemotron smollm3 ernie4_5 helium gpt_bigcode codegen xglm
"""
NAMES = _NAMES.split()


def wide_config(kind: str, **given: Any) -> PreTrainedConfig:
    """The default configuration of a model type, of the sizes above."""
    made = CONFIG_MAPPING[kind]
    default = made().to_dict()
    names = getattr(made, "attribute_map", {})
    sizes = {names.get(name, name): value for name, value in WIDE.items() if names.get(name, name) in default}
    tokens = {k: v % WIDE["vocab_size"] for k, v in default.items() if k.endswith("token_id") and isinstance(v, int)}
    kept = {name: value for name, value in default.items() if name not in DERIVED}
    return made(**(kept | tokens | sizes | GIVEN.get(kind, {}) | given))


def step_s(model: nn.Module, batch: Any, nodes: int) -> tuple[float, str]:
    """Seconds that a step is predicted to take on so many nodes of 8 H100, and the plan."""
    cluster = autopar.ClusterSpec.preset("dgx-h100", nodes=nodes)
    program = autopar.compile(model, cluster, batch, optimizer=functools.partial(torch.optim.AdamW, lr=1e-4))
    return program.predicted.step_time_s, program.plan.show_meshes()


def row(kind: str, nodes: int) -> dict[str, Any]:
    """The seconds of one model, in its ways of being written."""
    config = wide_config(kind)
    tokens = torch.zeros(8 * nodes, SEQUENCE, dtype=torch.long, device="meta")
    batch = {"input_ids": tokens, "labels": tokens}
    begin = time.process_time()
    seconds: dict[str, Any] = {}
    for name, cached in (("default", config.use_cache), ("uncached", False)):
        config.use_cache = cached
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        seconds[f"{name}_s"], seconds[f"{name}_plan"] = step_s(model, batch, nodes)
    if kind in TWINS:
        with torch.device("meta"):
            twin = Twin(config, TWINS[kind]).to(torch.bfloat16)
        seconds["plain_s"], seconds["plain_plan"] = step_s(twin, (tokens, tokens), nodes)
    plain_s = min(seconds["uncached_s"], seconds.get("plain_s", seconds["uncached_s"]))
    return {
        "name": kind,
        "ratio": round(seconds["default_s"] / plain_s, 5),
        **seconds,
        "parameters": sum(p.numel() for p in model.parameters()),
        "cpu_s": round(time.process_time() - begin, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=NAMES)
    parser.add_argument("--nodes", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for kind in args.only:
        try:
            print(json.dumps(row(kind, args.nodes)), flush=True)
        except autopar.AutoparError as error:
            print(json.dumps({"name": kind, "refused": str(error)}), flush=True)


if __name__ == "__main__":
    main()
