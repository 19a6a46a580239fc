"""Train a small ResNet on images, with augmentation, and evaluate an average of its weights."""

import argparse
import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

import autopar
from resnet import ResNet

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--float64", action="store_true")
parser.add_argument("--out", default="out-image")
args = parser.parse_args()

torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
digits = 12 if args.float64 else 4
torch.manual_seed(0)
os.makedirs(args.out, exist_ok=True)


def images(n):
    """Stripes, of four widths and any phase, in noise."""
    labels = torch.randint(0, 4, (n,))
    columns = torch.arange(16).expand(n, 3, 16, 16) + 8 * torch.rand(n, 1, 1, 1)
    return TensorDataset(torch.sin(columns * (labels.view(-1, 1, 1, 1) + 1) / 3) + torch.randn(n, 3, 16, 16), labels)


def augment(x):
    """A random crop of the padded image, and a random flip."""
    top, left = torch.randint(0, 5, (2,)).tolist()
    x = nn.functional.pad(x, (2, 2, 2, 2))[..., top : top + 16, left : left + 16]
    return x.flip(-1) if torch.rand(()) < 0.5 else x


train_loader = DataLoader(images(96), batch_size=16, shuffle=True, drop_last=True)
val_loader = DataLoader(images(40), batch_size=16)

model = ResNet(classes=4)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(train_loader))
x, y = train_loader.dataset[:16]
average = autopar.Entry((x,), loss_fn=None, ema=0.9, buckets={"0": {0: (16, 8)}})
loss_fn, entries = lambda out, y: (criterion(out, y), out), {"evaluate": average}
step = autopar.parallelize(model, "here", (x, y), loss_fn=loss_fn, optimizer=optimizer, entries=entries)


@torch.no_grad()
def evaluate():
    loss_sum = correct = total = 0
    for x, y in val_loader:
        _, out = step.evaluate(x)
        loss_sum += criterion(out, y).item() * len(y)
        correct += (out.argmax(1) == y.to(out.device)).sum().item()
        total += len(y)
    return loss_sum / total, correct / total


for epoch in range(args.epochs):
    model.train()
    loss_sum = correct = total = 0
    for x, y in train_loader:
        x = augment(x)
        loss, out = step(x, y)
        scheduler.step()
        loss_sum += loss.item() * len(y)
        correct += (out.argmax(1) == y.to(out.device)).sum().item()
        total += len(y)
    val_loss, val_accuracy = evaluate()
    print(f"epoch {epoch}: lr {scheduler.get_last_lr()[0]:.4e}", end=", ")
    print(f"train loss {loss_sum / total:.{digits}f} accuracy {correct / total:.4f}", end=", ")
    print(f"average's val loss {val_loss:.{digits}f} accuracy {val_accuracy:.4f}")
step.save(os.path.join(args.out, "last"))
