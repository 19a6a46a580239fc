"""Fine-tune a BERT-like classifier with transformers.Trainer, evaluated after every epoch."""

import argparse

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--float64", action="store_true")
parser.add_argument("--out", default="out-trainer")
args = parser.parse_args()

digits = 12 if args.float64 else 4
torch.manual_seed(0)


class Sentences(Dataset):
    """Rows of tokens, padded to one length, of two classes."""

    def __init__(self, n, length=16):
        self.ids = torch.randint(2, 64, (n, length))
        self.mask = (torch.arange(length) < torch.randint(length // 2, length + 1, (n, 1))).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        ids = self.ids[i] * self.mask[i]
        return {"input_ids": ids, "attention_mask": self.mask[i], "labels": (ids > 40).sum() % 2}


config = BertConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=16,
    num_labels=2,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config).to(torch.float64 if args.float64 else torch.float32)


def compute_metrics(prediction):
    return {"accuracy": float((np.argmax(prediction.predictions, -1) == prediction.label_ids).mean())}


trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=args.out,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        learning_rate=5e-3,
        weight_decay=0.01,
        warmup_steps=3,
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to=[],
    ),
    train_dataset=Sentences(44),
    eval_dataset=Sentences(20),
    compute_metrics=compute_metrics,
)
trainer.train()
metrics = trainer.evaluate()
if trainer.is_world_process_zero():
    for told in (*trainer.state.log_history, metrics):
        numbers = {name: value for name, value in told.items() if not name.endswith(("time", "per_second"))}
        print(", ".join(f"{name} {value:.{digits}g}" for name, value in numbers.items()))
