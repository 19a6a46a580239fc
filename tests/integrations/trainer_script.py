"""A training script as users write one, of the original classes or of autopar's: `trainer_script.py KIND FOLDER CASE…`.

Under torchrun KIND is "autopar"; "original" is the oracle, on one device with the ranks' batches together. What it finds goes to
FOLDER as JSON, a file per case: the log history, metrics, and the trained weights' sums. A case may be followed by `@N`, to stop
after N updates and save, or by `@CHECKPOINT`, to go on from one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils.data import Dataset, IterableDataset

LENGTH, VOCABULARY = 12, 64


class Rows(Dataset):  # type: ignore[type-arg]
    def __init__(self, rows: int, labels: str, seed: int) -> None:
        numbers = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=numbers)
        self.lengths = torch.randint(LENGTH // 2, LENGTH + 1, (rows,), generator=numbers)
        self.labels = labels

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Any]:
        mask = (torch.arange(LENGTH) < self.lengths[i]).long()
        ids = self.ids[i] * mask
        label = ids.sum() % 3 if self.labels == "class" else torch.where(mask.bool(), ids, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": label}


def bert() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config).double()


def gpt2() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config).double()


def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).double()


def lora() -> torch.nn.Module:
    import peft

    model = llama()
    torch.manual_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )


def exact_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """The loss of a causal model in the precision of its logits, which transformers' own narrows to float32."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    return loss / (num_items_in_batch if num_items_in_batch is not None else targets.ne(-100).sum())


def accuracy(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": float((np.argmax(logits, -1) == prediction.label_ids).mean())}


COMMON: dict[str, Any] = {
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "seed": 3,
    "num_train_epochs": 2,
}
CASES: dict[str, dict[str, Any]] = {
    "bert": {
        "model": bert,
        "labels": "class",
        "rows": 30,  # an odd last batch
        "args": {
            "eval_strategy": "steps",
            "eval_steps": 3,
            "save_strategy": "steps",
            "save_steps": 3,
            "load_best_model_at_end": True,
            "metric_for_best_model": "accuracy",
            "weight_decay": 0.1,
            "warmup_steps": 2,
            "max_grad_norm": 0.5,
        },
        "metrics": accuracy,
    },
    "gpt2": {
        "model": gpt2,
        "labels": "words",
        "rows": 40,
        "args": {
            "gradient_accumulation_steps": 2,
            "lr_scheduler_type": "cosine",
            "eval_strategy": "epoch",
            "max_grad_norm": 0.0,
        },
        "loss": exact_loss,
    },
    "gpt2_own_loss": {"model": gpt2, "labels": "words", "rows": 16, "args": {"gradient_accumulation_steps": 2}},
    "smoothing": {"model": bert, "labels": "class", "rows": 16, "args": {"label_smoothing_factor": 0.1}},
    "llama_lora": {
        "model": lora,
        "labels": "words",
        "rows": 16,
        "args": {"eval_strategy": "epoch", "save_strategy": "epoch"},
        "loss": exact_loss,
    },
    "own": {
        "model": bert,
        "labels": "class",
        "rows": 32,
        "args": {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 4},
        "metrics": accuracy,
        "looks": True,
    },
    "early": {
        "model": bert,
        "labels": "class",
        "rows": 16,
        "args": {
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_strategy": "steps",
            "save_steps": 1,
            "load_best_model_at_end": True,
            "learning_rate": 1e-1,
            "num_train_epochs": 10,
        },
        "metrics": accuracy,
        "callbacks": lambda: [transformers.EarlyStoppingCallback(early_stopping_patience=2)],
    },
}


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Rows without a length."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return (self.rows[i] for i in range(len(self.rows)))


class Looking(transformers.TrainerCallback):
    """Notes the sum of the weights after every update."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        self.sums.append(sum(float(p.detach().square().sum()) for p in model.parameters()))


def own_trainer(base: Any) -> Any:
    """A trainer of the script's own, whose loss is another one than the model's."""

    class OwnTrainer(base):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs["labels"]
            outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
            weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
            loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weights, label_smoothing=0.1)
            return (loss, outputs) if return_outputs else loss

    return OwnTrainer


def own_optimizer(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


class StopAt(transformers.TrainerCallback):
    """Ends a run after a step, as a machine that goes away does, but for what is saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> Any:
        control.should_training_stop = state.global_step >= self.step
        return control


def evaluations() -> list[int]:
    """Takes an entry for every batch that a program evaluates from now on."""
    import autopar

    counted: list[int] = []
    evaluate = autopar.Step.evaluate

    def counting(step: Any, *batch: Any) -> Any:
        counted.append(1)
        return evaluate(step, *batch)

    autopar.Step.evaluate = counting  # type: ignore[method-assign, assignment]
    return counted


def run(kind: str, folder: Path, case: str) -> None:
    """Train, evaluate and predict as a case says, and write what was found."""
    name, _, mark = case.partition("@")
    given, ranks = CASES[name], int(os.environ.get("WORLD_SIZE", "1"))
    batch = 8 // ranks
    arguments = COMMON | given["args"] | {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch}
    callbacks = given["callbacks"]() if "callbacks" in given else []
    if mark.isdigit():
        arguments |= {"save_strategy": "steps", "save_steps": int(mark), "load_best_model_at_end": False}
        callbacks.append(StopAt(int(mark)))
    args = transformers.TrainingArguments(output_dir=str(folder / f"{name}-run"), **arguments)
    if kind == "autopar":
        from autopar.integrations.transformers import Trainer
    else:
        from transformers import Trainer
    model, own = given["model"](), given.get("looks", False)
    looking = [Looking()] if own else []
    trainer = (own_trainer(Trainer) if own else Trainer)(
        model=model,
        args=args,
        train_dataset=Stream(Rows(given["rows"], given["labels"], 1))
        if own
        else Rows(given["rows"], given["labels"], 1),
        optimizers=own_optimizer(model) if own else (None, None),
        eval_dataset=Rows(13, given["labels"], 2),
        compute_metrics=given.get("metrics"),
        compute_loss_func=given.get("loss"),
        callbacks=[*callbacks, *looking],
    )
    checkpoint = str(folder / f"{name}-run" / mark) if mark and not mark.isdigit() else None
    counted = evaluations() if kind == "autopar" else []
    result = trainer.train(resume_from_checkpoint=checkpoint)
    metrics = trainer.evaluate()
    predicted = trainer.predict(Rows(5, given["labels"], 4)).metrics
    if kind == "autopar":
        assert counted, "the program evaluated nothing"
    if trainer.is_world_process_zero():
        sums = {key: float(p.detach().double().square().sum()) for key, p in trainer.model.named_parameters()}
        told = {
            "history": trainer.state.log_history,
            "loss": result.training_loss,
            "metrics": metrics,
            "predicted": predicted,
        }
        told |= {"sums": sums, "steps": trainer.state.global_step, "best": trainer.state.best_metric}
        told["seen"] = [one.sums for one in looking]
        (folder / f"{case}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    for one in sys.argv[3:]:
        run(sys.argv[1], Path(sys.argv[2]), one)
