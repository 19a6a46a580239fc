"""Scripts of Lightning, on one device or with autopar's strategy: `lightning_script.py KIND FOLDER CASE…`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("train_loss", loss, on_step=True)
        self.log("train_accuracy", (logits.argmax(-1) == y).double().mean(), on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(
            [float(outputs["loss"]), float(outputs["logits"].sum()), float(self.net[0].weight.detach().sum())]
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.net(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y))
        self.log("val_accuracy", (logits.argmax(-1) == y).double().mean())

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() == 1]
        optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=2e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(rows: int, seed: int, shuffle: bool) -> Any:
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=numbers, dtype=torch.float64)
    y = (x.sum(1) > 0).long() + (x[:, 0] > 1).long()
    return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=shuffle)


def run(kind: str, folder: Path, case: str) -> None:
    """Fit and validate as a case says, and write what was found."""
    name, _, mark = case.partition("@")
    pl.seed_everything(5)
    strategy: Any = "auto"
    if kind == "autopar":
        from autopar.integrations.lightning import AutoparStrategy

        strategy = AutoparStrategy()
    saver = ModelCheckpoint(folder / f"{name}-run", monitor="val_loss", save_top_k=1, save_last=True)
    arguments: dict[str, Any] = {"max_epochs": 4, "gradient_clip_val": 0.5, "callbacks": [saver]}
    if name == "accumulated":
        arguments |= {"accumulate_grad_batches": 2, "gradient_clip_val": None}
    if name == "early":
        arguments |= {"max_epochs": 20, "callbacks": [saver, EarlyStopping("val_accuracy", patience=1, mode="max")]}
    if mark.isdigit():
        arguments |= {"max_epochs": int(mark)}
    module = Classifier()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        precision="64-true",
        strategy=strategy,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=folder,
        **arguments,
    )
    checkpoint = str(folder / f"{name}-run" / "last.ckpt") if mark and not mark.isdigit() else None
    trainer.fit(module, loader(28, 1, shuffle=name != "resumed"), loader(10, 2, shuffle=False), ckpt_path=checkpoint)
    fitted = {key: float(value) for key, value in trainer.callback_metrics.items()}
    validated = trainer.validate(module, loader(11, 3, shuffle=False), verbose=False)
    best = float(saver.best_model_score) if saver.best_model_score is not None else None
    if trainer.is_global_zero:
        sums = {key: float(p.detach().square().sum()) for key, p in module.named_parameters()}
        told = {
            "seen": module.seen,
            "fitted": fitted,
            "validated": validated,
            "sums": sums,
            "steps": trainer.global_step,
        }
        told |= {"best": best, "epochs": trainer.current_epoch, "rate": trainer.optimizers[0].param_groups[0]["lr"]}
        (folder / f"{case}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    assert os.environ.get("WORLD_SIZE", "1") == "1" or sys.argv[1] == "autopar"
    for one in sys.argv[3:]:
        run(sys.argv[1], Path(sys.argv[2]), one)
