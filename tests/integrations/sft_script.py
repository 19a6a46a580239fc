"""Scripts of trl's trainers, of the original classes or of autopar's: `sft_script.py KIND FOLDER CASE…`, as trainer_script.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import datasets
import peft
import tokenizers
import torch
import transformers
import trl

LENGTH = 16
WORDS = [f"w{i}" for i in range(60)]


def tokenizer() -> Any:
    """A tokenizer of whole words, made here."""
    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def llama(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
        eos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config).double()


def texts(rows: int, seed: int, column: str = "text") -> list[dict[str, str]]:
    numbers = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, LENGTH - 2, (rows,), generator=numbers).tolist()
    picks = [torch.randint(0, len(WORDS), (n,), generator=numbers).tolist() for n in lengths]
    return [{column: " ".join(WORDS[i] for i in row)} for row in picks]


def pairs(rows: int, seed: int) -> list[dict[str, str]]:
    parts = [texts(rows, seed + i) for i in range(3)]
    short = [[" ".join(row["text"].split()[:4]) for row in part] for part in parts]
    return [{"prompt": p, "chosen": " " + c, "rejected": " " + r} for p, c, r in zip(*short, strict=True)]


COMMON: dict[str, Any] = {
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "seed": 3,
    "num_train_epochs": 2,
    "bf16": False,
    "max_length": LENGTH,
    "pad_to_multiple_of": LENGTH,
    "eval_strategy": "epoch",
    "save_strategy": "no",
}


def run(kind: str, folder: Path, case: str) -> None:
    """Train and evaluate as a case says, and write what was found."""
    batch = 8 // int(os.environ.get("WORLD_SIZE", "1"))
    arguments = COMMON | {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch}
    trainer_class: Any = trl.DPOTrainer if case == "dpo" else trl.SFTTrainer
    config: Any = trl.DPOConfig if case == "dpo" else trl.SFTConfig
    if kind == "autopar":
        from autopar.integrations.transformers import parallel

        trainer_class = parallel(trainer_class)
    lora = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    rows = pairs if case == "dpo" else texts
    if case == "accumulated":
        arguments |= {"gradient_accumulation_steps": 2}
    torch.manual_seed(1)
    trainer = trainer_class(
        model=llama(),
        args=config(output_dir=str(folder / f"{case}-run"), **arguments),
        train_dataset=datasets.Dataset.from_list(rows(16, 1)),
        eval_dataset=datasets.Dataset.from_list(rows(8, 2)),
        processing_class=tokenizer(),
        **({"peft_config": lora} if case == "lora" else {"ref_model": llama(2)} if case == "dpo" else {}),
    )
    result = trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        sums = {key: float(p.detach().double().square().sum()) for key, p in trainer.model.named_parameters()}
        told = {"history": trainer.state.log_history, "loss": result.training_loss, "metrics": metrics, "sums": sums}
        (folder / f"{case}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    for one in sys.argv[3:]:
        run(sys.argv[1], Path(sys.argv[2]), one)
