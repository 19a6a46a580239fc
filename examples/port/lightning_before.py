"""Train a classifier with Lightning: logged metrics, a scheduler, clipping, validation and the best checkpoint."""

import argparse

import lightning as L
import torch
import torch.nn as nn
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--float64", action="store_true")
parser.add_argument("--out", default="out-lightning")
args = parser.parse_args()

torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
digits = 12 if args.float64 else 4
L.seed_everything(0)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        self.log("train_accuracy", (logits.argmax(-1) == y).float().mean(), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y))
        self.log("val_accuracy", (logits.argmax(-1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


class Printed(Callback):
    def on_train_epoch_end(self, trainer, module):
        told = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
        print(f"epoch {trainer.current_epoch}: " + ", ".join(f"{k} {v:.{digits}f}" for k, v in told.items()))


def loader(n, shuffle):
    x = torch.randn(n, 8)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long()), batch_size=16, shuffle=shuffle)


saver = ModelCheckpoint(args.out, monitor="val_loss", filename="best", enable_version_counter=False)
trainer = L.Trainer(
    max_epochs=args.epochs,
    devices=1,
    precision="64-true" if args.float64 else "32-true",
    gradient_clip_val=1.0,
    callbacks=[saver, Printed()],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Classifier()
trainer.fit(model, loader(76, True), loader(24, False))
print(f"best val_loss {float(saver.best_model_score):.{digits}f}")
