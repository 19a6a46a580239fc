"""Refusals by name, on one rank: `refusals_script.py KIND FOLDER refusals`; writes the messages."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import transformers

from autopar.errors import AutoparError
from autopar.integrations.lightning import AutoparStrategy
from autopar.integrations.transformers import Trainer
from tests.integrations.lightning_script import Classifier, loader
from tests.integrations.trainer_script import COMMON, Rows, bert


class Averaging(transformers.TrainerCallback):
    """Writes to the weights, as averaging does."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)


class Freezing(transformers.TrainerCallback):
    """Freezes a parameter after the first update."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        next(model.parameters()).requires_grad_(False)


class Gradients(transformers.TrainerCallback):
    """Wants gradients."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None: ...


class Annealed(Trainer):  # type: ignore[misc, valid-type]
    """Weighs its loss by the number of steps done."""

    def compute_loss(self, *args: Any, **named: Any) -> Any:
        return super().compute_loss(*args, **named) * (1 + self.state.global_step)


class Counting(Classifier):
    """Weighs its loss by the number of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * (1 + batch_idx)


class WithHook(Classifier):
    """Wants gradients."""

    def on_after_backward(self) -> None: ...


def train(folder: Path, kind: Any = Trainer, callbacks: Any = (), rows: int = 16, **arguments: Any) -> None:
    args = transformers.TrainingArguments(
        output_dir=str(folder / "run"), **COMMON | {"save_strategy": "no"} | arguments
    )
    kind(model=bert(), args=args, train_dataset=Rows(rows, "class", 1), callbacks=list(callbacks)).train()


def fit(folder: Path, module: Any) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        precision="64-true",
        strategy=AutoparStrategy(),
        max_epochs=1,
        enable_progress_bar=False,
        logger=False,
        default_root_dir=folder,
    )
    trainer.fit(module, loader(16, 1, shuffle=False))


def main(folder: Path) -> None:
    tries: dict[str, Callable[[], None]] = {
        "averaging": lambda: train(folder, callbacks=[Averaging()]),
        "freezing": lambda: train(folder, callbacks=[Freezing()]),
        "gradients": lambda: train(folder, callbacks=[Gradients()]),
        "annealed": lambda: train(folder, Annealed),
        "compiled": lambda: train(folder, torch_compile=True),
        "counting": lambda: fit(folder, Counting()),
        "hook": lambda: fit(folder, WithHook()),
    }
    said = {}
    for name, attempt in tries.items():
        try:
            attempt()
            said[name] = "nothing"
        except AutoparError as error:
            said[name] = str(error)
    (folder / "refusals.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[2]))
